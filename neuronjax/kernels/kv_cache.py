"""Writing keys and values into a cache: a slot past the end is never clamped."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def write_slots(
    cache: Float[Array, "batch ..."],
    new: Float[Array, "batch ..."],
    position: Int[Array, " batch"],
    *,
    axis: int,
) -> Float[Array, "batch ..."]:
    """Returns `cache` with `new` written from slot `position[b]` on along `axis`.

    A write that does not fit leaves its row of the cache as it was.
    """
    if cache.shape[0] == 1:  # no mapped start: XLA updates in place, without a scatter
        return _write_row(cache[0], new[0], position[0], axis - 1)[None]
    return jax.vmap(lambda c, n, p: _write_row(c, n, p, axis - 1))(cache, new, position)


def _write_row(row, new, position, axis):
    size, count = row.shape[axis], new.shape[axis]
    if count > size:
        return row
    fits = (position >= 0) & (position + count <= size)
    held = lax.dynamic_slice_in_dim(row, position, count, axis)
    values = jnp.where(fits, new.astype(row.dtype), held)
    return lax.dynamic_update_slice_in_dim(row, values, position, axis)
