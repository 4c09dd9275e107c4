"""Parts of arrays of narrow floats, read and written as their bits.

XLA on a CPU slices, updates and gathers 8- and 16-bit floats in float32: in a loop it
widens the whole array, 400 MB for the bfloat16 weights of 64 experts of 512 x 1024. Of
integers it touches the part alone. Bits have no derivative: a leaf that is itself
differentiated does not come here.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_BITS = {1: jnp.uint8, 2: jnp.uint16}


def _is_narrow(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize in _BITS


def to_bits(x: jax.Array) -> jax.Array:
    """The bits of narrow floats; anything else as it is."""
    if not _is_narrow(x.dtype):
        return x
    return lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])


def from_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The inverse of `to_bits`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]` along the first axis."""
    if not _is_narrow(x.dtype):
        return lax.dynamic_index_in_dim(x, index, keepdims=False)
    # The barrier keeps the cast to bits in the loop, where it touches one part.
    x, index = lax.optimization_barrier((x, index))
    part = lax.dynamic_index_in_dim(to_bits(x), index, keepdims=False)
    return from_bits(part, x.dtype)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`x[rows]`; a row that `x` has not is zero."""
    dtype = x.dtype
    if _is_narrow(dtype):
        x, rows = lax.optimization_barrier((x, rows))
        x = to_bits(x)
    found = x.at[rows].get(mode="fill", fill_value=0)
    return from_bits(found, dtype)


def put(held: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """`held` with `x` at `index` of its first axis; `held` may be bits."""
    bits = to_bits(x) if held.dtype != x.dtype else x
    return lax.dynamic_update_index_in_dim(held, bits, index, 0)
