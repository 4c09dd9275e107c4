"""How layers make their parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(
    init: Callable[..., jax.Array],
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    rngs: nnx.Rngs,
    dtype: Any,
) -> nnx.Param:
    """A parameter whose axes carry the mesh axes that may split them.

    The names are there for `nnx.get_partition_spec`. Nothing is placed while the layer
    is built: a mesh need not have these axes.
    """
    value = init(rngs.params(), shape, dtype)
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


def at_dtype(weight: nnx.Param, dtype: Any) -> jax.Array:
    """The parameter's value, in the computation's dtype if there is one."""
    value = jnp.asarray(weight[...])
    return value if dtype is None else value.astype(dtype)
