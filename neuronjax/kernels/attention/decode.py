"""Decode attention: a few new tokens against a flat cache, which is never repeated.

The keys that a query sees lie in two parts, the cache and the new tokens; one softmax
runs over both, and they are never joined into one array.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.attention.blocks import clean, unseen
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.rope import rope_bwd, rope_fwd

Heads = Float[Array, "batch _ _ _"]
Cached = Float[Array, "rows num_kv_heads _ _"]

# b batch, n key heads, g query heads of a group, t new tokens, s slots, d width.
_WEIGH = "bngts,bnsd->bngtd"
_BACK = "bngts,bngtd->bnsd"


class _Part(NamedTuple):
    """Keys, values, and which each query sees: `[b, n, g, t, s]`, some axes 1."""

    key: jax.Array
    value: jax.Array
    seen: jax.Array
    transposed: bool  # keys are [b, n, d, s]

    @property
    def scores(self) -> str:
        return f"bngtd,{'bnds' if self.transposed else 'bnsd'}->bngts"

    @property
    def back_to_query(self) -> str:
        return f"bngts,{'bnds' if self.transposed else 'bnsd'}->bngtd"

    @property
    def back_to_key(self) -> str:
        return f"bngts,bngtd->{'bnds' if self.transposed else 'bnsd'}"


def attention_decode_fwd(
    q: Heads,
    k_active: Heads | None,
    v_active: Heads | None,
    k_prior: Cached,
    v_prior: Cached,
    mask: Bool[Array, "slots batch num_heads seq"] | None,
    lengths: Int[Array, " batch"] | None,
    positions: Int[Array, "batch seq"] | None,
    inv_freqs: Float[Array, "half 1"] | None,
    *,
    name: str,
    prior_slots: int,
    tp_k_prior: bool,
    fuse_rope: bool,
    static: bool = False,
    **_hints: Any,
) -> tuple[Array, ...]:
    """Returns `out`, its negative row max and 1 / row sum, and the rotated new keys.

    `q` is `[batch, num_heads, seq, d]`, new keys and values
    `[batch, num_kv_heads, seq, .]`, the caches `[batch+, num_kv_heads, d, slots]` (or
    `[.., slots, d]` if `tp_k_prior`) and `[.., slots, value_dim]`; rows past `batch`
    are never read. A query sees the cache slots below `lengths`, within the first
    `prior_slots`, and the new tokens up to its own; or what `mask` says of those slots
    and, in its last `seq` rows, of the new tokens. `fuse_rope` rotates `q` and the new
    keys by `inv_freqs * positions`, half-split, and divides `q` by `sqrt(d)`.

    `out` is `[batch, num_heads, value_dim, seq]`, the statistics
    `[batch, num_heads, seq, 1]` in float32, the keys (only with `fuse_rope`) like
    `k_active`. A query that sees nothing gets `out = 0`, `neg_max = inf`, `recip = 1`.
    """
    acc = accumulator(q.dtype)
    if fuse_rope:
        q, k_active = rotate(q, k_active, positions, inv_freqs)
    new_keys: tuple[Any, ...] = (k_active,) if fuse_rope else ()
    cached = (k_active, v_active, k_prior, v_prior)
    parts = _parts(cached, mask, lengths, q, prior_slots, tp_k_prior)
    rows = _grouped(q, k_prior.shape[1])
    scores = [_scores(rows, part, acc) for part in parts]
    top, held = row_max(scores)
    weights = [jnp.exp(z - held) for z in scores]
    total: Any = sum(p.sum(-1, keepdims=True) for p in weights)
    any_seen = _any_seen(parts, total.shape)
    total = jnp.where(any_seen, total, 1)
    out = jnp.where(any_seen, _weigh(weights, parts, acc, static) / total, 0)
    neg_max = jnp.where(any_seen, -top, jnp.inf)
    recip = jnp.where(any_seen, jnp.exp(top - held) / total, 1)
    outs = _flat(out.astype(q.dtype)).mT, _flat(neg_max), _flat(recip)
    return outs + new_keys


def attention_decode_bwd(
    q: Heads,
    k_active: Heads | None,
    v_active: Heads | None,
    k_prior: Cached,
    v_prior: Cached,
    mask: Bool[Array, "slots batch num_heads seq"] | None,
    lengths: Int[Array, " batch"] | None,
    positions: Int[Array, "batch seq"] | None,
    inv_freqs: Float[Array, "half 1"] | None,
    *stored: Any,
    name: str,
    prior_slots: int,
    tp_k_prior: bool,
    fuse_rope: bool,
    static: bool = False,
    **_hints: Any,
) -> tuple[Array, ...]:
    """Returns the gradients of the float operands that are there, in their order.

    `stored` are the forward's outputs, then their cotangents. Weights come from the
    stored statistics, `p = exp(z + neg_max) * recip`; slots that no query sees, and
    rows of the cache past the batch, get zero.
    """
    outs, cotangents = stored[: len(stored) // 2], stored[len(stored) // 2 :]
    acc, raw, heads = accumulator(q.dtype), (q, k_active), k_prior.shape[1]
    if fuse_rope:
        q, k_active = rotate(q, k_active, positions, inv_freqs)
    cached = (k_active, v_active, k_prior, v_prior)
    parts = _parts(cached, mask, lengths, q, prior_slots, tp_k_prior)
    statistics = [_grouped(x, heads) for x in (outs[0].mT, *outs[1:3])]
    d_out = jnp.zeros_like(outs[0]) if cotangents[0] is None else cotangents[0]
    pulled = [None if c is None else _grouped(c, heads) for c in cotangents[1:3]]
    pulled = [_grouped(d_out.mT, heads), *pulled]
    rows = _grouped(q, heads)
    dq, grads = _pull(parts, rows, statistics, pulled, acc, static)
    slots = 2 if tp_k_prior else 3
    dk_prior = _unsliced(grads[0][0], k_prior, slots)
    dv_prior = _unsliced(grads[0][1], v_prior, 2)
    dq, new = _flat(dq).astype(q.dtype), [g.astype(q.dtype) for g in sum(grads[1:], ())]
    if not fuse_rope:
        return dq, *new, dk_prior, dv_prior
    if cotangents[3] is not None:
        new[0] = new[0] + cotangents[3].astype(q.dtype)
    dq, new[0], d_freqs = _unrotate(raw, (dq, new[0]), positions, inv_freqs)
    return dq, *new, dk_prior, dv_prior, d_freqs


def rotate(q, k_active, positions, inv_freqs):
    """The rotated queries, divided by `sqrt(d)`, and the rotated new keys."""
    angles = _angles(positions, inv_freqs)
    tables = jnp.cos(angles), jnp.sin(angles)
    form: dict[str, Any] = dict(name="RoPE", full=True, interleaved=False)
    (turned,) = rope_fwd(q.astype(accumulator(q.dtype)), *tables, **form)
    scaled = turned * (q.shape[-1] ** -0.5)
    return scaled.astype(q.dtype), rope_fwd(k_active, *tables, **form)[0]


def _angles(positions, inv_freqs):
    angles = positions[..., None].astype(inv_freqs.dtype) * inv_freqs[:, 0]
    return jnp.concatenate([angles, angles], -1)


def _unrotate(raw, grads, positions, inv_freqs):
    """The gradients before the rotation, and that of `inv_freqs`."""
    angles = _angles(positions, inv_freqs)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    acc, scale = accumulator(raw[0].dtype), raw[0].shape[-1] ** -0.5
    form: dict[str, Any] = dict(name="RoPEBwd", full=True, interleaved=False)
    turned, d_angles = [], jnp.zeros_like(angles)
    for x, dy, factor in zip(raw, grads, (scale, 1.0), strict=True):
        wide = x.astype(acc), cos, sin, dy.astype(acc) * factor
        dx, dcos, dsin = rope_bwd(*wide, **form)
        turned.append(dx.astype(x.dtype))
        d_angles = d_angles + cos * dsin - sin * dcos
    first, second = jnp.split(d_angles, 2, -1)
    spread = (first + second) * positions[..., None].astype(angles.dtype)
    return *turned, spread.sum((0, 1))[:, None].astype(inv_freqs.dtype)


def _parts(arrays, mask, lengths, q, prior_slots, tp_k_prior):
    """The cache's part, and that of the new tokens if there are any."""
    k_active, v_active, k_prior, v_prior = arrays
    (batch, _, seq, _), groups = q.shape, k_prior.shape[1]
    keys = k_prior[:batch, :, :prior_slots] if tp_k_prior else k_prior[:batch]
    keys = keys if tp_k_prior else keys[..., :prior_slots]
    values = v_prior[:batch, :, :prior_slots]
    if mask is not None:
        by_query = _grouped(jnp.moveaxis(mask.astype(bool), 0, -1), groups)
        seen = by_query[..., :prior_slots], by_query[..., prior_slots:]
    else:
        slot = jnp.arange(values.shape[2], dtype=lengths.dtype)
        causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)
        seen = (slot < lengths[:, None])[:, None, None, None], causal[None, None, None]
    parts = [_Part(keys, values, seen[0], not tp_k_prior)]
    if k_active is not None:
        parts.append(_Part(k_active, v_active, seen[1], False))
    return parts


