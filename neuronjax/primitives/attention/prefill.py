"""Prefill attention: `attention_cte`, and the emitter of its macros."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from neuronjax.context import settings
from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.attention import (
    prefill_option_rules,  # noqa: F401  enters the rows
)
from neuronjax.primitives.attention.prefill_extras import (
    as_bounds,
    as_mask,
    as_position,
    dropout_settings,
    non_default,
)
from neuronjax.primitives.attention.prefill_facts import (
    attention_name,
    cte_facts,
    kernel_facts,
)
from neuronjax.primitives.attention.prefill_macro import attention, emit_tiled
from neuronjax.primitives.attention.prefix_caching import prefix_caching
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.tile import MemrefTile, is_all_io_type_memref_tile

Operand = Array | MemrefTile


@contracted(cte_facts)
def attention_cte(
    q: Float[Operand, "heads _ _"],
    k: Float[Operand, "kv_heads _ _"],
    v: Float[Operand, "kv_heads kv_seq value_dim"],
    scale: float | Array | None = 1.0,
    causal_mask: bool = True,
    k_prior: Float[Array, "kv_heads _ _"] | None = None,
    v_prior: Float[Array, "kv_heads prior value_dim"] | None = None,
    prior_used_len: Int[Array, "1"] | None = None,
    sink: Float[Array, "heads 1"] | None = None,
    sliding_window: int | None = None,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    cache_softmax: bool = False,
    softmax_dtype: DTypeLike = jnp.float32,
    mm_out_dtype: DTypeLike = jnp.float32,
    cp_offset: Int[Array, "1 1"] | None = None,
    global_cp_deg: int | None = None,
    cp_strided_q_slicing: bool = False,
    bound_min: Array | None = None,
    bound_max: Array | None = None,
    *,
    mask: Bool[Array, "_ _ _"] | None = None,
    bias: Float[Array, "_ _ _"] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Operand | tuple[Operand, Array, Array]:
    r"""Attention of a whole sequence: the prefill phase, and training.

    $$o_i = \sum_j \frac{e^{z_{ij}}}{\sum_l e^{z_{il}}} v_j, \qquad
      z_{ij} = \mathrm{scale} \cdot \langle q_i, k_j \rangle$$

    Query `i` stands at position `i`, key `j` at `j`, and slot `j` of a prior with `u`
    slots in use at `j - u`. With `causal_mask` a query sees keys up to its own
    position: aligned top-left, whatever the lengths are. For `q = k = 0`,
    `v = [1, 2, 3, 4, 5]` two queries give `[1.0, 1.5]`, and behind a prior of the first
    three `[2.5, 3.0]`. A window of `W` leaves the last `W` of these, the query's own
    included: `v = [1, 2, 4, 8]`, `W = 2` gives `[1, 1.5, 3, 6]`.

    The scores are capped first, `c * tanh(z / c)`, then the bias is added. A sink is
    one more score of its head's rows, without a key, neither scaled, capped nor masked:
    it takes part in the maximum and the sum alone. Dropout drops normalised weights and
    divides the others by `1 - rate`.

    Batch is folded into the heads, `B*Hq` and `B*Hk`; query head `h` attends with key
    head `h // (Hq / Hk)`: neighbours share one. No temporary has both sequence lengths.

    Args:
        q: `[heads, q_seq, d]`, or `[heads, d, q_seq]` if not `tp_q`; any floating
            dtype. A tile lies on `d`.
        k: `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`. A tile lies on
            `d`.
        v: `[kv_heads, kv_seq, value_dim]`; `value_dim` may differ from `d`. A tile lies
            on `kv_seq`.
        scale: multiplies the scores; folded into `q` in float32. `None` is
            `1/sqrt(d)`; 0 is 0. A number or a scalar array; it changes no dtype.
        causal_mask: see above.
        k_prior: keys of a cached prefix, laid out like `k`.
        v_prior: its values, `[kv_heads, prior, value_dim]`.
        prior_used_len: how many slots of the prefix are filled, `[1]`; may be traced.
            Slots past it are never read, and their gradients are zero. A traced length
            past the buffer moves the window as it says; slots that are not there show
            nothing.
        sink: one logit a query head, `[heads, 1]`.
        sliding_window: `W`, with `causal_mask`; `None` and 0 mean no window.
        tp_q: layout of `q`.
        tp_k: layout of `k`.
        tp_out: return `[heads, value_dim, q_seq]`.
        cache_softmax: return the statistics too.
        softmax_dtype: what weights and statistics are rounded to: float32 (float64
            inputs keep float64) or bfloat16, through which gradients pass unrounded.
        mm_out_dtype: what the products of queries and keys are rounded to: float32, or
            for the target gen4 bfloat16.
        cp_offset: the position of query 0, `[1, 1]`, where `q` is one part of a
            sequence and `k` all of it; may be traced.
        global_cp_deg: how many parts there are.
        cp_strided_q_slicing: query `i` stands at `cp_offset + i * global_cp_deg`
            instead of `cp_offset + i`.
        bound_min: packed sequences: the first key that a query sees, `[q_seq, 1]`,
            besides `causal_mask`; comes with `bound_max`. No gradient.
        bound_max: one past the last.
        mask: `[1 or heads, 1 or q_seq, 1 or kv]`, nonzero = keep; no gradient. With a
            prefix `kv` counts its slots, then the keys.
        bias: the same shapes, added to the scores; a key of bias -inf is not seen.
        logits_soft_cap: `c`; `None` for none.
        dropout_rate: in `[0, 1)`.
        dropout_key: a JAX random key, or one a head, `[heads]`; a weight is dropped by
            the key, its head, its query's position and its column alone, however the
            work is cut.

    Returns:
        `out`, `[heads, q_seq, value_dim]` in the dtype of `q`, or with `cache_softmax`
        `(out, out_neg_max, out_sum_recip)`: the negative row maximum and the reciprocal
        of the row sum, `[heads, q_seq, 1]`, so that the log-sum-exp is
        `-out_neg_max - log(out_sum_recip)`, the sink's part included. All three are
        differentiable. A key or value that a row does not see never reaches it, NaN
        included; a row that sees nothing gives 0. Checkpoint names are `attention_out`,
        `attention_neg_max` and `attention_recip`; with a prefix
        `prefix_caching_attention_out`, `_neg_max` and `_recip`.
        `statistics_to_tiles` gives the chip's layout of the statistics.

    Raises:
        ValueError: shapes or dtypes do not fit; the message has every broken rule. The
            chip's limits (`d` at most 128, at most 512 heads, no scale with a window)
            are reported by `neuronjax.can` and refused for tiles alone.

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1;
        aws-neuron/nki-library, `core/attention/attention_cte.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k = jnp.zeros((1, 2, 1)), jnp.zeros((1, 1, 5))
        >>> v = jnp.array([[[1.0], [2.0], [3.0], [4.0], [5.0]]])
        >>> attention_cte(q, k, v).ravel().tolist()
        [1.0, 1.5]
    """
    q = scaled(q, scale, q.shape[2 if tp_q else 1])
    if tp_k and (causal_mask or k_prior is not None):  # no swapped variant of these
        k, k_prior, tp_k = _turned(k), _turned(k_prior), False
    elif tp_k and tp_q:
        q, tp_q = _turned(q), False
    key, drop = dropout_settings(dropout_rate, dropout_key, q.shape[0])
    bounds = as_bounds(bound_min, bound_max, v.shape[1])
    used, offset = (as_position(x) for x in (prior_used_len, cp_offset))
    prior = (k_prior, v_prior, used)
    extras = Extras(as_mask(mask), bias, sink, *prior, *bounds, offset, key)
    config = _config(q, causal_mask, tp_q, tp_k, tp_out)
    config |= non_default(sliding_window, logits_soft_cap) | drop
    config |= _dtypes(softmax_dtype, mm_out_dtype)
    if cp_strided_q_slicing:
        config["stride"] = int(global_cp_deg or 1)
    if config["is_tiled"]:
        return emit_tiled(q, k, v, None, config)
    out, *rows = _emit(q, k, v, extras, config)
    if not cache_softmax:
        return out
    neg_max, recip = (_rounded(x, softmax_dtype) for x in rows)
    return out, neg_max, recip


@contracted(kernel_facts)
def attention_kernel(
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Array | None = None,
    out: Operand | None = None,
    *,
    active_mask: Array | None = None,
    prefix_mask: Any = None,
    attn_out: Operand | None = None,
    scale: float | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    cache_softmax: bool = False,
    sink: Float[Array, "heads 1"] | None = None,
    q_head: int | None = None,
    batch_size: int | None = None,
    k_active: Any = None,
    v_active: Any = None,
    k_prior: Any = None,
    rope_pos_ids: Any = None,
    dropout_prob: float = 0.0,
    tp_q: bool = False,
    tp_k: bool = False,
    tp_out: bool = False,
    num_stages: int | None = None,
    num_tiles: int | None = None,
    fuse_batches: bool | None = None,
) -> Operand | tuple[Operand, Array, Array]:
    """Emits one of five attention NAMEs, or for tiles `TiledNativeKernelAttention`.

    `k` as `[heads, kv_seq, d]` forces the swapped form `AttentionMMSoftmaxMM`, which
    takes `q` as `[heads, d, q_seq]`; otherwise `is_causal` and the target generation
    choose. Tiles of `q` and `k` lie on `d`, of `v` on its sequence.

    Args:
        q: `[heads, d, q_seq]`, or `[heads, q_seq, d]` if `tp_q`.
        k: `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`.
        v: `[kv_heads, kv_seq, value_dim]`.
        mask: `[1 or heads, 1 or q_seq, 1 or kv_seq]`, nonzero = keep; no gradient. A
            row that sees nothing gives 0, with `neg_max` inf and `recip` 1.
        out: the destination: its shape and dtype are the result's, its values are never
            read.
        active_mask: another word for `mask`.
        prefix_mask: refuses: a prefix is `attention_prefix_caching_fwd_kernel`'s; so
            does `k_prior`.
        attn_out: another word for `out`.
        scale: multiplies the scores, 1 unless given; the causal forms take 1 alone.
        softmax_scale: another word for `scale`.
        is_causal: query `i` sees keys `j <= i`.
        cache_softmax: return `neg_max` and `recip`, `[heads, q_seq, 1]`, too.
        sink: one more logit of each head's rows, `[heads, 1]`, as in `attention_cte`.
        q_head: query heads of one sequence; with `batch_size` checked against `q`.
        batch_size: sequences.
        k_active: refuses: decoding is `attention_tkg_fwd_kernel`'s; so do `v_active`
            and `rope_pos_ids`.
        v_active: see `k_active`.
        k_prior: see `prefix_mask`.
        rope_pos_ids: see `k_active`.
        dropout_prob: 0 alone: `attention_cte` has dropout.
        tp_q: layout of `q`.
        tp_k: layout of `k`.
        tp_out: return `[heads, value_dim, q_seq]`.
        num_stages: a scheduling hint; changes no value.
        num_tiles: a scheduling hint; changes no value.
        fuse_batches: tiles only: several batches share one grid; changes no value.

    Returns:
        `[heads, q_seq, value_dim]` in the dtype of `q` or of the destination; for tiles
        a tile of it on `q_seq`.
    """
    is_all_io_type_memref_tile((q, k, v), "attention_kernel")
    mask = active_mask if mask is None else mask
    scale = softmax_scale if scale is None else scale
    destination = attn_out if out is None else out
    hints = dict(num_stages=num_stages, num_tiles=num_tiles, fuse_batches=fuse_batches)
    config = _config(q, is_causal, tp_q, tp_k, tp_out)
    config |= {key: value for key, value in hints.items() if value is not None}
    if scale is not None:
        config["scale"] = float(scale)
    if config["is_tiled"]:
        return emit_tiled(q, k, v, destination, config)
    attended, *rows = _emit(q, k, v, Extras(mask=as_mask(mask), sink=sink), config)
    if destination is not None:
        attended = attended.astype(destination.dtype)
    return (attended, *rows) if cache_softmax else attended


def _config(q: Operand, is_causal: bool, tp_q, tp_k, tp_out) -> dict[str, Any]:
    layout = dict(tp_q=bool(tp_q), tp_k=bool(tp_k), tp_out=bool(tp_out))
    tiled = isinstance(q, MemrefTile)
    return dict(layout, scale=1.0, is_causal=bool(is_causal), is_tiled=tiled)


def _emit(q, k, v, extras: Extras, config: dict[str, Any]):
    """Emits the NAME that layout, causality and target choose."""
    name = attention_name(config["is_causal"], config["tp_k"], settings().target)
    family = attention if extras.k_prior is None else prefix_caching
    return family(q, k, v, extras, name=name, **config)


def _dtypes(softmax_dtype: DTypeLike, mm_out_dtype: DTypeLike) -> dict[str, str]:
    """Those that are not float32, by name."""
    given = dict(softmax_dtype=softmax_dtype, mm_out_dtype=mm_out_dtype)
    names = {key: jnp.dtype(value).name for key, value in given.items()}
    return {key: name for key, name in names.items() if name != "float32"}


def _rounded(x: Array, dtype: DTypeLike) -> Array:
    return x if jnp.dtype(dtype) == jnp.float32 else x.astype(dtype)


def scaled(x: Operand, scale: Any, d: int) -> Any:
    """`x * scale`, formed in float32 and rounded once; `None` is `1/sqrt(d)`."""
    if isinstance(x, MemrefTile):
        return MemrefTile(scaled(x.data, scale, d), x.axis, x.buffer)
    if scale is None:
        scale = d**-0.5
    if not isinstance(scale, jax.Array):
        scale = float(scale)
        if scale == 1.0:
            return x
    acc = accumulator(x.dtype)
    return (x.astype(acc) * jnp.asarray(scale, acc)).astype(x.dtype)


def _turned(x: Any) -> Any:
    """The last two axes exchanged; the data of a tile lies as it lay."""
    if x is None:
        return None
    if isinstance(x, MemrefTile):
        return MemrefTile(x.data, 3 - x.axis, x.buffer)
    return jnp.swapaxes(x, 1, 2)
