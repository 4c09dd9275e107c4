"""Decode attention: `AttentionTkgFwd` over a flat key/value cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.attention.decode import (
    attention_decode_bwd,
    attention_decode_fwd,
)
from neuronjax.kernels.attention.decode_plain import (
    attention_decode_bwd_plain,
    attention_decode_plain,
)
from neuronjax.kernels.attention.decode_tiled import attention_decode_tiled_fwd
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.attention.decode_rules import (
    AXES,
    RULES,
    emitter_facts,
    tkg_facts,
)
from neuronjax.primitives.contracts import add, contracted
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import refuses
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

Operand = Array | MemrefTile
_INSTEAD = "a flat cache with token-order masks, lengths or position ids is"


@dataclasses.dataclass(frozen=True)
class AttnTKGConfig:
    """Sizes and layouts of one `attention_tkg` call, by the vendor's names.

    Attributes:
        bs: sequences.
        q_head: query heads, which share one key/value head.
        s_active: new tokens a sequence.
        curr_sprior: cache slots in use; the last `s_active` stand for the new tokens.
        full_sprior: slots of the cache.
        d_head: width of a head.
        block_len: slots of a cache block; 0 for a flat cache.
        tp_k_prior: the cached keys are `[.., slots, d]` instead of `[.., d, slots]`.
        strided_mm1: order of the chip's first matmul; changes no value.
        use_pos_id: the prior part is visible below the first position id; `mask` then
            covers the new tokens alone.
        fuse_rope: rotate `q` and `k_active` and divide `q` by `sqrt(d_head)`.
        use_gpsimd_sb2sb: how cores exchange; changes no value.
        qk_in_sb: `q` is `[d, B*Hq*s]` and `k_active` `[d, B*s]`.
        k_out_in_sb: the rotated keys come back as `[d, B*s]`.
        out_in_sb: the output is `[d, B*Hq*s]`.
        enable_fa_s_prior_tiling: how the chip tiles the cache; changes no value.
    """

    bs: int
    q_head: int
    s_active: int
    curr_sprior: int
    full_sprior: int
    d_head: int
    block_len: int = 0
    tp_k_prior: bool = False
    strided_mm1: bool = True
    use_pos_id: bool = False
    fuse_rope: bool = False
    use_gpsimd_sb2sb: bool = True
    qk_in_sb: bool = False
    k_out_in_sb: bool = False
    out_in_sb: bool = False
    enable_fa_s_prior_tiling: bool = True


@refuses(_INSTEAD, start_pos_ids=None, sink=None, active_blocks_table=None)
@contracted(tkg_facts)
def attention_tkg(
    q: Float[Array, "..."],
    k_active: Float[Array, "..."],
    v_active: Float[Array, "batch 1 seq head_dim"],
    k_prior: Float[Array, "cached 1 _ _"],
    v_prior: Float[Array, "cached 1 slots head_dim"],
    mask: Bool[Array, "_ batch num_heads seq"] | None,
    cfg: AttnTKGConfig,
    inv_freqs: Float[Array, "half 1"] | None = None,
    rope_pos_ids: Array | None = None,
    start_pos_ids: None = None,
    sink: None = None,
    active_blocks_table: None = None,
) -> tuple[Array, Array | None]:
    r"""Attends from a few new tokens to a cache and to themselves.

    $$o_t = \sum_j \operatorname{softmax}_j(\langle q_t, k_j \rangle) v_j$$

    over the slots that `mask` shows. Of the first `curr_sprior` slots the last
    `s_active` stand for the new tokens, wherever a sequence ends. No scale is applied
    without `fuse_rope`: scale `q` first. With `use_pos_id` the cache is visible below
    `rope_pos_ids[b, 0]`, and of the new tokens what `mask` shows, or without a mask
    those up to the query itself.

    Args:
        q: `[B, Hq, s, d]`, or `[d, B*Hq*s]` if `cfg.qk_in_sb`.
        k_active: `[B, 1, s, d]`, or `[d, B*s]`.
        v_active: `[B, 1, s, d]`.
        k_prior: `[B+, 1, d, slots]`, or `[B+, 1, slots, d]` if `cfg.tp_k_prior`. Rows
            past `B` are ignored.
        v_prior: `[B+, 1, slots, d]`.
        mask: `[curr_sprior, B, Hq, s]` in token order, nonzero = attend; with
            `use_pos_id` `[s, B, Hq, s]` as (key, batch, head, query), or `None`.
        cfg: sizes and layouts.
        inv_freqs: `[d/2, 1]`, angles per position, radians; for `fuse_rope`.
        rope_pos_ids: `[B, s]`, positions; for `fuse_rope` and `use_pos_id`.
        start_pos_ids: not built yet (sliding windows).
        sink: not built yet.
        active_blocks_table: not built yet (block caches).

    Returns:
        `(out, k_out)`: `[B, Hq, d, s]`, or `[d, B*Hq*s]` if `cfg.out_in_sb`, in the
        dtype of `q`; and with `fuse_rope` the rotated keys `[B, 1, d, s]`, or `[d,
        B*s]` if `cfg.k_out_in_sb`, else `None`. A query that sees nothing gets 0.
        Checkpoint names are `attention_tkg_out`, `_neg_max`, `_recip` and, with
        `fuse_rope`, `_k_out`.

    Raises:
        ValueError: shapes or sizes do not fit; a needed operand is missing.
        NotImplementedError: an option that is not built yet.

    Source:
        aws-neuron/nki-library, `core/attention/attention_tkg.py`.
    """
    sizes = (cfg.bs, cfg.q_head, cfg.s_active)
    if cfg.qk_in_sb:
        q = jnp.moveaxis(q.reshape(cfg.d_head, *sizes), 0, -1)
        k_active = jnp.moveaxis(k_active.reshape(cfg.d_head, cfg.bs, 1, -1), 0, -1)
    positions = None if rope_pos_ids is None else rope_pos_ids.astype(jnp.int32)
    lengths = positions[:, 0] if cfg.use_pos_id else None
    if cfg.use_pos_id and mask is not None:
        slot = jnp.arange(cfg.curr_sprior - cfg.s_active)[:, None, None, None]
        before = jnp.broadcast_to(slot < lengths[:, None, None], (slot.size, *sizes))
        mask, lengths = jnp.concatenate([before, mask.astype(bool)]), None
    out, k_out = _emit(
        *(q, k_active, v_active, k_prior, v_prior),
        mask=None if mask is None else mask.astype(bool),
        lengths=lengths,
        prior_slots=cfg.curr_sprior - cfg.s_active,
        tp_k_prior=cfg.tp_k_prior,
        inv_freqs=inv_freqs if cfg.fuse_rope else None,
        rope_pos_ids=positions if cfg.fuse_rope else None,
    )
    if k_out is not None:
        k_out = _head_first(k_out) if cfg.k_out_in_sb else k_out.mT
    return _head_first(out.mT) if cfg.out_in_sb else out, k_out


@contracted(emitter_facts)
def attention_tkg_fwd_kernel(
    q: Operand,
    k_active: Operand | None,
    v_active: Operand | None,
    k_prior: Operand,
    v_prior: Operand,
    *,
    mask: Bool[Array, "_ batch num_heads seq"] | None = None,
    lengths: Operand | None = None,
    prior_slots: int | None = None,
    tp_k_prior: bool = False,
    inv_freqs: Float[Array, "half 1"] | None = None,
    rope_pos_ids: Int[Array, "batch seq"] | None = None,
) -> Operand | tuple[Array, Array]:
    """Emits the macro `AttentionTkgFwd` (config `is_tkg=True`).

    Unlike `attention_tkg` it takes any number of key/value heads, and the new tokens do
    not occupy slots: they are visible beside the cache, causally. Tiles keep the NAME
    (config `is_tiled=True`); they lie on the head dimension of `q`, `k_active` and
    `k_prior`, on the slots of the values, on the batch of `lengths`, and the output on
    its value dimension. They come with `lengths`, all slots and no rotation.

    Args:
        q: `[batch, num_heads, seq, d]`; scale it first.
        k_active: new keys, `[batch, num_kv_heads, seq, d]`; `None` to see the cache
            alone.
        v_active: new values, `[batch, num_kv_heads, seq, value_dim]`.
        k_prior: `[batch+, num_kv_heads, d, slots]`, or `[.., slots, d]` if
            `tp_k_prior`.
        v_prior: `[batch+, num_kv_heads, slots, value_dim]`.
        mask: what is seen, `[prior_slots (+ seq), batch, num_heads, seq]`, in token
            order, the new tokens last. Boolean: it gets no gradient.
        lengths: instead: how many slots of each sequence are filled; may be traced.
        prior_slots: how many slots count; all by default.
        tp_k_prior: layout of the cached keys.
        inv_freqs: `[d/2, 1]`; rotates `q` and `k_active` and divides `q` by `sqrt(d)`.
        rope_pos_ids: `[batch, seq]`, positions for `inv_freqs`.

    Returns:
        `[batch, num_heads, value_dim, seq]` in the dtype of `q`; with `inv_freqs` also
        the rotated keys, like `k_active`.

    Raises:
        ValueError: shapes do not fit, or not exactly one of `mask` and `lengths` is
            given.
    """
    cached = (q, k_active, v_active, k_prior, v_prior)
    ios = (*cached, mask, lengths, inv_freqs, rope_pos_ids)
    if is_all_io_type_memref_tile(ios, "attention_tkg_fwd_kernel"):
        return _emit_tiled(cached, lengths)
    out, k_out = _emit(
        *cached,
        mask=mask,
        lengths=lengths,
        prior_slots=v_prior.shape[2] if prior_slots is None else prior_slots,
        tp_k_prior=tp_k_prior,
        inv_freqs=inv_freqs,
        rope_pos_ids=rope_pos_ids,
    )
    return out if k_out is None else (out, k_out)


def _emit_tiled(cached, lengths):
    tiles = dict(zip(AXES, (*cached, lengths), strict=True))
    require_partitions("attention_tkg_fwd_kernel", **tiles)
    layout = dict(prior_slots=cached[4].shape[2], tp_k_prior=False, fuse_rope=False)
    config = dict(layout, is_tkg=True, is_tiled=True)
    operands = [None if tile is None else tile.data for tile in tiles.values()]
    out, *_ = attention_tkg_family(*operands, name="AttentionTkgFwd", **config)
    result = MemrefTile(out, 2)
    require_fit("attention_tkg_fwd_kernel", **tiles, out=result)
    return result


def _emit(
    *cached,
    mask,
    lengths,
    inv_freqs,
    rope_pos_ids,
    sink=None,
    starts=None,
    table=None,
    **layout,
):
    config = dict(layout, fuse_rope=inv_freqs is not None, is_tkg=True, is_tiled=False)
    operands = (*cached, mask, lengths, rope_pos_ids, inv_freqs, sink, starts, table)
    out, _, _, *k_out = attention_tkg_family(
        *operands, name="AttentionTkgFwd", **config
    )
    return out, k_out[0] if k_out else None


def _head_first(x: Array) -> Array:
    """`[B, H, s, d]` to `[d, B*H*s]`."""
    return jnp.moveaxis(x, -1, 0).reshape(x.shape[-1], -1)


def _outputs(*, fuse_rope: bool, **_: Any) -> tuple[str, ...]:
    return ("out", "neg_max", "recip", *(["k_out"] if fuse_rope else []))


def _gradient_names(**_: Any) -> tuple[str, ...]:
    return ("dq", "dk_active", "dv_active", "dk_prior", "dv_prior")


def _leaf(*operands, name, is_tiled, **config):
    if is_tiled:
        return attention_decode_tiled_fwd(*operands, name=name, **config)
    return attention_decode_fwd(*operands, name=name, **config)


def _static_leaf(*operands, name, is_tiled, **config):
    if is_tiled:  # it has no loop
        return attention_decode_tiled_fwd(*operands, name=name, **config)
    return attention_decode_fwd(*operands, name=name, **config, static=True)


def _plain(*operands, name, is_tiled, **config):
    if not is_tiled:
        return attention_decode_plain(*operands, name=name, **config)
    outs = attention_decode_plain(*_tensors(operands), name=name, **config)
    return tuple(MemrefTile.from_tensor(out, 2).data for out in outs)


def _tensors(tiles) -> tuple[Any, ...]:
    """A tiled call's operands as tensors, in the order of the untiled leaf."""
    axes = AXES.values()
    tensors = [
        None if data is None else MemrefTile(data, axis).to_tensor()
        for data, axis in zip(tiles, axes, strict=True)
    ]
    return (*tensors[:5], None, tensors[5], *[None] * 5)


