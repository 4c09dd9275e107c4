"""The backward of prefill attention: `attention_bwd` and `BackwardsAttention`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.attention import backward_rules  # noqa: F401  enters the rows
from neuronjax.primitives.attention.backward_facts import bwd_facts, kernel_facts
from neuronjax.primitives.attention.backward_macro import attention_gradients
from neuronjax.primitives.attention.prefill_extras import (
    as_bounds,
    as_mask,
    non_default,
)
from neuronjax.primitives.attention.statistics import statistics_from_tiles
from neuronjax.primitives.contracts import contracted

Rows = Float[Array, "heads q_seq 1"]


@contracted(bwd_facts)
def attention_bwd(
    q_ref: Float[Array, "batch num_heads head_dim q_seq"],
    k_ref: Float[Array, "batch num_kv_heads head_dim kv_seq"],
    v_ref: Float[Array, "batch num_kv_heads head_dim kv_seq"],
    o_ref: Float[Array, "batch num_heads head_dim q_seq"],
    dy_ref: Float[Array, "batch num_heads head_dim q_seq"],
    lse_ref: Float[Array, "batch num_heads _ _"],
    sinks_ref: Float[Array, "batch num_heads *sinks"] | None = None,
    bound_min: Float[Array, " q_seq"] | None = None,
    bound_max: Float[Array, " q_seq"] | None = None,
    use_causal_mask: bool = False,
    mixed_precision: bool = False,
    softmax_scale: float | Array | None = None,
    sliding_window: int | None = None,
    *,
    bias_ref: Float[Array, "_ _ _"] | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[Array, ...]:
    r"""The gradients of attention from its stored output and log-sum-exp.

    $$P = e^{z - \mathrm{lse}}, \quad dS = P \circ (dO\, V^T - \mathrm{rowsum}(dO \circ
      O)), \quad dQ = s\, dS\, K, \quad dK = s\, dS^T Q, \quad dV = P^T dO$$

    $$d\mathrm{sink} = -\textstyle\sum_i e^{\mathrm{sink} - \mathrm{lse}_i}\,
      \mathrm{rowsum}(dO \circ O)_i, \quad d\mathrm{bias} = dS$$

    Nothing is recomputed but the scores: `o_ref` and `lse_ref` are read as they are
    given. dK and dV are summed over the query heads of a group.

    Args:
        q_ref: `[B, Hq, d, Sq]`, any floating dtype; all of `q_ref` to `dy_ref` have it.
        k_ref: `[B, Hk, d, Sk]`; query head `h` used key head `h // (Hq / Hk)`.
        v_ref: `[B, Hk, d, Sk]`.
        o_ref: the forward's output, `[B, Hq, d, Sq]`.
        dy_ref: the cotangent of it.
        lse_ref: natural log-sum-exp of the scaled scores, those of sinks included,
            `[B, Hq, 128, Sq / 128]`: element `[.., p, g]` is query `g * 128 + p`; or
            `[B, Hq, Sq, 1]`.
        sinks_ref: the sinks of the forward, `[B, Hq]` or `[B, Hq, number of sinks]`.
        bound_min: the first key that a query saw, `[Sq]`; with `bound_max`.
        bound_max: one past the last.
        use_causal_mask: query `i` saw keys `j <= i`, aligned top-left.
        mixed_precision: sums over a group in float32; here they always are.
        softmax_scale: `s`; `None` is `1/sqrt(d)`, 0 is 0.
        sliding_window: `W`: with `use_causal_mask`, query `i` saw `i - W < j` alone;
            `None` and 0 mean no window.
        bias_ref: the forward's bias, `[1 or B*Hq, 1 or Sq, 1 or Sk]`.
        logits_soft_cap: the forward's soft cap.

    Returns:
        `(dq, dk, dv)` with the shapes and dtypes of `q_ref`, `k_ref` and `v_ref`; then,
        where they are given, those of `sinks_ref` and `bias_ref`.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source:
        Dao 2023, FlashAttention-2, https://arxiv.org/abs/2307.08691, section 2.3.2;
        aws-neuron/nki-library, `core/attention/attention_bwd.py`.
    """
    q, k, v, out, d_out = (
        jax.lax.collapse(x, 0, 2) for x in (q_ref, k_ref, v_ref, o_ref, dy_ref)
    )
    lse = jax.lax.collapse(lse_ref, 0, 2)
    if lse.shape[2] != 1 or lse.shape[1] != q.shape[2]:
        lse = statistics_from_tiles(lse)
    bounds = as_bounds(bound_min, bound_max, k.shape[2])
    sink = None if sinks_ref is None else _joint_sink(sinks_ref)
    extras = Extras(None, bias_ref, sink, None, None, None, *bounds)
    *grads, d_extras = attention_gradients(
        *(q, k, jnp.swapaxes(v, 1, 2), extras),
        *(out, -lse, jnp.ones_like(lse), d_out, None, None),
        scale=q.shape[1] ** -0.5 if softmax_scale is None else softmax_scale,
        is_causal=bool(use_causal_mask),
        tp_q=False,
        tp_k=False,
        tp_out=True,
        **non_default(sliding_window, logits_soft_cap),
    )
    grads[2] = jnp.swapaxes(grads[2], 1, 2)
    pairs = zip(grads, (q_ref, k_ref, v_ref), strict=True)
    found: list[Any] = [dx.reshape(x.shape) for dx, x in pairs]
    if sinks_ref is not None and d_extras.sink is not None:
        found.append(_each_sink(d_extras.sink, sinks_ref))
    found += [] if bias_ref is None else [d_extras.bias]
    return tuple(found)


def _joint_sink(sinks: Array) -> Array:
    """Several sinks weigh as one whose logit is their log-sum-exp: `[B*Hq, 1]`."""
    sinks = sinks.astype(accumulator(sinks.dtype))
    joint = sinks if sinks.ndim == 2 else jax.nn.logsumexp(sinks, -1)
    return joint.reshape(-1, 1)


def _each_sink(d_joint: Array, sinks: Array) -> Array:
    """The joint sink's gradient, shared by weight among the sinks."""
    wide = sinks.astype(d_joint.dtype)
    d_joint = d_joint.reshape(sinks.shape[:2])
    if sinks.ndim == 3:
        # Of sinks that are all -inf, which weigh nothing, none has a share.
        hidden = (wide == -jnp.inf).all(-1, keepdims=True)
        shares = jax.nn.softmax(jnp.where(hidden, 0, wide), -1)
        d_joint = d_joint[..., None] * shares
    return d_joint.astype(sinks.dtype)


