"""Decode attention: the emitter of `AttentionTkgFwd`, and the family's rules."""

from typing import Any

from jaxtyping import Array, Float, Int, Integer, Shaped

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
from neuronjax.primitives.attention.decode_examples import OPTIONS_VARIANT, example
from neuronjax.primitives.attention.decode_facts import emitter_facts
from neuronjax.primitives.attention.decode_rules import AXES
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.macro import MacroFamily
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

Operand = Array | MemrefTile


@contracted(emitter_facts)
def attention_tkg_fwd_kernel(
    q: Operand,
    k_active: Operand | None,
    v_active: Operand | None,
    k_prior: Operand,
    v_prior: Operand,
    *,
    mask: Shaped[Array, "_ batch num_heads seq"] | None = None,
    lengths: Operand | None = None,
    prior_slots: int | None = None,
    tp_k_prior: bool = False,
    inv_freqs: Float[Array, "half 1"] | None = None,
    rope_pos_ids: Int[Array, "batch seq"] | None = None,
    start_pos_ids: Integer[Array, "batch seq"] | None = None,
    sink: Float[Array, "num_heads 1"] | None = None,
    active_blocks_table: Integer[Array, "batch blocks"] | None = None,
) -> Operand | tuple[Array, Array]:
    """Emits the macro `AttentionTkgFwd` (config `is_tkg=True`).

    Unlike `attention_tkg` it takes any number of key/value heads, and the new tokens do
    not occupy slots: they are visible beside the cache. Tiles keep the NAME (config
    `is_tiled=True`); they lie on the head dimension of `q`, `k_active` and `k_prior`,
    on the slots of the values, on the batch of `lengths`, and the output on its value
    dimension. They come with `lengths`, all slots of a flat cache, no rotation, no
    window and no sink.

    Args:
        q: `[batch, num_heads, seq, d]`; scale it first.
        k_active: new keys, `[batch, num_kv_heads, seq, d]`; `None` to see the cache
            alone.
        v_active: new values, `[batch, num_kv_heads, seq, value_dim]`.
        k_prior: `[batch+, num_kv_heads, d, slots]`, or `[.., slots, d]` if
            `tp_k_prior`. With a table `[num_blocks, num_kv_heads, block_len, d]`.
        v_prior: `[batch+, num_kv_heads, slots, value_dim]`, or `[num_blocks,
            num_kv_heads, block_len, value_dim]`.
        mask: what is seen, `[prior_slots (+ seq), batch, num_heads, seq]`, in token
            order, the new tokens last; with `lengths` it covers the new tokens alone,
            `[seq, batch, num_heads, seq]`, which are causal without it. Nonzero =
            attend; it gets no gradient. Boolean or integer.
        lengths: `[batch]`: how many slots of each sequence are filled, or where its
            window ends; or `[batch, seq]`, an end for each query. May be traced: one
            past the slots is then all of them, a negative one none.
        prior_slots: how many slots count; all by default.
        tp_k_prior: layout of the cached keys; `True` for a block cache.
        inv_freqs: `[d/2, 1]`; rotates `q` and `k_active` and divides `q` by `sqrt(d)`.
        rope_pos_ids: `[batch, seq]`, positions for `inv_freqs`.
        start_pos_ids: `[batch, seq]`, with `lengths`: the first slot that each query
            sees. Where it is greater than the end, the window goes around; one that
            begins among the new tokens has its start at the end.
        sink: `[num_heads, 1]`, one more logit of each head, without a value.
        active_blocks_table: `[batch, blocks]`: the blocks of each sequence, in order;
            -1 is none. See `attention_tkg`.

    Returns:
        `[batch, num_heads, value_dim, seq]` in the dtype of `q`; with `inv_freqs` also
        the rotated keys, like `k_active`.

    Raises:
        ValueError: shapes or dtypes do not fit, neither `mask` nor `lengths` is given,
            or lengths are known while tracing and lie outside of the slots.
    """
    cached = (q, k_active, v_active, k_prior, v_prior)
    more = (inv_freqs, rope_pos_ids, start_pos_ids, sink, active_blocks_table)
    if is_all_io_type_memref_tile(
        (*cached, mask, lengths, *more), "attention_tkg_fwd_kernel"
    ):
        return _emit_tiled(cached, lengths)
    slots = v_prior.shape[2]
    if active_blocks_table is not None:
        slots = slots * active_blocks_table.shape[1]
    out, k_out = emit_decode(
        *cached,
        mask=mask,
        lengths=lengths,
        prior_slots=slots if prior_slots is None else prior_slots,
        tp_k_prior=tp_k_prior,
        inv_freqs=inv_freqs,
        rope_pos_ids=rope_pos_ids,
        sink=sink,
        starts=start_pos_ids,
        table=active_blocks_table,
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


def emit_decode(
    *cached: Any,
    mask: Any,
    lengths: Any,
    inv_freqs: Any,
    rope_pos_ids: Any,
    sink: Any,
    starts: Any,
    table: Any,
    **layout: Any,
) -> tuple[Array, Array | None]:
    """Binds the untiled macro; returns `out` and the rotated keys, if there are any."""
    config = dict(layout, fuse_rope=inv_freqs is not None, is_tkg=True, is_tiled=False)
    mask = None if mask is None else mask.astype(bool)
    operands = (*cached, mask, lengths, rope_pos_ids, inv_freqs, sink, starts, table)
    out, _, _, *k_out = attention_tkg_family(
        *operands, name="AttentionTkgFwd", **config
    )
    return out, k_out[0] if k_out else None


def _outputs(*, fuse_rope: bool, **_: Any) -> tuple[str, ...]:
    return ("out", "neg_max", "recip", *(["k_out"] if fuse_rope else []))


# By operand of the macro; integers and fp8 values have none.
_GRADIENTS = dict(enumerate("dq dk_active dv_active dk_prior dv_prior".split()))
_GRADIENTS |= {8: "d_inv_freqs", 9: "d_sink"}


def _gradient_names(
    *, gradients: str = " ".join(list(_GRADIENTS.values())[:5]), **_: Any
) -> tuple[str, ...]:
    return tuple(gradients.split())


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
    live = [
        i
        for i, x in enumerate(operands)
        if x is not None and is_differentiable(x.dtype)
    ]
    names = " ".join(_GRADIENTS[i] for i in live)
    config = dict(config, is_tiled=False, gradients=names)
    stored = (*operands, *outs, *cotangents)
    grads = attention_tkg_backward(*stored, name="AttentionTkgFwdBwd", **config)
    by_operand = dict(zip(live, grads, strict=True))
    return tuple(by_operand.get(i) for i in range(len(operands)))


attention_tkg_backward = MacroFamily(
    "attention_tkg_bwd",
    ("AttentionTkgFwdBwd",),
    attention_decode_bwd,
    plain=attention_decode_bwd_plain,
    outputs=_gradient_names,
    static=lambda *operands, **config: attention_decode_bwd(
        *operands, **config, static=True
    ),
    example=example,
    variants=(OPTIONS_VARIANT.replace("Fwd", "FwdBwd"),),
)
attention_tkg_family = MacroFamily(
    "attention_tkg",
    ("AttentionTkgFwd",),
    _leaf,
    plain=_plain,
    outputs=_outputs,
    backward=_emit_backward,
    static=_static_leaf,
    example=example,
    variants=("AttentionTkgFwd (tiles)", OPTIONS_VARIANT),
)
