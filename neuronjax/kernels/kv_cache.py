"""Writing keys and values into a cache: a slot that is not there is never clamped.

A write changes its own slots alone, and not the bits of another one. Each has two
forms. One moves the new values to their places: a scatter, which XLA does in place.
The other is for narrow floats: XLA on a CPU turns a whole narrow cache into a wider
type and back for one scatter, and a NaN that nobody writes may come back with other
bits. It asks of every slot which token goes there, and selects among the bits: one
loop over the cache, in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Integer, Shaped

from neuronjax.kernels.indices import bounded
from neuronjax.kernels.own_derivative import own_derivative
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
    forms = _rows_writer(axis), _rows_selector(axis)
    return _written(cache, new, position, forms=forms)


@functools.cache
def _rows_writer(axis: int) -> Callable:
    def write(cache, new, position):
        if cache.shape[0] == 1:  # no mapped start: XLA needs no scatter
            return _write_row(cache[0], new[0], position[0], axis - 1)[None]
        each = jax.vmap(lambda c, n, p: _write_row(c, n, p, axis - 1))
        return each(cache, new, position)

    return write


def _write_row(row, new, position, axis):
    size, count = row.shape[axis], new.shape[axis]
    if count > size:
        return row
    fits = (position >= 0) & (position <= size - count)
    held = lax.dynamic_slice_in_dim(row, position, count, axis)
    values = jnp.where(fits, new, held)
    return lax.dynamic_update_slice_in_dim(row, values, position, axis)


@functools.cache
def _rows_selector(axis: int) -> Callable:
    def select(cache, new, position):
        size, count = cache.shape[axis], new.shape[axis]
        fits = (position >= 0) & (position <= size - count)
        # Where the write does not fit, no slot is at a token.
        first = jnp.where(fits, position, size).astype(jnp.int32)
        return _select(cache, new, _slots(size) - first[:, None], axis)

    return select


def _slots(size):
    return jnp.arange(size, dtype=jnp.int32)


def _select(cache, new, token, axis):
    """`new[b, token[b, slot]]` where there is such a token, else what is held."""
    if not new.size:
        return cache
    there = (token >= 0) & (token < new.shape[axis])
    there = jnp.expand_dims(there, [i for i in range(1, cache.ndim) if i != axis])
    pick = jax.vmap(lambda n, t: jnp.take(n, t, axis=axis - 1, mode="clip"))
    return jnp.where(there, pick(new, token), cache)


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
    slot = jnp.where((position >= 0)[:, None], slot, size + token)
    forms = _scatter_writer(axis), _around_selector(axis)
    return _written(cache, new, slot, forms=forms)


@functools.cache
def _scatter_writer(axis: int) -> Callable:
    def write(cache, new, slot):
        row = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
        where = (row, *[slice(None)] * (axis - 1), slot)
        return _set(cache, where, jnp.moveaxis(new, axis, 1))

    return write


@functools.cache
def _around_selector(axis: int) -> Callable:
    def select(cache, new, slot):
        size = cache.shape[axis]
        if not new.size:
            return cache
        first = slot[:, :1]
        token = jnp.where(first < size, (_slots(size) - first) % size, -1)
        return _select(cache, new, token, axis)

    return select


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
    forms = _scatter_blocks, _select_blocks
    return _written(cache, new, block, offset, forms=forms)


def _scatter_blocks(cache, new, block, offset):
    if cache.ndim == 3:
        return _set(cache, (block, offset), new)
    return _set(cache, (block, slice(None), offset), jnp.swapaxes(new, 1, 2))


def _select_blocks(cache, new, block, offset):
    if not new.size:
        return cache
    tokens = jnp.arange(block.size, dtype=jnp.int32).reshape(block.shape)
    places = jnp.full((cache.shape[0], cache.shape[-2]), -1, jnp.int32)
    token = _set(places, (block, offset), tokens)
    rows = lax.collapse(jnp.moveaxis(new, -2, 1), 0, 2)
    picked = jnp.moveaxis(jnp.take(rows, token, axis=0, mode="clip"), 1, -2)
    there = jnp.expand_dims(token >= 0, [*range(1, cache.ndim - 2), -1])
    return jnp.where(there, picked, cache)


def _set(cache, where, new):
    """A scatter that may be transposed: no place twice, those outside written nowhere.

    Of two sequences that a caller lets write one slot, either wins.
    """
    return cache.at[where].set(new, mode="drop", unique_indices=True)


def block_places(
    cache: Shaped[Array, "num_blocks *heads block_len width"],
    count: int,
    position: Integer[Array, " batch"],
    table: Integer[Array, "batch blocks"],
) -> tuple[Int[Array, "batch count"], Int[Array, "batch count"]]:
    """Block and offset of `count` tokens; past the last block for those not written.

    No two tokens have one place there.
    """
    num_blocks, block_len = cache.shape[0], cache.shape[-2]
    entries = table.shape[1]
    first = bounded(position, -1, entries * block_len)
    slot = first[:, None] + jnp.arange(count, dtype=jnp.int32)
    entry = jnp.clip(slot // block_len, 0, max(entries - 1, 0))
    block = jnp.take_along_axis(block_indices(table, num_blocks), entry, 1)
    fits = (slot >= 0) & (slot < entries * block_len) & (block < num_blocks)
    whole = fits.all(1, keepdims=True)
    nowhere = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape) + num_blocks
    return jnp.where(whole, block, nowhere), slot % block_len


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


def _written(
    cache: Array, new: Array, *where: Array, forms: tuple[Callable, Callable]
) -> Array:
    return _write(cache, _cast(new, cache.dtype), *where, forms=forms)


def _write_of_tangents(primals, tangents, *, forms):
    """A write is linear: its derivative writes the tangents."""
    return forms[0](*tangents[:2], *primals[2:])


@own_derivative(_write_of_tangents)
def _write(cache: Any, new: Any, *where: Any, forms: tuple[Callable, Callable]) -> Any:
    """Scatters, or of narrow floats selects among their bits."""
    scatter, select = forms
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(cache.dtype.itemsize)
    if bits is None or not jnp.issubdtype(cache.dtype, jnp.floating):
        return scatter(cache, new, *where)
    raw = (lax.bitcast_convert_type(x, bits) for x in (cache, new))
    return lax.bitcast_convert_type(select(*raw, *where), cache.dtype)