def _grouped(x, num_kv_heads):
    """`[batch, heads, ...]` to `[batch, num_kv_heads, group, ...]`."""
    group = x.shape[1] // num_kv_heads
    return x.reshape(x.shape[0], num_kv_heads, group, *x.shape[2:])


def _flat(x):
    """The inverse of `_grouped`."""
    return lax.collapse(x, 1, 3)


def _scores(rows, part, acc):
    """Logits where seen, elsewhere a finite number far below any logit."""
    key = part.key.astype(rows.dtype)
    z = jnp.einsum(part.scores, rows, key, preferred_element_type=acc)
    return jnp.where(part.seen, z, unseen(acc))


def row_max(scores):
    """The max over all parts, and the same held constant in derivatives.

    The first one's derivative is the mean over its ties, as that of `jnp.max`.
    """
    held = functools.reduce(
        jnp.maximum, [lax.stop_gradient(z.max(-1, keepdims=True)) for z in scores]
    )
    shares = _max_shares(scores, held)
    mean = sum(
        (share * z).sum(-1, keepdims=True)
        for share, z in zip(shares, scores, strict=True)
    )
    top = held + (mean - lax.stop_gradient(mean))
    # Half the sentinel is still far below any logit: what is unseen weighs 0.
    return top, jnp.maximum(held, unseen(held.dtype) / 2)


