"""Writing keys and values into a cache: a slot that is not there is never clamped.

A write changes its own slots alone. fp8 caches are updated as bytes: XLA on a CPU would
turn the whole cache to float16 and back, which may change the bits of a NaN in a slot
that nobody writes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Integer, Shaped

from neuronjax.kernels.indices import bounded
from neuronjax.kernels.quantization.fp8 import is_fp8, saturate


def write_slots(
    cache: Shaped[Array, "batch ..."],
    new: Shaped[Array, "batch ..."],
    position: Int[Array, " batch"],
    *,
    axis: int,
) -> Shaped[Array, "batch ..."]:
    """Returns `cache` with `new` written from slot `position[b]` on along `axis`.

    A write that does not fit leaves its row of the cache as it was.
    """
    held, new = _raw(cache), _raw(_cast(new, cache.dtype))
    if cache.shape[0] == 1:  # no mapped start: XLA updates in place, without a scatter
        written = _write_row(held[0], new[0], position[0], axis - 1)[None]
    else:
        each = jax.vmap(lambda c, n, p: _write_row(c, n, p, axis - 1))
        written = each(held, new, position)
    return _typed(written, cache.dtype)


def _write_row(row, new, position, axis):
    size, count = row.shape[axis], new.shape[axis]
    if count > size:
        return row
    fits = (position >= 0) & (position + count <= size)
    held = lax.dynamic_slice_in_dim(row, position, count, axis)
    values = jnp.where(fits, new, held)
    return lax.dynamic_update_slice_in_dim(row, values, position, axis)


def write_around(
    cache: Shaped[Array, "batch ..."],
    new: Shaped[Array, "batch ..."],
    position: Integer[Array, " batch"],
    *,
    axis: int,
) -> Shaped[Array, "batch ..."]:
    """Returns `cache` with token `position[b] + t` in that slot modulo the slots.

    Of more tokens than there are slots the last ones stay. A negative position leaves
    its row as it was.
    """
    size, count = cache.shape[axis], new.shape[axis]
    skipped = max(count - size, 0)
    new = lax.slice_in_dim(new, skipped, count, axis=axis)
    wide = position if position.dtype.itemsize >= 4 else position.astype(jnp.int32)
    # The remainder first: a position beyond int32 keeps its slot.
    first = (wide % jnp.asarray(size, wide.dtype)).astype(jnp.int32)
    token = jnp.arange(skipped, count, dtype=jnp.int32)
    slot = (first[:, None] + token) % jnp.int32(size)
    slot = jnp.where((position >= 0)[:, None], slot, jnp.int32(size))
    held, new = (
        jnp.moveaxis(_raw(x), axis, 1) for x in (cache, _cast(new, cache.dtype))
    )
    row = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    written = held.at[row, slot].set(new, mode="drop")
    return _typed(jnp.moveaxis(written, 1, axis), cache.dtype)


def write_blocks(
    cache: Shaped[Array, "num_blocks *heads block_len width"],
    new: Shaped[Array, "batch *heads seq width"],
    position: Integer[Array, " batch"],
    table: Integer[Array, "batch blocks"],
) -> Shaped[Array, "num_blocks *heads block_len width"]:
    """Returns a block cache with token `position[b] + t` written where `table` says.

    That is offset `p % block_len` of block `table[b, p // block_len]` for position `p`.
    A sequence whose write does not fit, or meets an entry that is no block, writes
    nothing.
    """
    block, offset = block_places(cache, new.shape[-2], position, table)
    held, new = _raw(cache), _raw(_cast(new, cache.dtype))
    if cache.ndim == 3:
        written = held.at[block, offset].set(new, mode="drop")
    else:
        by_token = jnp.swapaxes(new, 1, 2)
        written = held.at[block, :, offset].set(by_token, mode="drop")
    return _typed(written, cache.dtype)


def block_places(
    cache: Shaped[Array, "num_blocks *heads block_len width"],
    count: int,
    position: Integer[Array, " batch"],
    table: Integer[Array, "batch blocks"],
) -> tuple[Int[Array, "batch count"], Int[Array, "batch count"]]:
    """Block and offset of `count` tokens; block `num_blocks` for those not written."""
    num_blocks, block_len = cache.shape[0], cache.shape[-2]
    entries = table.shape[1]
    first = bounded(position, -1, entries * block_len)
    slot = first[:, None] + jnp.arange(count, dtype=jnp.int32)
    entry = jnp.clip(slot // block_len, 0, max(entries - 1, 0))
    block = jnp.take_along_axis(block_indices(table, num_blocks), entry, 1)
    fits = (slot >= 0) & (slot < entries * block_len) & (block < num_blocks)
    whole = fits.all(1, keepdims=True)
    return jnp.where(whole, block, num_blocks), slot % block_len


def block_indices(
    table: Integer[Array, "batch blocks"], num_blocks: int
) -> Int[Array, "batch blocks"]:
    """The table in int32, `num_blocks` for an entry that is no block."""
    index = bounded(table, -1, num_blocks)
    return jnp.where(index < 0, num_blocks, index)


def _cast(new: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`new` in the cache's dtype: clipped first if that is fp8, which ends early."""
    if is_fp8(dtype) and not is_fp8(new.dtype):
        return saturate(new, dtype)
    return new.astype(dtype)


def _raw(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8) if is_fp8(x.dtype) else x


def _typed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if is_fp8(dtype) else x
