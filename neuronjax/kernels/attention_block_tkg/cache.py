"""New keys and values: their fp8 codes, and where the caches hold them.

Keys and values are `[batch, 1, seq, head_dim]`. A write that does not fit, the index
0xFFFFFFFF among them, leaves its sequence unwritten; of two that name one slot of a
block cache the later sequence counts. No other slot is touched, nor its bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.attention_block_tkg import ranks
from neuronjax.kernels.attention_block_tkg.operands import Operands
from neuronjax.kernels.indices import bounded
from neuronjax.kernels.kv_cache import write_blocks, write_slots
from neuronjax.kernels.quantization.fp8 import E4M3, is_fp8
from neuronjax.kernels.quantization.straight_through import (
    static_codes,
    static_codes_bwd,
)


def kept(t: Array, scale: Array | None, o: Operands, c: Any) -> Array:
    """Keys or values as attention and caches take them, in the dtype of `x`.

    With a scale they are `clip(t * scale, -240, 240)`, rounded to float8_e4m3 unless
    the config says that they stay as they are.
    """
    if scale is not None:
        scaled, one = _scaled(t, scale)
        codes = E4M3 if c.round_activations else None
        t = static_codes(scaled, one, dtype=codes)
    return t.astype(o.x.dtype)


def kept_bwd(dt: Array, t: Array, scale: Array | None) -> Array:
    """The cotangent of `t`: a rounding passes it on, a clip does not."""
    if scale is None:
        return dt
    scaled, one = _scaled(t, scale)
    return static_codes_bwd(dt.astype(t.dtype), scaled, one) * _value(scale, t)


def stored_fwd(k: Array, v: Array, o: Operands, c: Any) -> tuple[Array, Array]:
    """The updated caches; without an update the new keys and values themselves."""
    if c.update_cache:
        ways = _ways(o, c)
        return _write(o.k_cache, k, o, ways[0]), _write(o.v_cache, v, o, ways[1])
    dtype = E4M3 if _is_rounded(o, c) else k.dtype
    return k[:, 0].transpose(2, 0, 1).astype(dtype), v.astype(dtype)


def after(attention: Array, o: Operands) -> Operands:
    """The operands, their position known only when `attention` is, and the same.

    The caches are read before they are written. XLA does not see that order, and copies
    them, unless the write depends on what was read: no number is below -inf.
    """
    if o.position is None:
        return o
    never = (attention < -jnp.inf).any((1, 2, 3))[:, None]
    position = jnp.where(never, jnp.zeros_like(o.position), o.position)
    return o._replace(position=position)


def stored_bwd(
    d_stored: tuple[Array | None, Array | None], o: Operands, c: Any
) -> tuple[list[Array | None], list[Array | None]]:
    """The cotangents of the new keys and values, and those of both caches.

    `None` stands for nothing: an output that nobody used, or one that is fp8.
    """
    if not c.update_cache:
        dk, dv = d_stored
        if _is_rounded(o, c):
            return [None, None], [None, None]
        return [None if dk is None else dk.transpose(1, 2, 0)[:, None], dv], [None] * 2
    new, caches = [], []
    for cotangent, cache, axis in zip(
        d_stored, (o.k_cache, o.v_cache), _ways(o, c), strict=True
    ):
        unused = cotangent is None or is_fp8(cache.dtype)
        found = (None, None) if unused else _read(cotangent, cache, o, axis)
        new.append(found[0])
        caches.append(found[1])
    return new, caches


def _is_rounded(o: Operands, c: Any) -> bool:
    return o.k_scale is not None and c.round_activations


def _value(scale, like):
    return lax.stop_gradient(scale.reshape(-1)[0]).astype(like.dtype)


def _scaled(t, scale):
    return t * _value(scale, t), jnp.ones((), t.dtype)


def _ways(o: Operands, c: Any) -> tuple[int, int]:
    """The axis of the slots in the cached keys and values, without a head axis."""
    return (2 if c.k_transposed else 1), 1


def _write(cache, new, o, axis):
    """`cache` with `new` in it, in its own dtype and shape."""
    rows = new.astype(cache.dtype)
    if o.table is not None:
        rows, whole = rows[:, 0], _headless(cache)
        places = _places(o.position, rows.shape[1], math.prod(whole.shape[:2]))
        return _write_places(whole, rows, places).reshape(cache.shape)
    # A head axis stays: XLA lays out the cache without it in another way, and copies
    # all of it before the write and after it.
    rows = rows if axis == 1 else rows.mT
    rows, axis = (rows, axis + 1) if cache.ndim == 4 else (rows[:, 0], axis)
    start = first_slots(o.position, rows.shape[axis], cache.shape[axis])
    return write_slots(cache, rows, start, axis=axis)


def _read(cotangent, cache, o, axis):
    """The cotangents of what `_write` wrote, and of the cache that it wrote to."""
    whole, count = _headless(cotangent), o.x.shape[1]
    if o.table is not None:
        new, held = _read_blocks(whole, o.position, count)
    else:
        start = first_slots(o.position, count, whole.shape[axis])
        new = jax.vmap(lambda row, at: _held(row, at, count, axis - 1))(whole, start)
        zeros = ranks.zeros_like(new)
        held = write_slots(whole, zeros, start, axis=axis)
        new = new if axis == 1 else new.mT
    return new[:, None], held.reshape(cache.shape)


def _held(row, start, count, axis):
    """The slots of one sequence from `start` on; zeros for a write that did not fit."""
    size = row.shape[axis]
    if isinstance(size, int) and count > size:
        shape = [*row.shape]
        shape[axis] = count
        return jnp.zeros(shape, row.dtype)
    found = lax.dynamic_slice_in_dim(row, start, count, axis)
    return jnp.where(start + count <= size, found, 0)


def _headless(cache):
    return cache[:, 0] if cache.ndim == 4 else cache


def first_slots(position: Array, count: int, size: int) -> Array:
    """First slots `[batch]` of int32; `size` for `count` tokens that do not fit."""
    start = bounded(position[:, 0], -1, size)
    return jnp.where((start >= 0) & (start + count <= size), start, size)


def _places(position, count, size):
    """The slot of each new row of a block cache, `size` for one that is not written."""
    start = first_slots(position, count, size)
    slots = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    later = jnp.arange(start.shape[0], dtype=jnp.int32)
    later = later[:, None, None] < later[None, None]
    begin = start[None, None]
    covered = (slots[..., None] >= begin) & (slots[..., None] < begin + count)
    lost = (later & covered).any(-1)
    return jnp.where(lost | (start[:, None] >= size), size, slots)


def _one_block(blocks):
    """The blocks in a row, as one."""
    return blocks.reshape(1, math.prod(blocks.shape[:2]), blocks.shape[2])


def _write_places(blocks, rows, places):
    """Each row goes to a place of its own: its own sequence of one token."""
    tokens = rows.reshape(math.prod(rows.shape[:2]), 1, rows.shape[2])
    first = jnp.zeros((tokens.shape[0], 1), jnp.int32)
    held = write_blocks(_one_block(blocks), tokens, places.reshape(-1), first)
    return held.reshape(blocks.shape)


def _read_blocks(cotangent, position, count):
    flat = _one_block(cotangent)[0]
    places = _places(position, count, flat.shape[0])
    new = flat.at[places].get(mode="fill", fill_value=0)
    zeros = ranks.zeros_like(new)
    return new, _write_places(cotangent, zeros, places)
