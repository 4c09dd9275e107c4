"""What the masks of decode attention refuse."""

import enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.kernels.attention.decode_masks import PARTITIONS, slot_cores
from neuronjax.primitives.attention.decode_facts import fraction, is_mask
from neuronjax.primitives.contracts import Contract, add
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.known import known
from neuronjax.primitives.options import member, members


class MaskOrder(enum.Enum):
    """How a chip keeps the rows of a decode mask; see `mask_to_token_order`."""

    SEQUENTIAL = 0
    STRIDED = 1
    BLOCK = 2


_ORDERS = ("mask_to_token_order", "mask_from_token_order")
_TILE, _HBM = ("gen_mask_tkg",), ("gen_mask_tkg_hbm",)


def order_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes of a mask whose rows are to be brought into another order."""
    slots, batch, num_heads, seq = call.mask.shape
    kind, step = member(MaskOrder, call.order), 1
    if kind is MaskOrder.STRIDED:
        step = PARTITIONS
    if kind is MaskOrder.BLOCK:
        cores = slot_cores(slots, batch * num_heads * seq, batch, call.lnc)
        step = PARTITIONS * cores
    return dict(slots=slots, step=step, blocks=kind is MaskOrder.BLOCK)


def tile_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes of a call of `gen_mask_tkg`."""
    c, active = call, call.active_mask
    out_shape = (PARTITIONS, c.mask_out.shape[1], c.bs, c.q_head, c.s_active)
    columns = c.bs * c.s_active
    shard = c.shard_id * c.s_prior_per_shard if c.is_s_prior_sharded else 0
    full = active.shape[1] if active is not None and len(active.shape) == 4 else 0
    there = full // 2 if c.is_batch_sharded else full
    return dict(
        out_shape=out_shape,
        tiles=c.mask_out.shape[1],
        ids_shape=(PARTITIONS, columns),
        ids_given=_given(c.pos_ids, c.start_pos),
        fraction=fraction(c.pos_ids, c.start_pos),
        end=c.s_prior_offset + c.mask_out.shape[1] * PARTITIONS,
        whole=shard + c.s_prior_per_shard,
        active_shape=(c.s_active, f"at least {c.batch_offset + c.bs}", c.q_head)
        + (c.s_active,),
        active_fits=active is None
        or (
            len(active.shape) == 4
            and tuple(active.shape[::2]) == (c.s_active, c.q_head)
            and active.shape[3] == c.s_active
            and c.batch_offset + c.bs <= there
        ),
    )


