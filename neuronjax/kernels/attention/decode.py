"""Decode attention: a few new tokens against a flat or block cache, never repeated.

The keys that a query sees lie in two parts, the cache and the new tokens; one softmax
runs over both and over a sink, which is a logit without a value.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from neuronjax.kernels.attention.blocks import clean, unseen
from neuronjax.kernels.attention.decode_parts import (
    Cached,
    Visible,
    flat,
    grouped,
    make_parts,
    pad_cache,
    scatter_blocks,
)
from neuronjax.kernels.dtypes import accumulator, is_differentiable
from neuronjax.kernels.rope import rope_bwd, rope_fwd

Heads = Shaped[Array, "batch _ _ _"]
Mask = Bool[Array, "slots batch num_heads seq"]
Lengths = Integer[Array, " batch"] | Integer[Array, "batch seq"]

# b batch, n key heads, g query heads of a group, t new tokens, s slots, d width.
_WEIGH = "bngts,bnsd->bngtd"
_BACK = "bngts,bngtd->bnsd"


def attention_decode_fwd(
    q: Float[Array, "batch num_heads seq _"],
    k_active: Heads | None,
    v_active: Heads | None,
    k_prior: Cached,
    v_prior: Cached,
    mask: Mask | None,
    lengths: Lengths | None,
    positions: Int[Array, "batch seq"] | None,
    inv_freqs: Float[Array, "half 1"] | None,
    sink: Float[Array, "num_heads 1"] | None,
    starts: Integer[Array, "batch seq"] | None,
    table: Integer[Array, "batch blocks"] | None,
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
    are never read. With `table` the caches are `[num_blocks, num_kv_heads, block_len,
    .]`, and a sequence's slots are those of its row of the table, in that order.

    A query sees the cache slots from `starts` (0 without it) up to `lengths`, around
    the end if the start is greater, within the first `prior_slots`; and the new tokens
    up to its own, or what `mask` says of them. Without `lengths`, `mask` covers the
    slots first, then the new tokens. `sink` is one more logit of each head.
    `fuse_rope` rotates `q` and the new keys by `inv_freqs * positions`, half-split, and
    divides `q` by `sqrt(d)`. fp8 caches and new tokens enter as they are.

    `out` is `[batch, num_heads, value_dim, seq]`, the statistics
    `[batch, num_heads, seq, 1]` in float32, the keys (only with `fuse_rope`) like
    `k_active`. A query that sees nothing gets `out = 0`, and without a sink
    `neg_max = inf`, `recip = 1`.
    """
    acc = accumulator(q.dtype)
    if fuse_rope:
        q, k_active = rotate(q, k_active, positions, inv_freqs)
    new_keys: tuple[Any, ...] = (k_active,) if fuse_rope else ()
    cached = (k_active, v_active, k_prior, v_prior)
    visible = Visible(mask, lengths, starts, table)
    parts = make_parts(cached, visible, q, prior_slots, tp_k_prior)
    rows = grouped(q, k_prior.shape[1])
    scores = [_scores(rows, part, acc) for part in parts]
    top, held = row_max([*scores, *_sink_logit(sink, rows, acc)])
    weights = [jnp.exp(z - held) for z in scores]
    columns = [*weights, *(jnp.exp(z - held) for z in _sink_logit(sink, rows, acc))]
    total: Any = sum(p.sum(-1, keepdims=True) for p in columns)
    any_seen = _any_seen(parts, sink, total.shape)
    total = jnp.where(any_seen, total, 1)
    out = jnp.where(any_seen, _weigh(weights, parts, acc, static) / total, 0)
    neg_max = jnp.where(any_seen, -top, jnp.inf)
    recip = jnp.where(any_seen, jnp.exp(top - held) / total, 1)
    outs = flat(out.astype(q.dtype)).mT, flat(neg_max), flat(recip)
    return outs + new_keys


