"""A list of equal layers as one layer with a leading axis, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

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


def layer_at(stack: Any, i: jax.Array) -> Any:
    """Layer `i` of stacked arrays, inside a loop over layers.

    XLA on a CPU would widen all layers of a two-byte array before the loop: there it is
    cut out of bytes, behind a barrier that keeps the bytes in the loop as well.
    """
    narrow = any(_is_narrow(x) for x in jax.tree.leaves(stack))
    i, stack = lax.optimization_barrier((i, stack)) if narrow else (i, stack)
    return jax.tree.map(lambda x: _row(x, i), stack)


def _is_narrow(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2


@jax.custom_jvp
def _row(x: jax.Array, i: jax.Array) -> jax.Array:
    if not _is_narrow(x):
        return lax.dynamic_index_in_dim(x, i, keepdims=False)
    raw = lax.bitcast_convert_type(x, jnp.uint16)
    row = lax.dynamic_index_in_dim(raw, i, keepdims=False)
    return lax.bitcast_convert_type(row, x.dtype)


@_row.defjvp
def _row_jvp(primals, tangents):
    (x, i), (dx, _) = primals, tangents
    return _row(x, i), lax.dynamic_index_in_dim(dx, i, keepdims=False)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
