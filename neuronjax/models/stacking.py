"""A list of equal layers as one layer with a leading axis, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from neuronjax.nn.quantization.codes import as_bytes, as_codes


def stack_layers(layers: Sequence[nnx.Module]) -> Any:
    """One module whose every array holds those of `layers`, on a new leading axis."""
    graphs, states = zip(*map(nnx.split, layers), strict=True)

    def stack(*rows):
        value = jnp.stack([as_bytes(row[...]) for row in rows])
        return rows[0].replace(value, out_sharding=(None, *rows[0].out_sharding))

    return nnx.merge(graphs[0], jax.tree.map(stack, *states, is_leaf=_is_variable))


def unstack_layers(layers: Any, count: int) -> list[Any]:
    """The `count` modules that `stack_layers` was given."""
    graph, state = nnx.split(layers)

    def row(i):
        def take(stacked):
            value = as_codes(stacked[...][i], stacked)
            return stacked.replace(value, out_sharding=stacked.out_sharding[1:])

        return jax.tree.map(take, state, is_leaf=_is_variable)

    return [nnx.merge(graph, row(i)) for i in range(count)]


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