def attention_decode_bwd(
    q: Float[Array, "batch num_heads seq _"],
    k_active: Heads | None,
    v_active: Heads | None,
    k_prior: Cached,
    v_prior: Cached,
    mask: Mask | None,
    lengths: Lengths | None,
    positions: Int[Array, "batch seq"] | None,
    inv_freqs: Float[Array, "half 1"] | None,
    sink: Float[Array, "num_heads 1"] | None,
    starts: Integer[Array, "batch seq"] | None,
    table: Integer[Array, "batch blocks"] | None,
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
    stored statistics, `p = exp(z + neg_max) * recip`; slots that no query sees, rows of
    the cache past the batch and blocks that no table lists get zero. fp8 operands are
    constants.
    """
    outs, cotangents = stored[: len(stored) // 2], stored[len(stored) // 2 :]
    acc, raw, heads = accumulator(q.dtype), (q, k_active), k_prior.shape[1]
    if fuse_rope:
        q, k_active = rotate(q, k_active, positions, inv_freqs)
    cached = (k_active, v_active, k_prior, v_prior)
    visible = Visible(mask, lengths, starts, table)
    parts = make_parts(cached, visible, q, prior_slots, tp_k_prior)
    statistics = [grouped(x, heads) for x in (outs[0].mT, *outs[1:3])]
    d_out = jnp.zeros_like(outs[0]) if cotangents[0] is None else cotangents[0]
    pulled = [None if c is None else grouped(c, heads) for c in cotangents[1:3]]
    pulled = [grouped(d_out.mT, heads), *pulled]
    rows = grouped(q, heads)
    dq, grads, d_sink = _pull(parts, rows, sink, statistics, pulled, acc, static)
    dq, d_freqs = flat(dq).astype(q.dtype), None
    new = list(grads[1]) if len(grads) > 1 else [None, None]
    if fuse_rope:
        new[0] = new[0].astype(q.dtype)
        if cotangents[3] is not None:
            new[0] = new[0] + cotangents[3].astype(q.dtype)
        dq, new[0], d_freqs = _unrotate(raw, (dq, new[0]), positions, inv_freqs)
    keys, values = _cache_gradients(grads[0], cached[2:], table, tp_k_prior)
    operands = (q, *cached, inv_freqs, sink)
    grads = (dq, *new, keys, values, d_freqs, d_sink)
    return tuple(
        grad.astype(x.dtype)
        for x, grad in zip(operands, grads, strict=True)
        if x is not None and is_differentiable(x.dtype)
    )


def _cache_gradients(grads, caches, table, tp_k_prior):
    if not is_differentiable(caches[0].dtype):
        return grads
    if table is not None:
        pairs = zip(grads, caches, strict=True)
        return tuple(scatter_blocks(grad, cache, table) for grad, cache in pairs)
    slots = 2 if tp_k_prior else 3, 2
    triples = zip(grads, caches, slots, strict=True)
    return tuple(pad_cache(*triple) for triple in triples)


def rotate(q, k_active, positions, inv_freqs):
    """The rotated queries, divided by `sqrt(d)`, and the rotated new keys."""
    angles = _angles(positions, inv_freqs)
    tables = jnp.cos(angles), jnp.sin(angles)
    form: dict[str, Any] = dict(name="RoPE", full=True, interleaved=False)
    (turned,) = rope_fwd(q.astype(accumulator(q.dtype)), *tables, **form)
    scaled = turned * (q.shape[-1] ** -0.5)
    return scaled.astype(q.dtype), rope_fwd(k_active, *tables, **form)[0]


def _angles(positions, inv_freqs):
    # A narrow float holds neither a position in the thousands nor its angle.
    acc = accumulator(inv_freqs.dtype)
    angles = positions[..., None].astype(acc) * inv_freqs[:, 0].astype(acc)
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


def _scores(rows, part, acc):
    """Logits where seen, elsewhere a finite number far below any logit."""
    key = part.key.astype(rows.dtype)
    z = jnp.einsum(part.scores, rows, key, preferred_element_type=acc)
    return jnp.where(part.seen, z, unseen(acc))


def _sink_logit(sink, rows, acc):
    """The sink's column `[1, n, g, 1, 1]`, or none; -inf is no sink."""
    if sink is None:
        return []
    z = sink.astype(acc).reshape(1, *rows.shape[1:3], 1, 1)
    return [jnp.where(z == -jnp.inf, unseen(acc), z)]


def row_max(scores):
    """The max over all parts, and the same held constant in derivatives.

    The first one's derivative is the mean over its ties, as that of `jnp.max`.
    """
    held = functools.reduce(jnp.maximum, [lax.stop_gradient(_top(z)) for z in scores])
    shares = _max_shares(scores, held)
    mean = sum(
        (share * z).sum(-1, keepdims=True)
        for share, z in zip(shares, scores, strict=True)
    )
    top = held + (mean - lax.stop_gradient(mean))
    # Half the sentinel is still far below any logit: what is unseen weighs 0.
    return top, jnp.maximum(held, unseen(held.dtype) / 2)


def _top(z):
    """The max of each row, far below any logit where a part has no column."""
    return z.max(-1, keepdims=True, initial=unseen(z.dtype))


def _max_shares(scores, held):
    """The derivative of the row max: 1 over the number of ties, at each of them."""
    tied = [z == held for z in scores]
    count = sum(t.sum(-1, keepdims=True, dtype=held.dtype) for t in tied)
    return [t.astype(held.dtype) / jnp.maximum(count, 1) for t in tied]


def _any_seen(parts, sink, shape):
    seen = [part.seen.any(-1, keepdims=True) for part in parts]
    if sink is not None:
        seen.append((sink != -jnp.inf).reshape(1, *shape[1:3], 1, 1))
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


def _pull(parts, rows, sink, statistics, pulled, acc, static):
    """The gradient of the grouped queries, per part those of key and value; the sink's.

    A sink weighs in the row's sum alone, so its logit's derivative is that of the sum.
    """
    (out, neg_max, recip), (d_out, d_max, d_recip) = statistics, pulled
    any_seen = _any_seen(parts, sink, recip.shape)
    rows, d_out = (jnp.where(any_seen, x, 0).astype(rows.dtype) for x in (rows, d_out))
    offset = -(d_out.astype(acc) * out.astype(acc)).sum(-1, keepdims=True)
    if d_recip is not None:
        offset = offset - d_recip * recip
    scores = [_scores(rows, part, acc) for part in parts]
    columns = [*scores, *_sink_logit(sink, rows, acc)]
    onto_max = _onto_max(columns, any_seen, recip, d_max, d_recip)
    d_scores, grads, d_sink = [], [], None
    for part, z, extra in zip(parts, scores, onto_max, strict=False):
        p = jnp.where(part.seen, jnp.exp(z + neg_max) * recip, 0)
        value = part.value.astype(rows.dtype)
        dp = jnp.einsum("bngtd,bnsd->bngts", d_out, value, preferred_element_type=acc)
        ds = jnp.where(part.seen, p * (dp + offset) + extra, 0).astype(rows.dtype)
        dk = jnp.einsum(part.back_to_key, ds, rows, preferred_element_type=acc)
        p = p.astype(rows.dtype)
        grads.append((dk, jnp.einsum(_BACK, p, d_out, preferred_element_type=acc)))
        d_scores.append(ds)
    if sink is not None:
        p = jnp.exp(columns[-1] + neg_max) * recip
        flow = jnp.where(any_seen, p * offset + onto_max[-1], 0)
        d_sink = flow.sum((0, 3)).reshape(sink.shape)
    return _query_gradient(d_scores, parts, acc, static), grads, d_sink


def _onto_max(scores, any_seen, recip, d_max, d_recip):
    """What the statistics' cotangents send to the logits that are their row's max."""
    if d_max is None and d_recip is None:
        return [0] * len(scores)
    held = functools.reduce(jnp.maximum, [_top(z) for z in scores])
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
