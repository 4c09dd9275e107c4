"""Who sees which cache slot by position ids, and the orders in which chips keep masks.

A chip keeps the slots of a cache as `[128, n]`: partition `p`, tile `f`. The three
orders say which slot, or token, lies there.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num, Shaped

from neuronjax.kernels.dtypes import promoted
from neuronjax.kernels.indices import bounded

PARTITIONS = 128
# Above this many slots a core walks its part of the cache in tiles of as many.
FLASH_TILE = 8192

Ids = Num[Array, "*rows seq"]
INT32 = -(2**31), 2**31 - 1


def as_int32(x: Num[Array, "..."]) -> Int[Array, "..."]:
    """Counts and places as int32: a number too large for it saturates, none wraps.

    A fraction is rounded up: the whole slots below it, or from it on, are the same.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return bounded(x, *INT32)
    return jnp.ceil(x).astype(jnp.int32)


def causal_window(starts: Ids, positions: Ids) -> tuple[Ids, Num[Array, "*rows 1"]]:
    """Returns the starts and the one end `[*rows, 1]` that show no stale slot.

    Query `t` at `positions[t]` sees the cache up to the first new token: the slots from
    there to its own position are not written yet. A window that starts among them is
    empty; left as it is, it would go around the whole cache.
    """
    end = positions[..., :1]
    rising = end <= positions
    after, before = starts > end, starts <= positions
    stale = jnp.where(rising, after & before, after | before)
    return jnp.where(stale, end, starts), end


def between(
    slot: Num[Array, "..."], starts: Num[Array, "..."], ends
) -> Bool[Array, "..."]:
    """Whether a slot lies from start to end, around the end where the start is more."""
    late, early = slot >= starts, slot < ends
    return jnp.where(starts <= ends, late & early, late | early)


def block_order_len(slots: int, block_len: int, cores: int, tiled: bool) -> int:
    """The length of the pieces into which a chip cuts the blocks of a cache.

    128 of them lie side by side, so each of `cores` holds a multiple of 128 of them,
    and so does each tile of at most 8192 slots.
    """
    shard = slots // cores
    length = math.gcd(block_len, shard // PARTITIONS)
    if tiled and shard > FLASH_TILE:
        rest = shard % FLASH_TILE
        length = math.gcd(length, FLASH_TILE // PARTITIONS, rest // PARTITIONS)
    return length


def tokens_at(
    tiles: int, *, piece: int = 0, strided: bool = False, total: int = 0
) -> Int[Array, "128 tiles"]:
    """The token at partition `p` and tile `f`, counted from the first one there.

    `piece` slots of a block lie on one partition, the next `piece` on the next one;
    `strided` puts `total` consecutive tokens on a partition, of which these are the
    first `tiles`; otherwise consecutive tokens lie on consecutive partitions.
    """
    p = jnp.arange(PARTITIONS, dtype=jnp.int32)[:, None]
    f = jnp.arange(tiles, dtype=jnp.int32)
    if piece:
        return f // piece * (PARTITIONS * piece) + p * piece + f % piece
    return p * (total or tiles) + f if strided else f * PARTITIONS + p


def rows_of_tokens(order: Int[Array, "128 tiles"]) -> Int[Array, " slots"]:
    """The tokens of a mask `[slots, ...]` whose row `f * 128 + p` is `order[p, f]`."""
    return jnp.swapaxes(order, 0, 1).reshape(-1)


def slot_cores(slots: int, columns: int, batch: int, lnc: int) -> int:
    """How many cores share the slots of a cache, for `columns` queries in all.

    Two cores share the sequences where their number is even and there are too many
    columns for one pass or too few slots to share; otherwise the slots, from 256 on.
    """
    by_batch = batch % 2 == 0 and (columns > PARTITIONS or slots < 2 * PARTITIONS)
    return 2 if lnc == 2 and not by_batch and slots >= 2 * PARTITIONS else 1


def position_mask(
    positions: Num[Array, "partitions batch seq"],
    starts: Num[Array, "partitions batch seq"] | None,
    order: Int[Array, "128 tiles"],
    *,
    num_heads: int,
    stale_slots_visible: bool,
) -> Bool[Array, "128 tiles batch num_heads seq"]:
    """Which queries see the token `order[p, f]` of the cache."""
    if starts is not None:
        dtype = promoted(positions.dtype, starts.dtype)
        positions, starts = positions.astype(dtype), starts.astype(dtype)
    slot = order[:, :, None, None].astype(positions.dtype)
    if starts is None:
        seen = slot < positions[:, None, :, :1]
    else:
        ends = positions
        if not stale_slots_visible:
            starts, ends = causal_window(starts, positions)
        seen = between(slot, starts[:, None], ends[:, None])
    batch, seq = positions.shape[1:]
    by_head = jnp.broadcast_to(seen, (*order.shape, batch, seq))[:, :, :, None]
    return jnp.broadcast_to(by_head, (*order.shape, batch, num_heads, seq))


def overwrite_active(
    mask: Bool[Array, "128 tiles batch num_heads seq"],
    active: Shaped[Array, "seq batch num_heads seq"],
    key: Int[Array, "128 tiles"],
) -> Bool[Array, "128 tiles batch num_heads seq"]:
    """Returns `mask` with `active[key[p, f]]` where that is a new token's number."""
    count = active.shape[0]
    picked = jnp.take(active.astype(bool), jnp.clip(key, 0, count - 1), axis=0)
    is_new: jax.Array = (key >= 0) & (key < count)
    return jnp.where(is_new[:, :, None, None, None], picked, mask)
