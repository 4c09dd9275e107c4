"""Attention behind a cached prefix: an emitter that is told the NAME, and its macro."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.attention.plain import attention_plain
from neuronjax.kernels.prefix_caching_attention import prefix_caching_attention_fwd
from neuronjax.primitives.attention import prefix_rules  # noqa: F401  enters the rows
from neuronjax.primitives.attention.backward_macro import attention_gradients
from neuronjax.primitives.attention.prefill_extras import as_mask, as_position
from neuronjax.primitives.attention.prefix_rules import prefix_facts
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.registry import PREFIX_CACHING_NAMES

WITH_PREFIX = "CausalAttentionMMSoftmaxMMWithoutSwap (prefix)"


@contracted(prefix_facts)
def attention_prefix_caching_fwd_kernel(
    q: Float[Array, "heads _ _"],
    k: Float[Array, "kv_heads _ _"],
    v: Float[Array, "kv_heads kv_seq value_dim"],
    k_prior: Float[Array, "kv_heads _ _"],
    v_prior: Float[Array, "kv_heads prior value_dim"],
    prior_used_len: Int[Array, "1"] | None = None,
    *,
    kernel_name: str,
    prefix_mask: Bool[Array, "_ _ prior"] | None = None,
    mask: Bool[Array, "_ _ kv_seq"] | None = None,
    sink: Float[Array, "heads 1"] | None = None,
    scale: float = 1.0,
    cache_softmax: bool = False,
    tp_q: bool = False,
    tp_k: bool = False,
    tp_out: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """Emits the NAME `kernel_name` with a prefix in front of the keys.

    Args:
        q: `[heads, d, q_seq]`, or `[heads, q_seq, d]` if `tp_q`.
        k: `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`.
        v: `[kv_heads, kv_seq, value_dim]`.
        k_prior: the keys of the prefix, laid out like `k`.
        v_prior: its values, `[kv_heads, prior, value_dim]`.
        prior_used_len: how many of its slots are filled; all of them by default.
        kernel_name: one of the attention NAMEs without a swap; a causal one is causal
            among the new keys, which all come after the prefix.
        prefix_mask: `[1 or heads, 1 or q_seq, prior]`, nonzero = keep, beside
            `prior_used_len`; no gradient.
        mask: the same of the new keys.
        sink: one more logit of each head's rows.
        scale: multiplies the scores; the causal NAMEs take 1 alone.
        cache_softmax: return `neg_max` and `recip`, `[heads, q_seq, 1]`, too.
        tp_q: layout of `q`.
        tp_k: layout of `k` and `k_prior`.
        tp_out: return `[heads, value_dim, q_seq]`.

    Returns:
        `[heads, q_seq, value_dim]` in the dtype of `q`. Checkpoint names are
        `prefix_caching_attention_out`, `_neg_max` and `_recip`.

    Raises:
        ValueError: no prefix-caching leaf has that name; shapes or dtypes do not fit.

    Source:
        aws-neuron/nki-library, `core/attention/attention_cte.py`, its prior operands.
    """
    prior, columns = v_prior.shape[1], v_prior.shape[1] + v.shape[1]
    used = jnp.full(1, prior, jnp.int32) if prior_used_len is None else prior_used_len
    both = _joined(as_mask(prefix_mask), as_mask(mask), prior, columns)
    extras = Extras(both, None, sink, k_prior, v_prior, as_position(used))
    layout = dict(tp_q=bool(tp_q), tp_k=bool(tp_k), tp_out=bool(tp_out))
    config = dict(layout, scale=float(scale), is_causal="Causal" in kernel_name)
    outs = prefix_caching(q, k, v, extras, name=kernel_name, is_tiled=False, **config)
    return outs if cache_softmax else outs[0]


def _joined(prefix_mask, mask, prior: int, columns: int):
    """One mask over the columns of both; an absent one shows all of its own."""
    if prefix_mask is None and mask is None:
        return None
    masks = prefix_mask, mask
    widths = prior, columns - prior
    head, row = (
        max(1 if x is None else x.shape[axis] for x in masks) for axis in (0, 1)
    )
    parts = [
        jnp.broadcast_to(jnp.array(True) if x is None else x, (head, row, width))
        for x, width in zip(masks, widths, strict=True)
    ]
    return jnp.concatenate(parts, 2)


def _leaf(q, k, v, extras, *, is_tiled, **config):
    return prefix_caching_attention_fwd(q, k, v, extras, **config)


def _static_leaf(*operands, **config):
    return _leaf(*operands, static=True, **config)


def _plain(q, k, v, extras, *, is_tiled, **config):
    return attention_plain(q, k, v, extras, **config)


def _emit_backward(operands, outs, cotangents, *, name, is_tiled, **config):
    return attention_gradients(*operands, *outs, *cotangents, **config)


def _example(label: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(2 * batch, 6, 8), (batch, 8, 7), (batch, 7, 5), (batch, 8, 4)]
    shapes += [(batch, 4, 5), (2 * batch, 1)]
    q, k, v, k_prior, v_prior, sink = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    extras = Extras(sink=sink, k_prior=k_prior, v_prior=v_prior, used=jnp.int32(3))
    config: dict[str, Any] = dict(
        scale=1.0, is_causal=True, is_tiled=False, tp_q=True, tp_k=False, tp_out=False
    )
    split = (0, 0, 0, 0, 0, 0, None)
    return Example((q, k, v, extras), dict(config, window=5), split, (0, 0, 0))


prefix_caching = MacroFamily(
    "prefix_caching_attention",
    PREFIX_CACHING_NAMES,
    _leaf,
    plain=_plain,
    outputs=("out", "neg_max", "recip"),
    backward=_emit_backward,
    static=_static_leaf,
    example=_example,
    variants=(WITH_PREFIX,),
    keyed=True,
)