@contracted(kernel_facts)
def backwards_attention_kernel(
    q: Float[Array, "heads _ _"],
    k: Float[Array, "kv_heads _ _"],
    v: Float[Array, "kv_heads kv_seq value_dim"],
    out: Float[Array, "heads _ _"],
    d_out: Float[Array, "heads _ _"] | None,
    neg_max: Rows,
    recip: Rows,
    mask: Array | None = None,
    d_neg_max: Rows | None = None,
    d_recip: Rows | None = None,
    *,
    sink: Float[Array, "heads 1"] | None = None,
    bias: Float[Array, "_ _ _"] | None = None,
    is_causal: bool = False,
    softmax_scale: float = 1.0,
    dropout_prob: float = 0.0,
    tp_q: bool = False,
    tp_k: bool = False,
    tp_out: bool = False,
    num_stages: int | None = None,
    num_tiles: int | None = None,
) -> tuple[Array, ...]:
    """Emits the macro `BackwardsAttention`.

    Args:
        q: the forward's queries, as it got them.
        k: the forward's keys.
        v: the forward's values.
        out: its output.
        d_out: the cotangent of `out`; `None` where nothing used it.
        neg_max: its negative row maxima.
        recip: its reciprocal row sums.
        mask: its mask.
        d_neg_max: the cotangent of `neg_max`, if it was used.
        d_recip: the cotangent of `recip`, if it was used.
        sink: its sink.
        bias: its bias.
        is_causal: whether it was causal.
        softmax_scale: 1 alone; fold any other into `q`.
        dropout_prob: 0 alone.
        tp_q: layout of `q` and `dq`, as in `attention_kernel`.
        tp_k: layout of `k` and `dk`.
        tp_out: layout of `out` and `d_out`.
        num_stages: a scheduling hint; it travels in the config bag and changes no
            value; so does `num_tiles`.
        num_tiles: see `num_stages`.

    Returns:
        `(dq, dk, dv)`, each with the shape and dtype of its operand; then, where they
        are given, the gradients of `sink` and `bias`.
    """
    extras = Extras(mask=as_mask(mask), bias=bias, sink=sink)
    stored = (out, neg_max, recip, d_out, d_neg_max, d_recip)
    given = dict(num_stages=num_stages, num_tiles=num_tiles)
    hints = {key: value for key, value in given.items() if value is not None}
    *grads, more = attention_gradients(
        *(q, k, v, extras, *stored),
        scale=1.0,
        is_causal=bool(is_causal),
        **dict(hints, tp_q=tp_q, tp_k=tp_k, tp_out=tp_out),
    )
    return tuple(x for x in (*grads, more.sink, more.bias) if x is not None)
