"""What `attention_tkg` refuses, and what only the chip does."""

import dataclasses
import numbers
from typing import Any

import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.attention.decode_config import AttnTKGConfig
from neuronjax.primitives.attention.decode_facts import is_integer, is_mask
from neuronjax.primitives.attention.operand_kinds import not_array
from neuronjax.primitives.contracts import Contract, Size, told

_SIZES = dict(bs=1, q_head=2, s_active=2, curr_sprior=6, full_sprior=8, d_head=64)


def _tkg(operands: dict[str, Any] | None = None, **sizes: Any):
    """Arguments that keep every rule but the one that `sizes` or `operands` break."""
    c = AttnTKGConfig(**{**_SIZES, "qk_in_sb": True, **sizes})
    d, s, columns = c.d_head, c.s_active, c.bs * c.q_head * c.s_active
    whole = (c.bs, c.q_head, s, d), (c.bs, 1, s, d)
    q, k = ((d, columns), (d, c.bs * s)) if c.qk_in_sb else whole
    keys = (c.full_sprior, d) if c.tp_k_prior else (d, c.full_sprior)
    caches = [(c.bs, 1, *keys), (c.bs, 1, c.full_sprior, d)]
    if c.block_len:
        caches = [(3, c.block_len, d)] * 2
    seen = s if c.use_pos_id else c.curr_sprior
    shapes = dict(q=q, k_active=k, v_active=(c.bs, 1, s, d))
    shapes |= dict(k_prior=caches[0], v_prior=caches[1], mask=(seen, c.bs, c.q_head, s))
    if c.use_pos_id or c.fuse_rope:
        shapes |= dict(rope_pos_ids=(c.bs, s))
    if c.fuse_rope:
        shapes |= dict(inv_freqs=(d // 2, 1))
    arrays: dict[str, Any] = {
        k: np.zeros(tuple(max(n, 0) for n in v), np.float32) for k, v in shapes.items()
    }
    arrays["mask"] = arrays["mask"].astype(np.int32)
    if c.block_len:
        entries = (c.bs, c.curr_sprior // c.block_len)
        arrays["active_blocks_table"] = np.zeros(entries, np.uint32)
    return lambda function: dict(arrays, cfg=c) | (operands or {})


def _blocks(operands: dict[str, Any] | None = None, **sizes: Any):
    """The same, over a cache of blocks."""
    form = dict(block_len=2, tp_k_prior=True, strided_mm1=False)
    return _tkg(operands, **{**form, **sizes})


def _fp8(*without: str, **sizes: Any):
    """The same, with fp8 keys and values but those `without`."""
    arrays = _tkg(**sizes)("")
    names = {"k_active", "v_active", "k_prior", "v_prior"} - set(without)
    codes = {name: arrays[name].astype(E4M3) for name in names}
    return _tkg(codes | dict(q=arrays["q"].astype(np.float16)), **sizes)


RULES: list[Contract] = []


def _row(rule: str, message: str, *args: Any, **kwargs: Any) -> None:
    """Another row; its stage is the second unless named."""
    named = f"attention_tkg.{rule}", ("attention_tkg",), "{function}: " + message
    RULES.append(Contract(*named, *args, **kwargs))


def _is_config(cfg: Any) -> bool:
    """Sizes and switches are integers, of Python or of NumPy."""
    return isinstance(cfg, AttnTKGConfig) and all(
        isinstance(value, numbers.Integral | np.bool_)
        for value in dataclasses.astuple(cfg)
    )


_NEEDED = ("q", "k_active", "v_active", "k_prior", "v_prior")
_OPTIONAL = (
    "mask",
    "inv_freqs",
    "rope_pos_ids",
    "start_pos_ids",
    "sink",
    "active_blocks_table",
)
_row(
    "arrays",
    "{not_array}",
    told("not_array", lambda c: not_array(c, _NEEDED, True) or not_array(c, _OPTIONAL)),
    example=_tkg(dict(q=None)),
    stage=-1,
)
_row(
    "config",
    "cfg must be an AttnTKGConfig of whole numbers, got {cfg!r}",
    lambda c: not _is_config(c.cfg),
    example=_tkg(dict(cfg=None)),
    stage=-1,
)
_row(
    "sizes",
    "sizes of cfg must be positive, got {cfg}",
    lambda c: (
        min(c.cfg.bs, c.cfg.q_head, c.cfg.s_active, c.cfg.d_head, c.cfg.curr_sprior) < 1
    ),
    example=_tkg(s_active=0),
    stage=0,
)
_row(
    "block_len",
    "block_len of cfg must be 0 without active_blocks_table and positive with it, "
    "got {cfg.block_len}",
    lambda c: (c.cfg.block_len > 0) != (c.active_blocks_table is not None),
    example=_tkg(dict(active_blocks_table=None), block_len=16, curr_sprior=16),
    stage=0,
)
_row(
    "cache_in_use",
    "curr_sprior of cfg must lie between s_active = {cfg.s_active} and full_sprior = "
    "{cfg.full_sprior}, got {cfg.curr_sprior}",
    lambda c: not c.cfg.s_active <= c.cfg.curr_sprior <= c.cfg.full_sprior,
    example=_tkg(curr_sprior=9),
    stage=0,
)
_row(
    "positions",
    "rope_pos_ids must be given for use_pos_id and fuse_rope, got None",
    lambda c: c.rope_pos_ids is None and (c.cfg.use_pos_id or c.cfg.fuse_rope),
    example=_tkg(dict(rope_pos_ids=None), use_pos_id=True),
    stage=0,
)
_row(
    "starts",
    "start_pos_ids needs use_pos_id: a mask says where a window starts by itself",
    lambda c: c.start_pos_ids is not None and not c.cfg.use_pos_id,
    example=_tkg(dict(start_pos_ids=np.zeros((1, 2), np.int32))),
    stage=0,
)
_row(
    "stale_slots",
    "stale_slots_visible of cfg needs start_pos_ids: without them no stale slot is "
    "ever seen",
    lambda c: c.cfg.stale_slots_visible and c.start_pos_ids is None,
    example=_tkg(use_pos_id=True, stale_slots_visible=True),
    stage=0,
)
_row(
    "inv_freqs",
    "inv_freqs must be given for fuse_rope, got None",
    lambda c: c.inv_freqs is None and c.cfg.fuse_rope,
    example=_tkg(dict(inv_freqs=None), fuse_rope=True),
    stage=0,
)
_row(
    "mask",
    "mask must be given without use_pos_id, got None",
    lambda c: c.mask is None and not c.cfg.use_pos_id,
    example=_tkg(dict(mask=None)),
    stage=0,
)
_row(
    "rotary_width",
    "d_head of cfg must be even for fuse_rope, got {cfg.d_head}",
    lambda c: c.cfg.fuse_rope and c.cfg.d_head % 2 == 1,
    example=_tkg(fuse_rope=True, d_head=63),
    stage=0,
)
_row(
    "block_layout",
    "the keys of a block cache are [num_blocks, block_len, d]: tp_k_prior of cfg must "
    "be True, got False",
    lambda c: c.active_blocks_table is not None and not c.cfg.tp_k_prior,
    example=_blocks(tp_k_prior=False),
    stage=0,
)
_row(
    "table",
    "active_blocks_table must be integers of shape [bs, curr_sprior / block_len], "
    "whose product with block_len = {cfg.block_len} is curr_sprior = "
    "{cfg.curr_sprior}, got {active_blocks_table.dtype} {active_blocks_table.shape}",
    lambda c: (
        c.active_blocks_table is not None
        and not (
            is_integer(c.active_blocks_table)
            and len(c.active_blocks_table.shape) == 2
            and c.active_blocks_table.shape[0] == c.cfg.bs
            and c.active_blocks_table.shape[1] * c.cfg.block_len == c.cfg.curr_sprior
        )
    ),
    example=_blocks(dict(active_blocks_table=np.zeros((1, 2), np.uint32))),
    stage=0,
)
_row(
    "shapes",
    "cfg asks for shapes {expected}, got {got}",
    lambda c: bool(c.expected),
    example=_tkg(dict(v_active=np.zeros((1, 1, 3, 64), np.float32))),
)
_row(
    "mask_dtype",
    "mask must be boolean or integer, nonzero = attend, got {mask.dtype}: an additive "
    "mask would be read upside down",
    lambda c: not is_mask(c.mask),
    example=_tkg(dict(mask=np.zeros((6, 1, 2, 2), np.float32))),
)
_row(
    "cache_pair",
    "k_prior and v_prior must have as many rows or blocks, got {k_prior.shape} and "
    "{v_prior.shape}",
    lambda c: not c.expected and c.k_prior.shape[0] != c.v_prior.shape[0],
    example=_tkg(dict(k_prior=np.zeros((2, 1, 64, 8), np.float32))),
)
_row(
    "block_number",
    "active_blocks_table must hold blocks in [0, {num_blocks}), or -1 for none, got "
    "{wrong_block}",
    lambda c: c.wrong_block is not None,
    example=_blocks(dict(active_blocks_table=np.array([[0, 3, -1]], np.int32))),
)
_row(
    "whole_positions",
    "rope_pos_ids and start_pos_ids must be whole numbers, got {fraction}",
    lambda c: c.fraction is not None,
    example=_tkg(dict(rope_pos_ids=np.array([[0.5, 1.5]])), use_pos_id=True),
)
_row(
    "dtypes",
    "q and sink must be bfloat16, float16, float32 or float64, keys and values these "
    "or float8_e4m3, got {odd}",
    lambda c: bool(c.odd),
    example=_tkg(dict(v_prior=np.zeros((1, 1, 8, 64), "int8"))),
)
_row(
    "fp8_together",
    "k_active, v_active, k_prior and v_prior must be float8_e4m3 together: a cache "
    "holds scaled values, got it in {fp8_mixed} alone",
    lambda c: bool(c.fp8_mixed),
    example=_fp8("k_active"),
)
_row(
    "fp8_rotation",
    "fuse_rope rotates no fp8 keys: the result would have to be rounded again",
    lambda c: c.fp8 and c.cfg.fuse_rope,
    example=_fp8(fuse_rope=True),
)
_row(
    "head_dim",
    "the chip takes d_head of at most 128, got {value}",
    size=Size("d_head", lambda c: c.cfg.d_head, maximum=128),
    example=_tkg(d_head=130),
    tag="hw",
)
_row(
    "rotary_head_dim",
    "the chip rotates d_head in multiples of 64, got {cfg.d_head}",
    lambda c: c.cfg.fuse_rope and c.cfg.d_head % 64 != 0,
    example=_tkg(fuse_rope=True, d_head=32),
    tag="hw",
)
_row(
    "rotary_columns",
    "the chip rotates at most 128 columns bs * q_head * s_active, got {columns}",
    lambda c: c.cfg.fuse_rope and c.columns > 128,
    example=_tkg(fuse_rope=True, bs=33),
    tag="hw",
)
_row(
    "rotary_reach",
    "the chip rotates positions below 131072, got curr_sprior = {cfg.curr_sprior}",
    lambda c: c.cfg.fuse_rope and c.cfg.curr_sprior > 131072,
    example=_tkg(fuse_rope=True, curr_sprior=131073, full_sprior=131073, d_head=2),
    tag="hw",
)
_row(
    "rotary_cores",
    "the chip does not rotate where two cores share the sequences, as they do for "
    "bs = {cfg.bs} and curr_sprior = {cfg.curr_sprior}",
    lambda c: c.cfg.fuse_rope and c.by_batch and c.columns <= 128,
    example=_tkg(fuse_rope=True, bs=2),
    tag="hw",
)
_row(
    "on_chip_query",
    "the chip takes q and k_active with qk_in_sb = True unless it rotates them, got "
    "False",
    lambda c: not (c.cfg.fuse_rope or c.cfg.qk_in_sb),
    example=_tkg(qk_in_sb=False),
    tag="hw",
)
_row(
    "shared_slots",
    "where two cores share the cache, the chip takes curr_sprior in multiples of 256, "
    "got {cfg.curr_sprior}",
    lambda c: c.by_slots and c.cfg.curr_sprior % 256 != 0,
    example=_tkg(curr_sprior=300, full_sprior=300),
    tag="hw",
)
_row(
    "last_tile",
    "the chip walks the slots of a core in tiles of 8192, of which the last must hold "
    "s_active = {cfg.s_active}, got {last_tile}",
    lambda c: 0 < c.last_tile < c.cfg.s_active,
    example=_tkg(curr_sprior=16386, full_sprior=16386, d_head=1),
    tag="hw",
)
_row(
    "fp8_query",
    "the chip takes no float32 q with fp8 keys and values, got {q.dtype}",
    lambda c: c.fp8 and c.q.dtype.itemsize > 2,
    example=lambda function: dict(_fp8()(function), q=np.zeros((64, 4), np.float32)),
    tag="hw",
)
_row(
    "fp8_on_chip",
    "the chip takes fp8 keys and values with qk_in_sb = True, got False",
    lambda c: c.fp8 and not c.cfg.qk_in_sb,
    example=_fp8(qk_in_sb=False),
    tag="hw",
)
_row(
    "block_table_dtype",
    "the chip takes active_blocks_table in uint32, got {active_blocks_table.dtype}",
    lambda c: (
        c.active_blocks_table is not None and c.active_blocks_table.dtype != np.uint32
    ),
    example=_blocks(dict(active_blocks_table=np.zeros((1, 3), np.int32))),
    tag="hw",
)
_row(
    "block_order",
    "the chip takes a block cache with strided_mm1 = False, got True",
    lambda c: c.active_blocks_table is not None and c.cfg.strided_mm1,
    example=_blocks(strided_mm1=True),
    tag="hw",
)
_row(
    "block_on_chip",
    "the chip takes a block cache with qk_in_sb = True, got False",
    lambda c: c.active_blocks_table is not None and not c.cfg.qk_in_sb,
    example=_blocks(qk_in_sb=False),
    tag="hw",
)
