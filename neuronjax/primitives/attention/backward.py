"""The backward of prefill attention: `attention_bwd` and `BackwardsAttention`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.attention.backward import attention_bwd as backward_leaf
from neuronjax.kernels.attention.plain import attention_bwd_plain, attention_plain
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.attention import backward_rules  # noqa: F401  enters the rows
from neuronjax.primitives.attention.backward_rules import bwd_facts, kernel_facts
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import refuses

BACKWARD = "BackwardsAttention"
Rows = Float[Array, "heads q_seq 1"]


@refuses(
    "the backward of causal and full attention is",
    sinks_ref=None,
    bound_min=None,
    bound_max=None,
    sliding_window=(None, 0),
)
@contracted(bwd_facts)
def attention_bwd(
    q_ref: Float[Array, "batch num_heads head_dim q_seq"],
    k_ref: Float[Array, "batch num_kv_heads head_dim kv_seq"],
    v_ref: Float[Array, "batch num_kv_heads head_dim kv_seq"],
    o_ref: Float[Array, "batch num_heads head_dim q_seq"],
    dy_ref: Float[Array, "batch num_heads head_dim q_seq"],
    lse_ref: Float[Array, "batch num_heads 128 _"],
    sinks_ref: None = None,
    bound_min: None = None,
    bound_max: None = None,
    use_causal_mask: bool = False,
    mixed_precision: bool = False,
    softmax_scale: float | Array | None = None,
    sliding_window: int | None = None,
) -> tuple[Array, Array, Array]:
    r"""The gradients of attention from its stored output and log-sum-exp.

    $$P = e^{z - \mathrm{lse}}, \quad dS = P \circ (dO\, V^T - \mathrm{rowsum}(dO \circ
      O)), \quad dQ = s\, dS\, K, \quad dK = s\, dS^T Q, \quad dV = P^T dO$$

    Nothing is recomputed but the scores: `o_ref` and `lse_ref` are read as they are
    given. dK and dV are summed over the query heads of a group.

    Args:
        q_ref: `[B, Hq, d, Sq]`, any floating dtype; all of `q_ref` to `dy_ref` have it.
        k_ref: `[B, Hk, d, Sk]`; query head `h` used key head `h // (Hq / Hk)`.
        v_ref: `[B, Hk, d, Sk]`.
        o_ref: the forward's output, `[B, Hq, d, Sq]`.
        dy_ref: the cotangent of it.
        lse_ref: natural log-sum-exp of the scaled scores, `[B, Hq, 128, Sq / 128]`:
            element `[.., p, g]` is query `g * 128 + p`.
        sinks_ref: not built yet, refuses.
        bound_min: not built yet (sequence packing), refuses; so does `bound_max`.
        bound_max: see `bound_min`.
        use_causal_mask: query `i` saw keys `j <= i`, aligned top-left.
        mixed_precision: sums over a group in float32; here they always are.
        softmax_scale: `s`; `None` is `1/sqrt(d)` as in `attention_cte`, 0 is 0.
        sliding_window: not built yet, refuses; `None` and 0 mean no window.

    Returns:
        `(dq, dk, dv)` with the shapes and dtypes of `q_ref`, `k_ref` and `v_ref`.

    Raises:
        ValueError: shapes or dtypes do not fit.
        NotImplementedError: an option is not built yet.

    Source:
        Dao 2023, FlashAttention-2, https://arxiv.org/abs/2307.08691, section 2.3.2;
        aws-neuron/nki-library, `core/attention/attention_bwd.py`.
    """
    q, k, v, out, d_out = (
        jax.lax.collapse(x, 0, 2) for x in (q_ref, k_ref, v_ref, o_ref, dy_ref)
    )
    lse = jax.lax.collapse(lse_ref, 0, 2)
    neg_max = -jnp.swapaxes(lse, 1, 2).reshape(lse.shape[0], -1, 1)
    grads = attention_gradients(
        *(q, k, jnp.swapaxes(v, 1, 2), None),
        *(out, neg_max, jnp.ones_like(neg_max), d_out, None, None),
        name="",
        scale=q.shape[1] ** -0.5 if softmax_scale is None else softmax_scale,
        is_causal=bool(use_causal_mask),
        tp_q=False,
        tp_k=False,
        tp_out=True,
    )
    dq, dk, dv = grads
    dv = jnp.swapaxes(dv, 1, 2)
    return dq.reshape(q_ref.shape), dk.reshape(k_ref.shape), dv.reshape(v_ref.shape)


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
    is_causal: bool = False,
    softmax_scale: float = 1.0,
    dropout_prob: float = 0.0,
    tp_q: bool = False,
    tp_k: bool = False,
    tp_out: bool = False,
    **hints: Any,
) -> tuple[Array, Array, Array]:
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
        is_causal: whether it was causal.
        softmax_scale: 1 alone; fold any other into `q`.
        dropout_prob: 0 alone.
        tp_q: layout of `q` and `dq`, as in `attention_kernel`.
        tp_k: layout of `k` and `dk`.
        tp_out: layout of `out` and `d_out`.
        **hints: scheduling hints; they travel in the config bag and change no value.

    Returns:
        `(dq, dk, dv)`, each with the shape and dtype of its operand.
    """
    config = dict(hints, tp_q=tp_q, tp_k=tp_k, tp_out=tp_out, scale=1.0)
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    operands = (q, k, v, mask, out, neg_max, recip, d_out, d_neg_max, d_recip)
    grads = backwards_attention(
        *operands, name=BACKWARD, is_causal=bool(is_causal), **config
    )
    return grads[0], grads[1], grads[2]


def attention_gradients(q, *rest, name, scale, **config):
    """Emits `BackwardsAttention` for any scale: folded into q, and into dq."""
    acc = accumulator(q.dtype)
    unit = not isinstance(scale, jax.Array) and float(scale) == 1.0

    def fold(x):
        factor = scale if isinstance(scale, jax.Array) else float(scale)
        return (x.astype(acc) * jnp.asarray(factor, acc)).astype(x.dtype)

    config = dict(config, scale=1.0)
    operands = (q if unit else fold(q), *rest)
    dq, dk, dv = backwards_attention(*operands, name=BACKWARD, **config)
    return dq if unit else fold(dq), dk, dv


def _static_leaf(*operands, **config):
    return backward_leaf(*operands, static=True, **config)


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = (2 * batch, 6, 8), (batch, 8, 7), (batch, 7, 5)
    # Small scores: a vmapped q leaves the statistics behind, and p is not normalised.
    q, k, v = (
        jax.random.normal(key, shape, dtype) / 4
        for key, shape in zip(keys[:3], shapes, strict=True)
    )
    config: dict[str, Any] = dict(scale=1.0, tp_q=True, tp_k=False, tp_out=True)
    form = "CausalAttentionMMSoftmaxMMWithoutSwap"
    outs = attention_plain(q, k, v, None, name=form, **config)
    cotangents = [
        jax.random.normal(key, out.shape, out.dtype)
        for key, out in zip(keys[3:], outs, strict=True)
    ]
    operands = (q, k, v, None, *outs, *cotangents)
    return Example(operands, dict(config, is_causal=True), (0,) * 9, (0, 0, 0))


backwards_attention = MacroFamily(
    "backwards_attention",
    (BACKWARD,),
    backward_leaf,
    plain=attention_bwd_plain,
    outputs=("dq", "dk", "dv"),
    static=_static_leaf,
    example=_example,
)
