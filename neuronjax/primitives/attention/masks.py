"""Masks of decode attention from position ids, in the orders that a chip keeps."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Num, Shaped

from neuronjax.kernels.attention.decode_masks import (
    PARTITIONS,
    as_int32,
    block_order_len,
    overwrite_active,
    position_mask,
    slot_cores,
    tokens_at,
)
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.attention.mask_rules import hbm_facts, tile_facts
from neuronjax.primitives.contracts import contracted


@contracted(tile_facts)
def gen_mask_tkg(
    pos_ids: Num[Array, "partitions columns"],
    mask_out: Any,
    bs: int,
    q_head: int,
    s_active: int,
    is_s_prior_sharded: bool,
    s_prior_per_shard: int,
    start_pos: Num[Array, "partitions columns"] | None = None,
    s_prior_offset: int = 0,
    block_len: int = 0,
    strided_mm1: bool = True,
    active_mask: Shaped[Array, "seq batch num_heads seq"] | None = None,
    is_batch_sharded: bool = False,
    batch_offset: int = 0,
    n_sprior_tile_total: int = 0,
    *,
    shard_id: int = 0,
    stale_slots_visible: bool = False,
) -> Num[Array, "128 tiles batch num_heads seq"]:
    """The mask of one tile of the cache, on 128 partitions, from position ids.

    Slot `k` is seen by every query of sequence `b` where `k < pos_ids[b, 0]`; with
    `start_pos`, by query `t` where `start_pos[b, t] <= k < pos_ids[b, 0]`, around the
    end of the cache where the start is greater, as in `attention_tkg`. The last
    `s_active` slots of the shard are what `active_mask` says.

    Partition `p` and tile `f` hold the slot `n p + f` of the tile (strided), `f 128 +
    p` (not strided), or `128 b (f // b) + b p + f % b` for `b = block_len`, which is
    the length of the pieces into which the chip cuts its blocks.

    Args:
        pos_ids: whole numbers `[128, B*s]`, or `[1, B*s]` where all partitions hold the
            same.
        mask_out: an array or `jax.ShapeDtypeStruct` `[128, n, B, Hq, s]`: its shape
            says how many tiles there are, its dtype that of the result. Its values are
            not read.
        bs: sequences.
        q_head: query heads.
        s_active: new tokens a sequence.
        is_s_prior_sharded: two cores share the slots: `shard_id` counts from slot
            `shard_id * s_prior_per_shard`.
        s_prior_per_shard: slots of this core.
        start_pos: like `pos_ids`: the first slot that each query sees.
        s_prior_offset: where in the shard the tile begins.
        block_len: the block order, with this length of a piece; 0 for flat caches.
        strided_mm1: the order of a flat cache. `False` for a block cache.
        active_mask: `[s, B_full, Hq, s]` as (key, sequence, head, query), nonzero =
            attend, of floats 0 and 1; without it those slots are like the others.
        is_batch_sharded: two cores share the sequences: core `shard_id` takes its half
            of `active_mask`.
        batch_offset: the first sequence, within that half.
        n_sprior_tile_total: tiles of the whole cache, of which a strided one holds
            some: partition `p` then has the slots from `n_sprior_tile_total * p` on.
        shard_id: which core this is, 0 or 1.
        stale_slots_visible: query `t` sees the cache up to `pos_ids[b, t]`; see
            `AttnTKGConfig`.

    Returns:
        `[128, n, B, Hq, s]` of zeros and ones in the dtype of `mask_out`.

    Raises:
        ValueError: sizes or shapes do not fit.

    Source:
        aws-neuron/nki-library, `core/attention/gen_mask_tkg.py`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> out = jax.ShapeDtypeStruct((128, 2, 1, 1, 1), "int32")
        >>> mask = gen_mask_tkg(jnp.array([[3]]), out, 1, 1, 1, False, 256)
        >>> mask[:3, :, 0, 0, 0].tolist()
        [[1, 1], [1, 0], [0, 0]]
    """
    tiles, total = mask_out.shape[1], n_sprior_tile_total
    strided = strided_mm1 and not block_len
    order = tokens_at(tiles, piece=block_len, strided=strided, total=total)
    shard = shard_id * s_prior_per_shard if is_s_prior_sharded else 0
    if total:  # strided over the whole cache: a tile is a range of columns
        order = order + (shard + s_prior_offset) // PARTITIONS
        key = order - (total * PARTITIONS - s_active)
    else:
        key = order + s_prior_offset - (s_prior_per_shard - s_active)
        order = order + shard + s_prior_offset
    mask = position_mask(
        _by_query(pos_ids, bs, s_active),
        None if start_pos is None else _by_query(start_pos, bs, s_active),
        order,
        num_heads=q_head,
        stale_slots_visible=stale_slots_visible,
    )
    if active_mask is not None:
        half = active_mask.shape[1] // 2 if is_batch_sharded else 0
        first = shard_id * half + batch_offset
        mask = overwrite_active(mask, active_mask[:, first : first + bs], key)
    return mask.astype(mask_out.dtype)


@contracted(hbm_facts)
def gen_mask_tkg_hbm(
    pos_ids_hbm: Num[Array, "1 columns"],
    bs: int,
    q_head: int,
    s_active: int,
    s_prior: int,
    start_pos_hbm: Num[Array, "1 columns"] | None = None,
    block_len: int = 0,
    active_mask: Shaped[Array, "seq batch num_heads seq"] | None = None,
    *,
    lnc: int = 1,
    enable_fa_s_prior_tiling: bool = True,
    stale_slots_visible: bool = False,
) -> Num[Array, "slots batch num_heads seq"]:
    """The mask of a whole cache from position ids, its rows as a chip keeps them.

    The values are those of `gen_mask_tkg`. Row `128 f + p` is the token `n p + f` for a
    flat cache (`STRIDED`), and that of the block order for a block cache (`BLOCK`);
    `mask_to_token_order` brings it to token order.

    Args:
        pos_ids_hbm: whole numbers `[1, B*s]`, positions of the new tokens.
        bs: sequences.
        q_head: query heads.
        s_active: new tokens a sequence.
        s_prior: slots, a multiple of 128.
        start_pos_hbm: `[1, B*s]`: the first slot that each query sees.
        block_len: slots of a cache block; 0 for a flat cache.
        active_mask: `[s, B, Hq, s]` as (key, sequence, head, query), nonzero = attend,
            of floats 0 and 1: what the last `s_active` slots are; without it they are
            like the others.
        lnc: cores of a logical core, 1 or 2; two may cut blocks into smaller pieces.
        enable_fa_s_prior_tiling: whether the chip walks the slots in tiles of 8192.
        stale_slots_visible: see `AttnTKGConfig`.

    Returns:
        `[s_prior, B, Hq, s]` of int32 zeros and ones.

    Raises:
        ValueError: sizes or shapes do not fit.

    Source:
        aws-neuron/nki-library, `core/attention/gen_mask_tkg.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> mask = gen_mask_tkg_hbm(jnp.array([[3]]), 1, 1, 1, 256)
        >>> jnp.nonzero(mask.ravel())[0].tolist()
        [0, 1, 128]
    """
    piece = 0
    if block_len:
        cores = slot_cores(s_prior, bs * q_head * s_active, bs, lnc)
        piece = block_order_len(s_prior, block_len, cores, enable_fa_s_prior_tiling)
    tiles = s_prior // PARTITIONS
    order = tokens_at(tiles, piece=piece, strided=not block_len)
    mask = position_mask(
        _by_query(pos_ids_hbm, bs, s_active),
        None if start_pos_hbm is None else _by_query(start_pos_hbm, bs, s_active),
        order,
        num_heads=q_head,
        stale_slots_visible=stale_slots_visible,
    )
    if active_mask is not None:
        mask = overwrite_active(mask, active_mask, order - (s_prior - s_active))
    rows = jnp.swapaxes(mask, 0, 1).reshape(s_prior, bs, q_head, s_active)
    return rows.astype(jnp.int32)


def _by_query(ids: Array, bs: int, s_active: int) -> Array:
    """`[128 or 1, B*s]` to `[128 or 1, B, s]`, in a dtype that counts every slot."""
    if jnp.issubdtype(ids.dtype, jnp.integer):
        ids = as_int32(ids)
    else:
        ids = ids.astype(accumulator(ids.dtype))
    return ids.reshape(-1, bs, s_active)
