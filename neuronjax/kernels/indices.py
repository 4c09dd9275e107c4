"""Index lists of mixture-of-experts packing: compaction, flattening, counting.

Nothing here depends on the order in which a scatter runs: each output element has one
writer.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Num


def columns_from(
    x: Num[Array, "tokens columns"], start: Int[Array, ""], count: int
) -> Num[Array, "tokens count"]:
    """Columns `start` to `start + count`; a column that `x` lacks reads as zeros.

    `lax.dynamic_slice` would move the window back inside without a word.
    """
    places = start + jnp.arange(count, dtype=start.dtype)
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
    x: Int[Array, "rows width"],
    first: Int[Array, " rows"],
    valid: Bool[Array, " rows"],
    *,
    block: int,
    blocks: int,
    padding: int,
) -> Int[Array, " size"]:
    """Row `e` written from output block `first[e]` on; the last row to write wins.

    Each output block looks for the last row that covers it, so that order is part of
    the equation and not of the execution. Rows that are not `valid` write nothing.
    """
    rows, width = x.shape
    pieces = width // block
    target = jnp.arange(blocks, dtype=first.dtype)[:, None]
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
