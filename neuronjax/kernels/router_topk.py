"""Routing tokens to experts: logits, the k best experts, their affinities.

The selection is a constant of the derivative: gradients flow through the logits at the
experts that the affinities name. Experts are picked from the logits, not from activated
scores, because a saturated sigmoid makes ties that the logits do not have; only a
selection bias is added to activated scores (DeepSeek-AI 2024, DeepSeek-V3, equation 16,
https://arxiv.org/abs/2412.19437).

A padding token (False in `token_mask`) has logits and affinities 0, names expert `E`,
which no array of experts has, and has no gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import contract
from neuronjax.kernels.top_k import top_k_indices

# The axes of x and w: tokens t, hidden channels h (on tiles p, c), experts e.
FORMS = {"TH": ("th", "he"), "HT": ("ht", "he"), "tiled": ("pct", "pce")}
PARTITIONS = 128

Operand = Float[Array, "..."]
Rows = Float[Array, "tokens num_experts"]
Chosen = Bool[Array, "tokens num_experts"]


class Rule(NamedTuple):
    """How affinities follow from logits: what the public options say."""

    act: str
    pre_norm: bool
    norm_topk: bool

    @property
    def dense(self) -> bool:
        """Whether experts that are not chosen have an affinity too."""
        return self.pre_norm and not self.norm_topk


def _product(spec: str, a: jax.Array, b: jax.Array, acc: Any) -> jax.Array:
    if not spec.startswith("th"):
        # jax 0.12 cannot multiply mapped 16-bit factors whose first axis is summed.
        a, b = a.astype(acc), b.astype(acc)
    return jnp.einsum(spec, a, b, preferred_element_type=acc)


def _columns(x: jax.Array, is_tiled: bool) -> jax.Array:
    """`[T, n]`, or for tiles `[P, C, n]` with token `p * C + c`."""
    if not is_tiled:
        return x
    tokens, width = x.shape
    partitions = min(tokens, PARTITIONS)
    return x.reshape(partitions, tokens // partitions, width)


def router_logits(x: Operand, w: Operand, w_bias: Operand | None, form: str) -> Rows:
    """Returns `x @ w + w_bias`, accumulated in float32, or float64 where one is."""
    acc = accumulator(x.dtype, w.dtype)
    logits = _product(f"{','.join(FORMS[form])}->te", x, w, acc)
    return logits if w_bias is None else logits + w_bias.reshape(-1).astype(acc)


def activate(logits: Rows, act: str) -> Rows:
    """The scores of all experts: a softmax over them, or a sigmoid of each."""
    return softmax(logits) if act == "SOFTMAX" else jax.nn.sigmoid(logits)


def softmax(z: Rows, chosen: Chosen | None = None) -> Rows:
    """Softmax of each row over the chosen experts; the others get exactly 0.

    Infinities are taken as limits: experts at +inf share the whole, and a row of -inf
    gets 0. A NaN makes its row NaN.
    """
    if chosen is not None:
        z = jnp.where(chosen, z, -jnp.inf)
    top = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    infinite = top == jnp.inf
    shift = jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top))
    share = (z == jnp.inf).astype(z.dtype)
    e = jnp.where(infinite, share, jnp.exp(jnp.where(infinite, 0, z) - shift))
    total = jnp.sum(e, axis=-1, keepdims=True)
    a = e / jnp.where(top == -jnp.inf, jnp.ones_like(total), total)
    return a if chosen is None else jnp.where(chosen, a, 0)


def select_experts(
    logits: Rows, selection_bias: Operand | None, *, k: int, act: str
) -> Int[Array, "tokens k"]:
    """The experts of each token, best first, the lowest index first among equals."""
    keys = logits
    if selection_bias is not None:
        keys = activate(logits, act) + selection_bias.reshape(-1).astype(logits.dtype)
    return top_k_indices(keys, k)


def _is_at(index: jax.Array, place: int, num_experts: int) -> jax.Array:
    """Where expert `index[:, place]` stands in a row of experts."""
    column = lax.slice_in_dim(index, place, place + 1, axis=1)
    shape = (index.shape[0], num_experts)
    return lax.broadcasted_iota(jnp.int32, shape, 1) == column


def chosen_experts(index: Int[Array, "tokens k"], num_experts: int) -> Chosen:
    """Which experts each token names."""
    chosen = _is_at(index, 0, num_experts)
    for place in range(1, index.shape[1]):
        chosen = chosen | _is_at(index, place, num_experts)
    return chosen


def _gather(rows: Rows, index: jax.Array) -> jax.Array:
    """`rows[t, index[t, j]]` as sums of one term: any mesh may split the tokens."""
    columns = [
        jnp.sum(
            jnp.where(_is_at(index, place, rows.shape[1]), rows, 0),
            axis=-1,
            keepdims=True,
        )
        for place in range(index.shape[1])
    ]
    return jnp.concatenate(columns, axis=-1)


def _scatter(columns: jax.Array, index: jax.Array, num_experts: int) -> jax.Array:
    """The transpose of `_gather`."""
    parts = [
        jnp.where(
            _is_at(index, place, num_experts),
            lax.slice_in_dim(columns, place, place + 1, axis=1),
            0,
        )
        for place in range(index.shape[1])
    ]
    return sum(parts[1:], parts[0])


def affinities_of(logits: Rows, chosen: Chosen, rule: Rule) -> Rows:
    """The weight of each expert; 0 for one not chosen, but for the dense form.

    The L1 norm of chosen scores is a softmax of their logarithms: `s_e / sum s =
    softmax(log s)_e`. So written, scores that underflow do not divide 0 by 0.
    """
    if rule.dense:
        return activate(logits, rule.act)
    if rule.act == "SOFTMAX":
        return softmax(logits, chosen)
    if rule.norm_topk:
        return softmax(jax.nn.log_sigmoid(logits), chosen)
    return jnp.where(chosen, jax.nn.sigmoid(logits), 0)


def router_topk_fwd(
    x: Operand,
    w: Operand,
    w_bias: Operand | None,
    selection_bias: Operand | None,
    token_mask: Bool[Array, "..."] | None,
    *,
    name: str,
    form: str,
    k: int,
    act: str,
    pre_norm: bool,
    norm_topk: bool,
    is_tiled: bool = False,
    **hints: Any,
) -> tuple[jax.Array, ...]:
    """Returns `(logits [T, E], index [T, k], affinities [T, E], chosen ones [T, k])`.

    `index` is int32, the rest float32, or float64 where an operand is. `hints` place
    buffers and change no value.
    """
    logits = router_logits(x, w, w_bias, form)
    index = select_experts(logits, selection_bias, k=k, act=act)
    chosen = chosen_experts(index, logits.shape[1])
    affinities = affinities_of(logits, chosen, Rule(act, pre_norm, norm_topk))
    if token_mask is not None:
        keep = token_mask.reshape(-1)[:, None]
        logits, affinities = (jnp.where(keep, z, 0) for z in (logits, affinities))
        index = jnp.where(keep, index, jnp.int32(logits.shape[1]))
    outs = logits, index, affinities, _gather(affinities, index)
    return tuple(_columns(out, is_tiled) for out in outs)


def _d_affinities(logits: Rows, chosen: Chosen, g: Rows, rule: Rule) -> Rows:
    """The cotangent of the logits, given `g`, that of the affinities."""
    a = affinities_of(logits, chosen, rule)
    if not rule.dense:  # what is not chosen does not count: 0 * NaN
        g = jnp.where(chosen, g, 0)
    if rule.act == "SIGMOID" and not rule.norm_topk:
        return a * (1 - a) * g
    d = a * (g - jnp.sum(a * g, axis=-1, keepdims=True))
    return d * (1 - jax.nn.sigmoid(logits)) if rule.act == "SIGMOID" else d


def _d_logits(
    logits: jax.Array,
    index: jax.Array,
    cotangents: list[jax.Array | None],
    token_mask: jax.Array | None,
    rule: Rule,
) -> jax.Array:
    """The whole cotangent of the logits: each output's, `[T, E]`."""
    d_logits, d_affinities, d_topk = cotangents
    g = jnp.zeros_like(logits) if d_affinities is None else d_affinities
    if d_topk is not None:
        g = g + _scatter(d_topk, index, logits.shape[1])
    total = _d_affinities(logits, chosen_experts(index, logits.shape[1]), g, rule)
    total = total if d_logits is None else total + d_logits
    if token_mask is None:
        return total
    return jnp.where(token_mask.reshape(-1)[:, None], total, 0)


