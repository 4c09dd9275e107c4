"""What the rules of decode attention read of a call."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.attention.decode_masks import FLASH_TILE, slot_cores
from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.known import known
from neuronjax.primitives.options import FLOATS
from neuronjax.primitives.tile import MemrefTile

CACHED = ("k_active", "v_active", "k_prior", "v_prior")


def tkg_facts(call: SimpleNamespace) -> dict[str, Any]:
    """The shapes that the config of `attention_tkg` asks for, by argument."""
    c, table = call.cfg, call.active_blocks_table
    misfits = [
        (argument, shape)
        for argument, shape in _expected(c, table).items()
        if _misfits(call, argument, shape)
    ]
    columns = c.bs * c.q_head * c.s_active
    by_slots = slot_cores(c.curr_sprior, columns, c.bs, lnc=2) == 2
    shard = c.curr_sprior // 2 if by_slots else c.curr_sprior
    tiled = c.enable_fa_s_prior_tiling and shard > FLASH_TILE
    num_blocks = 0 if table is None else call.v_prior.shape[0]
    return dict(
        expected=", ".join(f"{name} {shape}" for name, shape in misfits),
        got=", ".join(f"{name} {getattr(call, name).shape}" for name, _ in misfits),
        columns=columns,
        by_batch=c.bs % 2 == 0 and not by_slots,
        by_slots=by_slots,
        last_tile=shard % FLASH_TILE if tiled else 0,
        num_blocks=num_blocks,
        wrong_block=wrong_block(table, num_blocks),
        fraction=fraction(call.rope_pos_ids, call.start_pos_ids),
        tiled=False,
        **dtype_facts(call),
    )


def _expected(c: Any, table: Any) -> dict[str, tuple]:
    d, rows, heads, s = c.d_head, c.bs, c.q_head, c.s_active
    whole = (rows, heads, s, d), (rows, 1, s, d)
    flat = (d, rows * heads * s), (d, rows * s)
    q, k_active = flat if c.qk_in_sb else whole
    slots = ("at least", rows, 1)
    keys = (c.full_sprior, d) if c.tp_k_prior else (d, c.full_sprior)
    k_prior, v_prior = (*slots, *keys), (*slots, c.full_sprior, d)
    if table is not None:
        k_prior = v_prior = ("at least", 1, c.block_len, d)
    return dict(
        q=q,
        k_active=k_active,
        v_active=(rows, 1, s, d),
        k_prior=k_prior,
        v_prior=v_prior,
        mask=(s if c.use_pos_id else c.curr_sprior, rows, heads, s),
        rope_pos_ids=(rows, s),
        start_pos_ids=(rows, s),
        inv_freqs=(d // 2, 1),
        sink=(heads, 1),
    )


def _misfits(call: SimpleNamespace, argument: str, shape: tuple) -> bool:
    value = getattr(call, argument)
    if value is None:
        return False
    got = tuple(value.shape)
    if shape[0] == "at least":
        return len(got) != len(shape) - 1 or got[1:] != shape[2:] or got[0] < shape[1]
    return got != shape


def fraction(*ids: Any) -> float | None:
    """The first of known position ids that is no whole number; `None` if none is."""
    for one in ids:
        held = known(one)
        if held is None or held.dtype.kind in "iu":
            continue
        wide = held.astype(np.float64)
        wrong = wide[~np.isfinite(wide) | (wide != np.floor(wide))]
        if wrong.size:
            return float(wrong[0])
    return None


def emitter_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes of the operands of `attention_tkg_fwd_kernel`."""
    batch, heads, seq, d = call.q.shape
    tiled = isinstance(call.q, MemrefTile)
    table, block_len = call.active_blocks_table, call.v_prior.shape[2]
    entries = None if table is None or table.ndim != 2 else table.shape[1]
    slots = block_len if table is None else block_len * (entries or 0)
    count = slots if call.prior_slots is None else call.prior_slots
    seen = 0 if call.lengths is not None else count
    seen = seen if call.k_active is None else seen + seq
    num_blocks = 0 if table is None else call.v_prior.shape[0]
    return dict(
        batch=batch,
        num_heads=heads,
        num_kv_heads=call.v_prior.shape[1],
        seq=seq,
        d=d,
        slots=slots,
        count=count,
        mask_shape=(seen, batch, heads, seq),
        keys=(block_len, d) if call.tp_k_prior else (d, block_len),
        rows=0 if table is not None else batch,
        num_blocks=num_blocks,
        wrong_block=wrong_block(table, num_blocks),
        wrong_length=_wrong_length(call.lengths, slots),
        tiled=tiled,
        **dtype_facts(call),
    )


def _wrong_length(lengths: Any, slots: int) -> int | None:
    """The first of known lengths that no sequence can have; None if none is."""
    held = known(lengths)
    if held is None or held.dtype.kind not in "iu":
        return None
    wrong = held[(held < 0) | (held > slots)]
    return int(wrong[0]) if wrong.size else None


def wrong_block(table: Any, num_blocks: int) -> int | None:
    """The first entry of a known table that is neither a block nor -1; None if none."""
    held = known(table)
    if held is None or held.dtype.kind not in "iu":
        return None
    none = -1 if held.dtype.kind == "i" else np.iinfo(held.dtype).max
    # A block that exists is one, even where its number is the largest of the dtype.
    wrong = held[(held != none) & ((held < 0) | (held >= num_blocks))]
    return int(wrong[0]) if wrong.size else None


def dtype_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Which operands are fp8, and which have a dtype that decoding does not take."""
    given = {
        name: jnp.dtype(getattr(call, name).dtype)
        for name in CACHED
        if getattr(call, name) is not None
    }
    others = {
        name: x for name in ("q", "sink") if (x := getattr(call, name)) is not None
    }
    wide = {name: jnp.dtype(x.dtype) for name, x in others.items()}
    odd = {k: v for k, v in given.items() if v not in (*FLOATS, E4M3)}
    odd |= {k: v for k, v in wide.items() if v not in FLOATS}
    fp8 = [name for name, dtype in given.items() if dtype == E4M3]
    return dict(
        odd=", ".join(f"{name} of dtype {dtype}" for name, dtype in odd.items()),
        fp8=bool(fp8),
        fp8_mixed=", ".join(fp8) if 0 < len(fp8) < len(given) else "",
    )


def is_mask(mask: Any) -> bool:
    """Whether nonzero can mean keep: a float mask is mostly an additive one."""
    return mask is None or is_integer(mask) or mask.dtype == np.bool_


def is_integer(x: Any) -> bool:
    """Whether an operand holds integers."""
    return jnp.issubdtype(x.dtype, jnp.integer)
