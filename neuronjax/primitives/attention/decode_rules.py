"""What decode attention refuses."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.contracts import Contract, Size, all_or_none_tiles
from neuronjax.primitives.tile import MemrefTile

# Which axis of each tensor a tile lies on; the keys' is the head dimension.
AXES = dict(q=3, k_active=3, v_active=2, k_prior=2, v_prior=2, lengths=0)
_TKG, _EMITTER = ("attention_tkg",), ("attention_tkg_fwd_kernel",)


def tkg_facts(call: SimpleNamespace) -> dict[str, Any]:
    """The shapes that the config asks for, by argument."""
    c = call.cfg
    d, rows, heads = c.d_head, c.bs, c.q_head
    whole = (rows, heads, c.s_active, d), (rows, 1, c.s_active, d)
    flat = (d, rows * heads * c.s_active), (d, rows * c.s_active)
    q, k_active = flat if c.qk_in_sb else whole
    keys = (c.full_sprior, d) if c.tp_k_prior else (d, c.full_sprior)
    seen = c.s_active if c.use_pos_id else c.curr_sprior
    expected = dict(
        q=q,
        k_active=k_active,
        v_active=(rows, 1, c.s_active, d),
        k_prior=("at least", rows, 1, *keys),
        v_prior=("at least", rows, 1, c.full_sprior, d),
        mask=(seen, rows, heads, c.s_active),
        rope_pos_ids=(rows, c.s_active),
        inv_freqs=(d // 2, 1),
    )
    return dict(
        expected=", ".join(
            f"{argument} {shape}"
            for argument, shape in expected.items()
            if _misfits(call, argument, shape)
        ),
        columns=rows * heads * c.s_active,
        tiled=False,
    )


def _misfits(call: SimpleNamespace, argument: str, shape: tuple) -> bool:
    value = getattr(call, argument)
    if value is None:
        return False
    if shape[0] == "at least":
        got = tuple(value.shape)
        return got[1:] != shape[2:] or got[0] < shape[1]
    return tuple(value.shape) != shape


def emitter_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes of the emitter's operands."""
    batch, heads, seq, d = call.q.shape
    tiled = isinstance(call.q, MemrefTile)
    slots = call.v_prior.shape[2]
    count = slots if call.prior_slots is None else call.prior_slots
    seen = count if call.k_active is None else count + seq
    return dict(
        batch=batch,
        num_heads=heads,
        num_kv_heads=call.v_prior.shape[1],
        seq=seq,
        d=d,
        slots=slots,
        count=count,
        mask_shape=(seen, batch, heads, seq),
        keys=(slots, d) if call.tp_k_prior else (d, slots),
        tiled=tiled,
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """An `AttnTKGConfig` in all but name: the rules need no class of the functions."""

    bs: int = 1
    q_head: int = 2
    s_active: int = 2
    curr_sprior: int = 6
    full_sprior: int = 8
    d_head: int = 64
    block_len: int = 0
    tp_k_prior: bool = False
    use_pos_id: bool = False
    fuse_rope: bool = False
    qk_in_sb: bool = True
    k_out_in_sb: bool = False
    out_in_sb: bool = False


def _tkg(operands: dict[str, Any] | None = None, **sizes: Any):
    """Arguments that keep every rule but the one that `sizes` or `operands` break."""
    c = _Sizes(**sizes)
    d, s, columns = c.d_head, c.s_active, c.bs * c.q_head * c.s_active
    whole = (c.bs, c.q_head, s, d), (c.bs, 1, s, d)
    q, k = ((d, columns), (d, c.bs * s)) if c.qk_in_sb else whole
    shapes = dict(
        q=q,
        k_active=k,
        v_active=(c.bs, 1, s, d),
        k_prior=(c.bs, 1, d, c.full_sprior),
        v_prior=(c.bs, 1, c.full_sprior, d),
        mask=(s if c.use_pos_id else c.curr_sprior, c.bs, c.q_head, s),
    )
    if c.fuse_rope:
        shapes |= dict(rope_pos_ids=(c.bs, s), inv_freqs=(d // 2, 1))
    arrays = {
        k: np.zeros(tuple(max(n, 0) for n in v), np.float32) for k, v in shapes.items()
    }
    return lambda function: dict(arrays, cfg=c, **(operands or {}))


def _emitter(**changes: Any):
    shapes = dict(
        q=(1, 4, 2, 8),
        k_active=(1, 2, 2, 8),
        v_active=(1, 2, 2, 8),
        k_prior=(1, 2, 8, 6),
        v_prior=(1, 2, 6, 8),
    )
    shapes |= {k: v for k, v in changes.items() if isinstance(v, tuple)}
    arrays = {k: np.zeros(v, np.float32) for k, v in shapes.items()}
    rest = {k: v for k, v in changes.items() if not isinstance(v, tuple)}
    base = dict(arrays, lengths=np.zeros(1, jnp.int32))
    return lambda function: dict(base, **rest) if not rest else {**base, **rest}


def _tiles() -> dict[str, MemrefTile]:
    arrays = _emitter()("")
    return {
        name: MemrefTile.from_tensor(arrays[name], axis) for name, axis in AXES.items()
    }


def _on_their_axes(call: SimpleNamespace) -> bool:
    tiles = {name: getattr(call, name) for name in AXES}
    # A tensor among tiles is another rule's matter.
    return all(
        not isinstance(t, MemrefTile) or t.axis == AXES[name]
        for name, t in tiles.items()
    )


RULES = (
    Contract(
        "attention_tkg.sizes",
        _TKG,
        "{function}: sizes of cfg must be positive, got {cfg}",
        lambda c: (
            min(c.cfg.bs, c.cfg.q_head, c.cfg.s_active, c.cfg.d_head, c.cfg.curr_sprior)
            < 1
        ),
        example=_tkg(s_active=0),
        stage=0,
    ),
    Contract(
        "attention_tkg.block_len",
        _TKG,
        "{function}: block_len of cfg must be 0 without active_blocks_table, "
        "got {cfg.block_len}",
        lambda c: c.cfg.block_len != 0,
        example=_tkg(block_len=16),
        stage=0,
    ),
    Contract(
        "attention_tkg.cache_in_use",
        _TKG,
        "{function}: curr_sprior of cfg must lie between s_active = {cfg.s_active} and "
        "full_sprior = {cfg.full_sprior}, got {cfg.curr_sprior}",
        lambda c: not c.cfg.s_active <= c.cfg.curr_sprior <= c.cfg.full_sprior,
        example=_tkg(curr_sprior=9),
        stage=0,
    ),
    Contract(
        "attention_tkg.positions",
        _TKG,
        "{function}: rope_pos_ids must be given for use_pos_id and fuse_rope, got None",
        lambda c: c.rope_pos_ids is None and (c.cfg.use_pos_id or c.cfg.fuse_rope),
        example=_tkg(use_pos_id=True),
        stage=0,
    ),
    Contract(
        "attention_tkg.inv_freqs",
        _TKG,
        "{function}: inv_freqs must be given for fuse_rope, got None",
        lambda c: c.inv_freqs is None and c.cfg.fuse_rope,
        example=_tkg(dict(inv_freqs=None), fuse_rope=True),
        stage=0,
    ),
    Contract(
        "attention_tkg.mask",
        _TKG,
        "{function}: mask must be given without use_pos_id, got None",
        lambda c: c.mask is None and not c.cfg.use_pos_id,
        example=_tkg(dict(mask=None)),
        stage=0,
    ),
    Contract(
        "attention_tkg.rotary_width",
        _TKG,
        "{function}: d_head of cfg must be even for fuse_rope, got {cfg.d_head}",
        lambda c: c.cfg.fuse_rope and c.cfg.d_head % 2 == 1,
        example=_tkg(fuse_rope=True, d_head=63),
        stage=0,
    ),
    Contract(
        "attention_tkg.shapes",
        _TKG,
        "{function}: cfg asks for shapes {expected}, got q {q.shape}, k_active "
        "{k_active.shape}, v_active {v_active.shape}, k_prior {k_prior.shape}, v_prior "
        "{v_prior.shape}",
        lambda c: bool(c.expected),
        example=_tkg(dict(v_active=np.zeros((1, 1, 3, 64), np.float32))),
    ),
    Contract(
        "attention_tkg.head_dim",
        _TKG,
        "{function}: the chip takes d_head of at most 128, got {value}",
        size=Size("d_head", lambda c: c.cfg.d_head, maximum=128),
        example=_tkg(d_head=130),
        tag="hw",
    ),
    Contract(
        "attention_tkg.rotary_head_dim",
        _TKG,
        "{function}: the chip rotates d_head in multiples of 64, got {cfg.d_head}",
        lambda c: c.cfg.fuse_rope and c.cfg.d_head % 64 != 0,
        example=_tkg(fuse_rope=True, d_head=32),
        tag="hw",
    ),
    Contract(
        "attention_tkg.rotary_columns",
        _TKG,
        "{function}: the chip rotates at most 128 columns bs * q_head * s_active, "
        "got {columns}",
        lambda c: c.cfg.fuse_rope and c.columns > 128,
        example=_tkg(fuse_rope=True, bs=33),
        tag="hw",
    ),
    Contract(
        "attention_tkg.rotary_reach",
        _TKG,
        "{function}: the chip rotates positions below 131072, got curr_sprior = "
        "{cfg.curr_sprior}",
        lambda c: c.cfg.fuse_rope and c.cfg.curr_sprior > 131072,
        example=_tkg(fuse_rope=True, curr_sprior=131073, full_sprior=131073, q_head=1),
        tag="hw",
    ),
    Contract(
        "attention_tkg.on_chip_query",
        _TKG,
        "{function}: the chip takes q and k_active with qk_in_sb = True unless it "
        "rotates them, got False",
        lambda c: not (c.cfg.fuse_rope or c.cfg.qk_in_sb),
        example=_tkg(qk_in_sb=False),
        tag="hw",
    ),
    all_or_none_tiles(
        "attention_tkg_fwd_kernel",
        ("q", "k_active", "v_active", "k_prior", "v_prior", "mask", "lengths"),
        lambda function: dict(
            _emitter()(function),
            q=MemrefTile.from_tensor(np.zeros((1, 4, 2, 8), np.float32), 3),
        ),
    ),
    Contract(
        "attention_tkg_fwd_kernel.tiles",
        _EMITTER,
        "{function}: tiles come with lengths, all slots and no rotation, got mask, "
        "inv_freqs, prior_slots or tp_k_prior",
        lambda c: (
            isinstance(c.q, MemrefTile)
            and (c.mask, c.inv_freqs, c.prior_slots, c.tp_k_prior)
            != (None, None, None, False)
        ),
        example=lambda function: dict(_tiles(), prior_slots=3),
        stage=0,
    ),
    Contract(
        "attention_tkg_fwd_kernel.tile_axes",
        _EMITTER,
        "{function}: tiles must lie on axis 3 of q and k_active, 2 of k_prior, "
        "v_active and v_prior, 0 of lengths",
        lambda c: isinstance(c.q, MemrefTile) and not _on_their_axes(c),
        example=lambda function: dict(
            _tiles(), q=MemrefTile.from_tensor(np.zeros((1, 4, 2, 8), np.float32), 2)
        ),
        stage=0,
    ),
    Contract(
        "attention_tkg_fwd_kernel.rank",
        _EMITTER,
        "{function}: q, k_prior and v_prior must have 4 axes, got {q.shape}, "
        "{k_prior.shape} and {v_prior.shape}",
        lambda c: {len(x.shape) for x in (c.q, c.k_prior, c.v_prior)} != {4},
        example=_emitter(q=(4, 2, 8)),
        stage=0,
    ),
    Contract(
        "attention_tkg_fwd_kernel.pair",
        _EMITTER,
        "{function}: k_active and v_active must both be given or both be None",
        lambda c: (c.k_active is None) != (c.v_active is None),
        example=_emitter(v_active=None),
        stage=0,
    ),
    Contract(
        "attention_tkg_fwd_kernel.visibility",
        _EMITTER,
        "{function}: exactly one of mask and lengths must be given",
        lambda c: (c.mask is None) == (c.lengths is None),
        example=_emitter(lengths=None),
        stage=0,
    ),
    Contract(
        "attention_tkg_fwd_kernel.rotation",
        _EMITTER,
        "{function}: inv_freqs needs rope_pos_ids and k_active, and these need it",
        lambda c: (
            (c.inv_freqs is None) != (c.rope_pos_ids is None)
            or (c.inv_freqs is not None and c.k_active is None)
        ),
        example=_emitter(inv_freqs=np.ones((4, 1), np.float32)),
        stage=0,
    ),
    Contract(
        "attention_tkg_fwd_kernel.heads",
        _EMITTER,
        "{function}: num_heads of q must be a multiple of num_kv_heads of v_prior, "
        "got {num_heads} and {num_kv_heads}",
        lambda c: c.num_heads % c.num_kv_heads != 0,
        example=_emitter(q=(1, 3, 2, 8)),
    ),
    Contract(
        "attention_tkg_fwd_kernel.cache",
        _EMITTER,
        "{function}: k_prior must have shape [at least {batch}, {num_kv_heads}, "
        "*{keys}] and v_prior as many rows, got {k_prior.shape} and {v_prior.shape}",
        lambda c: (
            tuple(c.k_prior.shape[2:]) != c.keys
            or c.k_prior.shape[:2] != c.v_prior.shape[:2]
            or c.k_prior.shape[0] < c.batch
        ),
        example=_emitter(k_prior=(1, 2, 7, 6)),
    ),
    Contract(
        "attention_tkg_fwd_kernel.active",
        _EMITTER,
        "{function}: k_active must have shape [{batch}, {num_kv_heads}, {seq}, {d}] "
        "and v_active the same but for its width, that of v_prior, got "
        "{k_active.shape} and {v_active.shape}",
        lambda c: (
            c.k_active is not None
            and (
                tuple(c.k_active.shape) != (c.batch, c.num_kv_heads, c.seq, c.d)
                or tuple(c.v_active.shape)
                != (c.batch, c.num_kv_heads, c.seq, c.v_prior.shape[3])
            )
        ),
        example=_emitter(k_active=(1, 2, 3, 8)),
    ),
    Contract(
        "attention_tkg_fwd_kernel.prior_slots",
        _EMITTER,
        "{function}: prior_slots must lie in [0, {slots}], got {count}",
        lambda c: not 0 <= c.count <= c.slots,
        example=_emitter(prior_slots=7),
    ),
    Contract(
        "attention_tkg_fwd_kernel.mask_shape",
        _EMITTER,
        "{function}: mask must have shape {mask_shape}, got {mask.shape}",
        lambda c: c.mask is not None and tuple(c.mask.shape) != c.mask_shape,
        example=_emitter(lengths=None, mask=np.ones((6, 1, 4, 2), bool)),
    ),
    Contract(
        "attention_tkg_fwd_kernel.lengths_shape",
        _EMITTER,
        "{function}: lengths must be integers of shape ({batch},), got {lengths.dtype} "
        "{lengths.shape}",
        lambda c: (
            c.lengths is not None
            and (
                tuple(c.lengths.shape) != (c.batch,)
                or not jnp.issubdtype(c.lengths.dtype, jnp.integer)
            )
        ),
        example=_emitter(lengths=np.zeros(1, np.float32)),
    ),
    Contract(
        "attention_tkg_fwd_kernel.head_dim",
        _EMITTER,
        "{function}: the chip takes d of at most 128, got {value}",
        size=Size("d", lambda c: c.d, maximum=128),
        example=_emitter(
            q=(1, 4, 2, 130), k_active=(1, 2, 2, 130), k_prior=(1, 2, 130, 6)
        ),
        tag="hw",
    ),
)
