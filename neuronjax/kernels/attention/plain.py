"""Prefill attention and its backward in plain jax.numpy: all scores at once."""

import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.attention.blocks import clean, grouped, product, unseen
from neuronjax.kernels.dtypes import accumulator


def attention_plain(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    *,
    name: str,
    scale: float,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    **_hints: object,
) -> tuple[Array, Array, Array]:
    """The same as `attention_fwd`."""
    acc = accumulator(q.dtype)
    q, k = q if tp_q else q.mT, k if tp_k else k.mT
    heads = q.shape[0]
    q = grouped(q, k.shape[0])
    z, seen = _scores(q, k, mask, "Causal" in name, scale, acc)
    any_seen = seen.any(-1, keepdims=True)
    top = jnp.where(any_seen, z.max(-1, keepdims=True), 0)
    e = jnp.where(seen, jnp.exp(jnp.where(seen, z - top, 0)), 0)
    total = jnp.where(any_seen, e.sum(-1, keepdims=True), 1)
    v, poison = clean(v, acc)
    out = product("ngqk,nkd->ngqd", (e / total).astype(v.dtype), v, acc)
    out = out + jnp.where(seen, poison[:, None, None], 0).sum(-1, keepdims=True)
    out = jnp.where(any_seen, out, 0).astype(q.dtype)
    out, neg_max, recip = (
        x.reshape(heads, *x.shape[2:])
        for x in (out, jnp.where(any_seen, -top, jnp.inf), 1 / total)
    )
    return out.mT if tp_out else out, neg_max, recip


def attention_bwd_plain(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    out: Array,
    neg_max: Array,
    recip: Array,
    d_out: Array | None,
    d_neg_max: Array | None,
    d_recip: Array | None,
    *,
    name: str,
    scale: float,
    is_causal: bool,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    **_hints: object,
) -> tuple[Array, Array, Array]:
    """The same as `attention_bwd`, from the same stored statistics."""
    acc, dtype = accumulator(q.dtype), q.dtype
    q, k = q if tp_q else q.mT, k if tp_k else k.mT
    out = out.mT if tp_out else out
    d_out = jnp.zeros_like(out) if d_out is None else d_out.mT if tp_out else d_out
    d_neg_max, d_recip = (
        jnp.zeros_like(recip) if d is None else d for d in (d_neg_max, d_recip)
    )
    rows = (q, out, neg_max, recip, d_out, d_neg_max, d_recip)
    q, out, neg_max, recip, d_out, d_neg_max, d_recip = (
        grouped(x, k.shape[0]) for x in rows
    )
    z, seen = _scores(q, k, mask, is_causal, scale, acc)
    p = jnp.exp(jnp.where(seen, z + neg_max, unseen(acc))) * recip
    p = jnp.where(seen, p, 0)
    dp = product("ngqd,nkd->ngqk", d_out, v, acc)
    delta = (d_out.astype(acc) * out.astype(acc)).sum(-1, keepdims=True)
    dz = jnp.where(seen, p * (dp - delta - d_recip * recip), 0)
    tied = seen & (z == z.max(-1, keepdims=True))
    ties = jnp.maximum(tied.sum(-1, keepdims=True, dtype=acc), 1)
    dz = dz + jnp.where(tied, (d_recip * recip - d_neg_max) / ties, 0)
    dz = (dz * scale).astype(dtype)
    dq = product("ngqk,nkd->ngqd", dz, clean(k, acc)[0], acc)
    dk = product("ngqk,ngqd->nkd", dz, clean(q, acc)[0], acc)
    dv = product("ngqk,ngqd->nkd", p.astype(dtype), d_out, acc)
    dq, dk, dv = (x.astype(dtype) for x in (dq.reshape(-1, *q.shape[2:]), dk, dv))
    return dq if tp_q else dq.mT, dk if tp_k else dk.mT, dv


def _scores(q, k, mask, causal, scale, acc):
    """The scaled scores, a sentinel where unseen, and who sees whom: `[n, g, q, k]`."""
    (q, q_poison), (k, k_poison) = clean(q, acc), clean(k, acc)
    z = product("ngqd,nkd->ngqk", q, k, acc) * scale
    z = z + q_poison[..., None] + k_poison[:, None, None]
    seen = jnp.ones(z.shape[2:], bool)
    seen = (jnp.tril(seen) if causal else seen)[None, None]
    if mask is not None:
        mask = mask.astype(bool)
        shared = mask.shape[0] == 1
        seen = seen & (mask[None] if shared else grouped(mask, k.shape[0]))
    seen = jnp.broadcast_to(seen, z.shape)
    return jnp.where(seen, z, unseen(acc)), seen
