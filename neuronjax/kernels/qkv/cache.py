"""Quantized keys and values written into fp8 caches: no other slot is touched.

A cache is updated as bytes: XLA on a CPU turns a whole fp8 cache to float16 and back
for one write, which may change the bits of a NaN in a slot that nobody writes.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, Shaped


def quantized_cache_rows(
    x: Float[Array, "batch seq width"],
    scale: Float[Array, "..."],
    *,
    low: float,
    high: float,
    dtype: DTypeLike,
) -> Shaped[Array, "batch seq width"]:
    """Returns `clip(x / scale, low, high)` in `dtype`; `scale` repeats one value."""
    z = x / scale.reshape(-1)[0].astype(x.dtype)
    edges = (jnp.asarray(edge, x.dtype) for edge in (low, high))
    return lax.clamp(next(edges), z, next(edges)).astype(dtype)


def write_flat_rows(
    cache: Shaped[Array, "batch slots width"], rows: Shaped[Array, "batch seq width"]
) -> Shaped[Array, "batch slots width"]:
    """Returns `cache` with `rows` in the first slots of each sequence."""
    held = lax.dynamic_update_slice(_bytes(cache), _bytes(rows), (0, 0, 0))
    return lax.bitcast_convert_type(held, cache.dtype)


def write_block_rows(
    cache: Shaped[Array, "blocks block_size width"],
    rows: Shaped[Array, "batch seq width"],
    slots: Integer[Array, "batch seq"],
) -> Shaped[Array, "blocks block_size width"]:
    """Returns `cache` with each row in its slot.

    Slot `t` is offset `t % block_size` of block `t // block_size`; a row whose slot is
    outside the cache is not written.
    """
    blocks, block_size, width = cache.shape
    count = blocks * block_size
    held = _bytes(cache).reshape(count, width)
    where = _dropping(slots, count)
    new = _bytes(rows).reshape(math.prod(rows.shape[:2]), width)
    held = held.at[where.reshape(-1)].set(new, mode="drop")
    return lax.bitcast_convert_type(held.reshape(cache.shape), cache.dtype)


def _dropping(slots, count):
    """The slots, `count` for one outside: a write past the end is dropped.

    They are compared before a scatter narrows them to int32, where `2**32` would be 0.
    """
    if slots.dtype.itemsize < 4:  # too narrow to hold `count`
        slots = slots.astype(jnp.int32)
    end = jnp.asarray(count, slots.dtype)
    return jnp.where((slots < 0) | (slots >= end), end, slots).astype(jnp.int32)


def _bytes(x):
    return lax.bitcast_convert_type(x, jnp.uint8)