def _max_shares(scores, held):
    """The derivative of the row max: 1 over the number of ties, at each of them."""
    tied = [z == held for z in scores]
    count = sum(t.sum(-1, keepdims=True, dtype=held.dtype) for t in tied)
    return [t.astype(held.dtype) / jnp.maximum(count, 1) for t in tied]


def _any_seen(parts, shape):
    seen = [part.seen.any(-1, keepdims=True) for part in parts]
    return jnp.broadcast_to(functools.reduce(jnp.logical_or, seen), shape)


def _guarded(quick, careful, static):
    """`quick()` if it is finite, else `careful()`, which no unseen NaN reaches.

    A weight of 0 times a NaN is NaN. Cleaning the cache first would copy it each step.
    """
    if static:
        return careful()
    first = quick()
    return lax.cond(jnp.isfinite(first).all(), lambda: first, careful)


def _weigh(weights, parts, acc, static):
    """The sum of weights times values."""

    def dot(p, value):
        p = p.astype(value.dtype)
        return jnp.einsum(_WEIGH, p, value, preferred_element_type=acc)

    def quick():
        return sum(dot(p, part.value) for p, part in zip(weights, parts, strict=True))

    def careful():
        total = 0
        for p, part in zip(weights, parts, strict=True):
            value, poison = clean(part.value, acc)
            marks = jnp.where(part.seen, poison[:, :, None, None], 0)
            total = total + dot(p, value) + marks.sum(-1, keepdims=True)
        return total

    return _guarded(quick, careful, static)


def _pull(parts, rows, statistics, pulled, acc, static):
    """The gradient of the grouped queries, and per part those of keys and values."""
    (out, neg_max, recip), (d_out, d_max, d_recip) = statistics, pulled
    any_seen = _any_seen(parts, recip.shape)
    rows, d_out = (jnp.where(any_seen, x, 0).astype(rows.dtype) for x in (rows, d_out))
    offset = -(d_out.astype(acc) * out.astype(acc)).sum(-1, keepdims=True)
    if d_recip is not None:
        offset = offset - d_recip * recip
    scores = [_scores(rows, part, acc) for part in parts]
    onto_max = _onto_max(scores, any_seen, recip, d_max, d_recip)
    d_scores, grads = [], []
    for part, z, extra in zip(parts, scores, onto_max, strict=True):
        p = jnp.where(part.seen, jnp.exp(z + neg_max) * recip, 0)
        value = part.value.astype(rows.dtype)
        dp = jnp.einsum("bngtd,bnsd->bngts", d_out, value, preferred_element_type=acc)
        ds = p * (dp + offset) if extra is None else p * (dp + offset) + extra
        ds = jnp.where(part.seen, ds, 0).astype(rows.dtype)
        dk = jnp.einsum(part.back_to_key, ds, rows, preferred_element_type=acc)
        p = p.astype(rows.dtype)
        grads.append((dk, jnp.einsum(_BACK, p, d_out, preferred_element_type=acc)))
        d_scores.append(ds)
    return _query_gradient(d_scores, parts, acc, static), grads


def _onto_max(scores, any_seen, recip, d_max, d_recip):
    """What the statistics' cotangents send to the logits that are their row's max."""
    if d_max is None and d_recip is None:
        return [None] * len(scores)
    held = functools.reduce(jnp.maximum, [z.max(-1, keepdims=True) for z in scores])
    flow = 0 if d_recip is None else d_recip * recip
    flow = jnp.where(any_seen, flow if d_max is None else flow - d_max, 0)
    return [flow * share for share in _max_shares(scores, held)]


def _query_gradient(d_scores, parts, acc, static):
    def total(tidy):
        return sum(
            jnp.einsum(
                part.back_to_query, ds, tidy(part.key), preferred_element_type=acc
            )
            for ds, part in zip(d_scores, parts, strict=True)
        )

    def cast(key):
        return key.astype(d_scores[0].dtype)

    def finite(key):
        return jnp.where(jnp.isfinite(key), cast(key), 0)

    return _guarded(lambda: total(cast), lambda: total(finite), static)


def _unsliced(grad, whole, slots):
    """`grad` in the cache's dtype, zero for the slots and rows that were left out."""
    widths = [(0, 0)] * grad.ndim
    for i in (0, slots):
        widths[i] = (0, whole.shape[i] - grad.shape[i])
    return jnp.pad(grad.astype(whole.dtype), widths)
