"""The decode block as one kernel, composed of the leaves of its stages.

Its backward recomputes the heads from the operands and the stored statistics, and runs
the backward leaves of the stages in reverse.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.attention.decode import (
    attention_decode_bwd,
    attention_decode_fwd,
)
from neuronjax.kernels.attention_block_tkg import cache, ranks
from neuronjax.kernels.attention_block_tkg.heads import (
    Gains,
    heads_again,
    heads_bwd,
    heads_fwd,
    join_heads,
    split_heads,
)
from neuronjax.kernels.attention_block_tkg.operands import Operands, output_names
from neuronjax.kernels.attention_block_tkg.projection import (
    columns_again,
    columns_bwd,
    columns_fwd,
    projected,
    projected_bwd,
)
from neuronjax.kernels.dtypes import is_differentiable


def attention_block_fwd(
    *operands: Array | None, name: str, static: bool = False, **config: Any
) -> tuple[Array, ...]:
    """Returns what `output_names` lists: output, caches or new tokens, statistics.

    The operands are those of `Operands`. `x_out` has the dtype of `x`; columns, norms,
    rotation and softmax are in wide precision; queries, keys and values are rounded to
    the dtype of `x` in front of attention, and the cached ones to that of their cache.

    The stored statistics are wide: `1/root-mean-square` of each norm, and of attention
    its heads (in the dtype of `x`), negative row max and reciprocal row sum.
    """
    o, c = Operands(*operands), SimpleNamespace(**config)
    y, rstd = columns_fwd(o, c)
    q, k, v = split_heads(y, o.head_dim)
    q, q_stats = heads_fwd(q, Gains(o.q_pre_gain, o.q_post_gain), o, c)
    k, k_stats = heads_fwd(k, Gains(o.k_pre_gain, o.k_post_gain), o, c)
    statistics = (*rstd, *_by_norm(q_stats, k_stats))
    k, v = (ranks.own_batch(t, c) for t in (k, v))
    k, v = cache.kept(k, o.k_scale, o, c), cache.kept(v, o.v_scale, o, c)
    if c.skip_attention:
        x_out = projected(q.astype(o.x.dtype).mT, o, c)
        return (x_out, *cache.stored_fwd(k, v, o, c), *statistics)
    q = (q * _softmax_scale(o, c, q)).astype(o.x.dtype)
    held = attention_decode_fwd(*_attended(q, k, v, o, c), **_decode(o, c, static))
    x_out = projected(ranks.own_heads(held[0], c), o, c)
    stored = cache.stored_fwd(k, v, cache.after(held[0], o), c)
    return (x_out, *stored, *statistics, *held)


def attention_block_bwd(
    *args: Array | None,
    name: str,
    live: tuple[str, ...],
    static: bool = False,
    **config: Any,
) -> tuple[Array, ...]:
    """Returns the cotangents of the operands `live`, in that order.

    Takes the operands, the outputs of the forward and their cotangents. The norms read
    their stored statistics, attention reads its three; queries, keys and values are
    projected again.
    """
    count, c = len(Operands._fields), SimpleNamespace(**config)
    o, rest = Operands(*args[:count]), args[count:]
    names = output_names(**config)
    outs, cotangents = (
        dict(zip(names, half, strict=True))
        for half in (rest[: len(names)], rest[len(names) :])
    )
    q, k, v = _recomputed(o, outs, c)
    grads = _attention_bwd(q, k, v, o, outs, cotangents, c, static)
    dq, q_gains = _heads_bwd(q, grads.pop("q"), o, cotangents, c)
    dk, k_gains = _heads_bwd(k, grads.pop("k"), o, cotangents, c)
    grads |= q_gains | k_gains
    for key in q_gains.keys() & k_gains.keys():  # both turn by the same tables
        grads[key] = q_gains[key] + k_gains[key]
    d_columns = join_heads(dq, dk, grads.pop("v"))
    grads |= columns_bwd(d_columns, o, outs.get("rstd"), cotangents.get("rstd"), c)
    return tuple(grads[key].astype(getattr(o, key).dtype) for key in live)


def _by_norm(q_stats, k_stats):
    """The statistics in the order of `output_names`, absent ones left out."""
    pairs = zip(q_stats, k_stats, strict=True)
    return [rstd for pair in pairs for rstd in pair if rstd is not None]


def _softmax_scale(o, c, like):
    scale = c.softmax_scale if o.softmax_scale is None else o.softmax_scale
    return jnp.asarray(scale).astype(like.dtype)


def _attended(q, k, v, o, c):
    """The operands of the attention leaf."""
    k_cache, v_cache = (
        a if a.ndim == 4 else a[:, None] for a in (o.k_cache, o.v_cache)
    )
    sink = ranks.all_sinks(o.sink, o.num_heads, c)
    seen = (_mask(o), None, None, None, sink, None, o.table)
    return (ranks.all_heads(q, c), k, v, k_cache, v_cache, *seen)


def _mask(o):
    """The mask; where it shows new tokens alone, one slot of the cache hidden."""
    if o.mask.shape[0] > o.x.shape[1]:
        return o.mask
    return jnp.concatenate([o.mask[:1] & False, o.mask])


def _decode(o, c, static) -> dict[str, Any]:
    return dict(
        name="AttentionTkgFwd",
        prior_slots=max(o.mask.shape[0] - o.x.shape[1], 1),
        tp_k_prior=not c.k_transposed,
        fuse_rope=False,
        static=static,
    )


def _recomputed(o, outs, c):
    """Queries, keys and values: raw, what the norms and the rotation made of them."""
    y = columns_again(o, outs.get("rstd"), c)
    *raw, v = split_heads(y, o.head_dim)
    heads = []
    for x, kind in zip(raw, "qk", strict=True):
        gains = Gains(getattr(o, f"{kind}_pre_gain"), getattr(o, f"{kind}_post_gain"))
        stats = outs.get(f"{kind}_pre_rstd"), outs.get(f"{kind}_post_rstd")
        again = heads_again(x, gains, stats, o, c)
        heads.append(
            SimpleNamespace(kind=kind, raw=x, gains=gains, stats=stats, again=again)
        )
    return *heads, v


def _attention_bwd(q, k, v, o, outs, cotangents, c, static) -> dict[str, Any]:
    """Cotangents of the heads `q`, `k`, `v`, and of all operands behind them."""
    queries = q.again[2]
    keys, values = (ranks.own_batch(t, c) for t in (k.again[2], v))
    new, d_caches = cache.stored_bwd((cotangents["k_out"], cotangents["v_out"]), o, c)
    grads = dict(zip(("k_cache", "v_cache"), d_caches, strict=True))
    if c.skip_attention:
        heads = queries.astype(o.x.dtype).mT
        dq, more = projected_bwd(_or_zeros(cotangents, outs, "x_out"), heads, o, c)
        grads |= dict(more, q=dq.mT.astype(queries.dtype))
    else:
        scale = _softmax_scale(o, c, queries)
        found = _through_attention(
            *((queries * scale).astype(o.x.dtype), keys, values),
            *(o, outs, cotangents, c, static),
        )
        dq = found.pop("q").astype(queries.dtype)
        found |= dict(q=dq * scale, softmax_scale=(dq * queries).sum())
        new = [
            _sum(found.pop(key), extra) for key, extra in zip("kv", new, strict=True)
        ]
        for key in ("k_cache", "v_cache"):
            found[key] = _sum(found.get(key), grads[key])
        grads |= found
    for key, t, dt in zip("kv", (keys, values), new, strict=True):
        dt = ranks.zeros_like(t) if dt is None else dt
        dt = cache.kept_bwd(dt.astype(t.dtype), t, getattr(o, f"{key}_scale"))
        grads[key] = ranks.own_batch_bwd(dt, c)
    return _with_cache_zeros(grads, o)


def _through_attention(q, k, v, o, outs, cotangents, c, static):
    """Cotangents of scaled queries, kept keys and values, caches, sink and `w_out`."""
    own = ranks.own_heads(outs["attention"], c)
    d_own, grads = projected_bwd(_or_zeros(cotangents, outs, "x_out"), own, o, c)
    d_heads = ranks.own_heads_bwd(d_own.astype(own.dtype), c)
    if cotangents["attention"] is not None:
        d_heads = d_heads + cotangents["attention"]
    k, v = cache.kept(k, o.k_scale, o, c), cache.kept(v, o.v_scale, o, c)
    operands = _attended(q, k, v, o, c)
    stored = [outs[key] for key in ("attention", "neg_max", "recip")]
    pulled = (d_heads, cotangents["neg_max"], cotangents["recip"])
    found = iter(
        attention_decode_bwd(*operands, *stored, *pulled, **_decode(o, c, static))
    )
    dq, dk, dv = (next(found) for _ in range(3))
    for key in ("k_cache", "v_cache"):
        if is_differentiable(getattr(o, key).dtype):
            grads[key] = next(found).reshape(getattr(o, key).shape)
    if o.sink is not None:
        held = o.sink.shape[0]
        grads["sink"] = ranks.all_sinks_bwd(next(found), o.num_heads, held, c)
    return dict(grads, q=ranks.all_heads_bwd(dq, c), k=dk, v=dv)


def _heads_bwd(head, d_heads, o, cotangents, c):
    """The cotangent of raw heads, and by name those of gains and tables."""
    kind = head.kind
    pulled = cotangents.get(f"{kind}_pre_rstd"), cotangents.get(f"{kind}_post_rstd")
    d_raw, gains, (d_cos, d_sin) = heads_bwd(
        *(d_heads, head.raw, head.again, head.gains, head.stats, pulled, o, c)
    )
    found = {
        f"{kind}_pre_gain": gains.pre,
        f"{kind}_post_gain": gains.post,
        "cos": d_cos,
        "sin": d_sin,
    }
    return d_raw, {key: grad for key, grad in found.items() if grad is not None}


def _or_zeros(cotangents, outs, key):
    found = cotangents[key]
    return ranks.zeros_like(outs[key]) if found is None else found


def _sum(a, b):
    """The sum of two cotangents, either of which may be absent."""
    if a is None or b is None:
        return b if a is None else a
    return a + b.astype(a.dtype)


def _with_cache_zeros(grads, o):
    """Zeros for a cache that nothing used."""
    for key in ("k_cache", "v_cache"):
        whole = getattr(o, key)
        if grads[key] is None and is_differentiable(whole.dtype):
            grads[key] = ranks.zeros_like(whole)
    return grads