def _emit_backward(operands, outs, cotangents, *, name, is_tiled, **config):
    if is_tiled:  # there is no tiled backward: it takes and returns tensors
        outs, cotangents = (
            [None if x is None else MemrefTile(x, 2).to_tensor() for x in arrays]
            for arrays in (outs, cotangents)
        )
        whole = _tensors(operands)
        grads = _backward(whole, outs, cotangents, config)
        pairs = zip(grads[:5], list(AXES.values())[:5], strict=True)
        tiles = [
            None if grad is None else MemrefTile.from_tensor(grad, axis).data
            for grad, axis in pairs
        ]
        return *tiles, None
    return _backward(operands, outs, cotangents, config)


def _backward(operands, outs, cotangents, config):
    config = dict(config, is_tiled=False)
    backward = attention_tkg_backward
    stored = (*outs, *cotangents)
    grads = iter(backward(*operands, *stored, name="AttentionTkgFwdBwd", **config))
    return tuple(
        next(grads) if x is not None and is_differentiable(x.dtype) else None
        for x in operands
    )


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = [(4, 2, 8), (2, 2, 8), (2, 2, 6), (2, 8, 7), (2, 7, 6)]
    cached = [
        jax.random.normal(key, (batch, *shape), dtype) / 2
        for key, shape in zip(keys[:5], shapes, strict=True)
    ]
    lengths = (3 + 2 * jnp.arange(batch, dtype=jnp.int32)) % 8
    config: dict[str, Any] = dict(
        prior_slots=7, tp_k_prior=False, fuse_rope=False, is_tkg=True, is_tiled=False
    )
    if name.endswith("(tiles)"):
        axes = AXES.values()
        tiles = [
            MemrefTile.from_tensor(x, axis).data
            for x, axis in zip((*cached, lengths), axes, strict=True)
        ]
        split = (2, 2, 2, 2, 2, 0)
        return Example(tuple(tiles), dict(config, is_tiled=True), split, (2, 2, 2))
    operands: tuple[Any, ...] = (*cached, None, lengths, *[None] * 5)
    if name == "AttentionTkgFwd":
        return Example(operands, config, (0,) * 6, (0, 0, 0))
    outs = attention_decode_plain(*operands, name="AttentionTkgFwd", **config)
    cotangents = [
        jax.random.normal(key, out.shape, out.dtype)
        for key, out in zip(keys[5:], outs, strict=True)
    ]
    return Example((*operands, *outs, *cotangents), config, (0,) * 12, (0,) * 5)


attention_tkg_backward = MacroFamily(
    "attention_tkg_bwd",
    ("AttentionTkgFwdBwd",),
    attention_decode_bwd,
    plain=attention_decode_bwd_plain,
    outputs=_gradient_names,
    static=lambda *operands, **config: attention_decode_bwd(
        *operands, **config, static=True
    ),
    example=_example,
)
attention_tkg_family = MacroFamily(
    "attention_tkg",
    ("AttentionTkgFwd",),
    _leaf,
    plain=_plain,
    outputs=_outputs,
    backward=_emit_backward,
    static=_static_leaf,
    example=_example,
    variants=("AttentionTkgFwd (tiles)",),
)
add(*RULES)
