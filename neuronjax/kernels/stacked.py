"""One layer of arrays that hold all layers, inside a loop over layers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from neuronjax.kernels.own_derivative import own_derivative

_BITS = {1: jnp.uint8, 2: jnp.uint16}


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether XLA on a CPU widens such an array as a whole before it cuts a layer."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize in _BITS


def layer_at(stack: Any, i: jax.Array) -> Any:
    """Layer `i` of a pytree of stacked arrays.

    A narrow float is cut out of bytes, behind a barrier that keeps the bytes in the
    loop as well: XLA on a CPU would widen all layers before the loop, to temporaries
    of 2.3 times the stack (tests/test_transformer_tkg_memory.py). Each has its own:
    behind a common one all would vary over every mesh axis that any of them does.
    """

    def row(x):
        x, own = lax.optimization_barrier((x, i)) if is_narrow(x.dtype) else (x, i)
        return _row(x, own)

    return jax.tree.map(row, stack)


def _row(x: jax.Array, i: jax.Array) -> jax.Array:
    if not is_narrow(x.dtype):
        return lax.dynamic_index_in_dim(x, i, keepdims=False)
    return _narrow_row(x, i)


# Bits have no derivative.
@own_derivative(
    lambda primals, tangents: lax.dynamic_index_in_dim(
        tangents[0], primals[1], keepdims=False
    )
)
def _narrow_row(x: Any, i: Any) -> Any:
    raw = lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])
    row = lax.dynamic_index_in_dim(raw, i, keepdims=False)
    return lax.bitcast_convert_type(row, x.dtype)