def router_topk_bwd(
    x: Operand,
    w: Operand,
    w_bias: Operand | None,
    token_mask: Bool[Array, "..."] | None,
    logits: Operand,
    index: Int[Array, "..."],
    d_logits: Operand | None,
    d_affinities: Operand | None,
    d_topk: Operand | None,
    *,
    name: str,
    form: str,
    act: str,
    pre_norm: bool,
    norm_topk: bool,
    **settings: Any,
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of `x`, `w` and, where it is given, `w_bias`."""
    cotangents = [
        None if d is None else d.reshape(-1, d.shape[-1])
        for d in (d_logits, d_affinities, d_topk)
    ]
    logits, index = (z.reshape(-1, z.shape[-1]) for z in (logits, index))
    total = _d_logits(
        logits, index, cotangents, token_mask, Rule(act, pre_norm, norm_topk)
    )
    acc, (xs, ws) = total.dtype, FORMS[form]
    dx = _product(f"te,{ws}->{xs}", total, w, acc).astype(x.dtype)
    kept = x.astype(acc)
    if token_mask is not None:  # what padding holds must not reach dw: 0 * NaN
        keep = token_mask.reshape(-1)
        kept = jnp.where(keep[:, None] if form == "TH" else keep, kept, 0)
    dw = contract(f"{xs},te->{ws}", kept, total, like=w).astype(w.dtype)
    if w_bias is None:
        return dx, dw
    return dx, dw, jnp.sum(total, axis=0).reshape(w_bias.shape).astype(w_bias.dtype)