def hbm_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes of a call of `gen_mask_tkg_hbm`."""
    columns = call.bs * call.q_head * call.s_active
    cores = slot_cores(call.s_prior, columns, call.bs, call.lnc)
    return dict(
        ids_shape=(1, call.bs * call.s_active),
        ids_given=_given(call.pos_ids_hbm, call.start_pos_hbm),
        fraction=fraction(call.pos_ids_hbm, call.start_pos_hbm),
        active_shape=(call.s_active, call.bs, call.q_head, call.s_active),
        step=PARTITIONS * (cores if call.block_len else 1),
    )


def _given(*ids: Any) -> str:
    return " and ".join(str(x.shape) for x in ids if x is not None)


def _shaped(ids: Any, *shapes: tuple[int, ...]) -> bool:
    return ids is None or tuple(ids.shape) in shapes


def _is_additive(mask: Any) -> bool:
    """Whether a floating mask whose values are known holds others than 0 and 1."""
    held = None if is_mask(mask) else known(mask)
    return held is not None and bool(((held != 0) & (held != 1)).any())


def _order(shape=(256, 1, 2, 1), order="BLOCK", **changes: Any):
    given = dict(mask=np.zeros(shape, np.int32), order=order)
    block_len = 16 if order == "BLOCK" else 0
    return lambda function: dict(given, block_len=block_len) | changes


def _tile(**changes: Any):
    given: dict[str, Any] = dict(
        pos_ids=np.zeros((128, 4), np.int32),
        mask_out=np.zeros((128, 4, 2, 3, 2), np.int32),
        bs=2,
        q_head=3,
        s_active=2,
        is_s_prior_sharded=False,
        s_prior_per_shard=512,
    )
    return lambda function: given | changes


def _hbm(**changes: Any):
    ids = np.zeros((1, 4), np.int32)
    given = dict(pos_ids_hbm=ids, bs=2, q_head=3, s_active=2, s_prior=256)
    return lambda function: given | changes


def _row(functions: tuple[str, ...], rule: str, message: str, *args: Any, **kw) -> None:
    """Enters a row; its stage is the second unless named."""
    text = "{function}: " + message
    add(Contract(f"{functions[0]}.{rule}", functions, text, *args, **kw))


add(*only_flags(*_ORDERS, *_TILE, *_HBM))
_row(
    _ORDERS,
    "order",
    f"order must be one of {members(MaskOrder)}, got {{order!r}}",
    lambda c: member(MaskOrder, c.order) is None,
    example=_order(order="TOKEN"),
    stage=0,
)
_row(
    _ORDERS,
    "rank",
    "mask must have shape [curr_sprior, B, Hq, s], got {mask.shape}",
    lambda c: len(c.mask.shape) != 4,
    example=_order(shape=(256,)),
    stage=0,
)
_row(
    _ORDERS,
    "lnc",
    "lnc must be 1 or 2, got {lnc}",
    lambda c: c.lnc not in (1, 2),
    example=_order(lnc=3),
    stage=0,
)
_row(
    _ORDERS,
    "block_len",
    "block_len must be positive for BLOCK and 0 for the other orders, got {block_len}",
    lambda c: (c.block_len > 0) != c.blocks or c.block_len < 0,
    example=_order(order="STRIDED", block_len=16),
)
_row(
    _ORDERS,
    "slots",
    "curr_sprior must be a multiple of {step}, 128 for each core that holds slots, got "
    "{slots}",
    lambda c: c.slots % c.step != 0,
    example=_order(shape=(200, 1, 2, 1)),
)
_row(
    _ORDERS,
    "blocks",
    "curr_sprior must be a multiple of block_len = {block_len}, got {slots}",
    lambda c: c.block_len > 0 and c.slots % c.block_len != 0,
    example=_order(block_len=48),
)
_row(
    _TILE,
    "rank",
    "mask_out must have 5 axes [128, n, B, Hq, s], got {mask_out.shape}",
    lambda c: len(c.mask_out.shape) != 5,
    example=_tile(mask_out=np.zeros((128, 4, 2, 6), np.int32)),
    stage=0,
)
_row(
    _TILE,
    "sizes",
    "bs, q_head and s_active must be positive, block_len, s_prior_offset, "
    "batch_offset and n_sprior_tile_total at least 0, got {bs}, {q_head}, {s_active}, "
    "{block_len}, {s_prior_offset}, {batch_offset} and {n_sprior_tile_total}",
    lambda c: (
        min(c.bs, c.q_head, c.s_active) < 1
        or min(c.block_len, c.s_prior_offset, c.batch_offset, c.n_sprior_tile_total) < 0
    ),
    example=_tile(bs=0),
    stage=0,
)
_row(
    _TILE,
    "strided_blocks",
    "strided_mm1 must be False with block_len = {block_len}: the pieces of blocks have "
    "an order of their own",
    lambda c: c.strided_mm1 and c.block_len > 0,
    example=_tile(block_len=2),
    stage=0,
)
_row(
    _TILE,
    "cores",
    "shard_id must be 0, or 1 where either the slots or the sequences are shared, got "
    "{shard_id} with is_s_prior_sharded = {is_s_prior_sharded} and is_batch_sharded = "
    "{is_batch_sharded}",
    lambda c: (
        c.shard_id not in (0, 1)
        or (c.is_s_prior_sharded and c.is_batch_sharded)
        or (c.shard_id == 1 and not (c.is_s_prior_sharded or c.is_batch_sharded))
    ),
    example=_tile(shard_id=1),
    stage=0,
)
_row(
    _TILE,
    "mask_out",
    "mask_out must have shape {out_shape}, got {mask_out.shape}",
    lambda c: tuple(c.mask_out.shape) != c.out_shape,
    example=_tile(mask_out=np.zeros((128, 4, 1, 3, 2), np.int32)),
)
_row(
    _TILE,
    "ids",
    "pos_ids and start_pos must have shape {ids_shape}, or one row, got {ids_given}",
    lambda c: (
        not _shaped(c.pos_ids, c.ids_shape, (1, c.ids_shape[1]))
        or not _shaped(c.start_pos, c.ids_shape, (1, c.ids_shape[1]))
    ),
    example=_tile(pos_ids=np.zeros((128, 2), np.int32)),
)
_row(
    _TILE,
    "pieces",
    "the {tiles} tiles of mask_out must be a multiple of block_len, got {block_len}",
    lambda c: c.block_len > 0 and c.tiles % c.block_len != 0,
    example=_tile(block_len=3, strided_mm1=False),
)
_row(
    _TILE,
    "shard",
    "the tile must end within s_prior_per_shard = {s_prior_per_shard}, which holds "
    "s_active = {s_active} new tokens, got slot {end}",
    lambda c: c.end > c.s_prior_per_shard or c.s_active > c.s_prior_per_shard,
    example=_tile(s_prior_offset=128),
)
_row(
    _TILE,
    "total",
    "n_sprior_tile_total is for strided flat caches, whose tiles begin at multiples of "
    "128; it must cover {whole} slots, got {n_sprior_tile_total}",
    lambda c: (
        c.n_sprior_tile_total > 0
        and (
            not c.strided_mm1
            or (c.s_prior_offset | c.s_prior_per_shard) % PARTITIONS != 0
            or c.n_sprior_tile_total * PARTITIONS < c.whole
        )
    ),
    example=_tile(n_sprior_tile_total=2),
)
_row(
    _TILE,
    "active",
    "active_mask must have shape {active_shape}, and so its half where two cores share "
    "the sequences, got {active_mask.shape}",
    lambda c: not c.active_fits,
    example=_tile(active_mask=np.ones((2, 1, 3, 2), np.int32)),
)
_row(
    _HBM,
    "sizes",
    "bs, q_head, s_active and s_prior must be positive and block_len at least 0, got "
    "{bs}, {q_head}, {s_active}, {s_prior} and {block_len}",
    lambda c: min(c.bs, c.q_head, c.s_active, c.s_prior) < 1 or c.block_len < 0,
    example=_hbm(bs=0),
    stage=0,
)
_row(
    _HBM,
    "lnc",
    "lnc must be 1 or 2, got {lnc}",
    lambda c: c.lnc not in (1, 2),
    example=_hbm(lnc=3),
    stage=0,
)
_row(
    _HBM,
    "slots",
    "s_prior must be a multiple of {step}, 128 for each core that holds slots, and "
    "hold s_active = {s_active} new tokens, got {s_prior}",
    lambda c: c.s_prior % c.step != 0 or c.s_prior < c.s_active,
    example=_hbm(s_prior=200),
)
_row(
    _HBM,
    "blocks",
    "s_prior must be a multiple of block_len = {block_len}, got {s_prior}",
    lambda c: c.block_len > 0 and c.s_prior % c.block_len != 0,
    example=_hbm(block_len=48),
)
_row(
    _HBM,
    "ids",
    "pos_ids_hbm and start_pos_hbm must have shape {ids_shape}, got {ids_given}",
    lambda c: (
        not _shaped(c.pos_ids_hbm, c.ids_shape)
        or not _shaped(c.start_pos_hbm, c.ids_shape)
    ),
    example=_hbm(pos_ids_hbm=np.zeros((4,), np.int32)),
)
_row(
    _HBM,
    "active",
    "active_mask must have shape {active_shape}, got {active_mask.shape}",
    lambda c: not _shaped(c.active_mask, c.active_shape),
    example=_hbm(active_mask=np.ones((2, 1, 3, 2), np.int32)),
)
for _functions, _call, _suffix in ((_TILE, _tile, ""), (_HBM, _hbm, "_hbm")):
    _names = f"pos_ids{_suffix}", f"start_pos{_suffix}"
    _row(
        _functions,
        "stale_slots",
        f"stale_slots_visible needs {_names[1]}: without it no stale slot is ever seen",
        lambda c, start=_names[1]: c.stale_slots_visible and getattr(c, start) is None,
        example=_call(stale_slots_visible=True),
        stage=0,
    )
    _row(
        _functions,
        "whole_positions",
        f"{_names[0]} and {_names[1]} must be whole numbers, got {{fraction}}",
        lambda c: c.fraction is not None,
        example=_call(**{_names[0]: np.full((1, 4), 0.5)}),
    )
    _row(
        _functions,
        "active_values",
        "a floating active_mask must hold 0 and 1 alone, nonzero = attend: an additive "
        "mask would be read upside down",
        lambda c: _is_additive(c.active_mask),
        example=_call(active_mask=np.full((2, 2, 3, 2), -1e9, np.float32)),
    )
