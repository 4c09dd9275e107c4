"""Index lists of mixture-of-experts packing: compaction, flattening, counting.

Nothing here depends on the order in which a scatter runs: each output element has one
writer.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, Num


def bounded(x: Integer[Array, "..."], low: int, high: int) -> Int[Array, "..."]:
    """`x` in int32, brought into `[low, high]`, which holds 0; no dtype wraps.

    Where both ends lie outside of a list, what lay outside of it stays there.
    """
    info = jnp.iinfo(x.dtype)
    low, high = max(low, int(info.min)), min(high, int(info.max))
    bounds = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    return lax.clamp(bounds[0], x, bounds[1]).astype(jnp.int32)


def is_nonzero(
    x: Float[Array, "..."] | Int[Array, "..."],
) -> Bool[Array, "..."]:
    """Whether a float32 or int32 is not zero, by its bits.

    XLA takes a subnormal number for zero. NaN is not zero, -0.0 is.
    """
    if x.dtype == jnp.float32:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return bits & jnp.uint32(0x7FFFFFFF) != 0
    return x != 0


def columns_from(
    x: Num[Array, "tokens columns"], start: Integer[Array, ""], count: int
) -> Num[Array, "tokens count"]:
    """Columns `start` to `start + count`; a column that `x` lacks reads as zeros.

    `lax.dynamic_slice` would move the window back inside without a word.
    """
    first = bounded(start, -count, x.shape[1])
    places = first + jnp.arange(count, dtype=jnp.int32)
    inside = (places >= 0) & (places < x.shape[1])
    picked = jnp.take(x, jnp.where(inside, places, 0), axis=1, mode="clip")
    return jnp.where(inside, picked, jnp.zeros((), x.dtype))


def compact(
    keep: Bool[Array, "rows n"],
) -> tuple[Int[Array, "rows n"], Int[Array, " rows"]]:
    """Where each row is True, ascending, then -1; and how often. int32.

    The i-th place goes to slot `(how many are True before i)`; the others are dropped.
    """
    rows, n = keep.shape
    running = lax.cumsum(keep.astype(jnp.int32), 1)
    slot = jnp.where(keep, running - 1, jnp.int32(n))
    row = lax.broadcasted_iota(jnp.int32, (rows, n), 0)
    place = lax.broadcasted_iota(jnp.int32, (rows, n), 1)
    empty = jnp.full((rows, n), -1, jnp.int32)
    indices = empty.at[row, slot].set(place, mode="drop")
    return indices, jnp.sum(keep, axis=1, dtype=jnp.int32)


def flatten_rows(
    x: Integer[Array, "rows width"],
    first: Integer[Array, " rows"],
    valid: Bool[Array, " rows"],
    *,
    block: int,
    blocks: int,
    padding: int,
) -> Integer[Array, " size"]:
    """Row `e` written from output block `first[e]` on; the last row to write wins.

    Each output block looks for the last row that covers it, so that order is part of
    the equation and not of the execution. Rows that are not `valid` write nothing.
    """
    rows, width = x.shape
    pieces = width // block
    first = bounded(first, -pieces, blocks)
    target = jnp.arange(blocks, dtype=jnp.int32)[:, None]
    covered = valid & (target >= first) & (target - first < pieces)
    number = jnp.arange(rows, dtype=jnp.int32)
    writer = jnp.max(jnp.where(covered, number, -1), axis=1)
    row = jnp.maximum(writer, 0)
    piece = jnp.clip(target[:, 0] - first[row], 0, pieces - 1)
    cut: jax.Array = x.reshape(rows, pieces, block)
    written = (writer >= 0)[:, None]
    return jnp.where(written, cut[row, piece], jnp.asarray(padding, x.dtype)).reshape(
        -1
    )
