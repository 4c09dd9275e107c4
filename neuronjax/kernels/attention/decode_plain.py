"""Decode attention in plain jax.numpy, over one joined and repeated array of keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.attention.decode import rotate
from neuronjax.kernels.dtypes import accumulator


def attention_decode_plain(
    q: Array,
    k_active: Array | None,
    v_active: Array | None,
    k_prior: Array,
    v_prior: Array,
    mask: Array | None,
    lengths: Array | None,
    positions: Array | None,
    inv_freqs: Array | None,
    *,
    name: str,
    prior_slots: int,
    tp_k_prior: bool,
    fuse_rope: bool,
    **_hints: Any,
) -> tuple[Array, ...]:
    """The same as `attention_decode_fwd`."""
    acc = accumulator(q.dtype)
    if fuse_rope:
        q, k_active = rotate(q, k_active, positions, inv_freqs)
    new_keys: tuple[Any, ...] = (k_active,) if fuse_rope else ()
    cached = (k_active, v_active, k_prior, v_prior)
    keys, values, seen = _joined(cached, mask, lengths, q, prior_slots, tp_k_prior)
    any_seen = seen.any(-1, keepdims=True)
    z = _dot("bhtd,bhsd->bhts", q, keys, acc)
    z = jnp.where(any_seen, jnp.where(seen, z, -jnp.inf), 0)
    top = z.max(-1, keepdims=True)
    p = jnp.where(seen, jnp.exp(z - top), 0)
    total = jnp.where(any_seen, p.sum(-1, keepdims=True), 1)
    out = _dot("bhts,bhsd->bhdt", (p / total).astype(q.dtype), values, acc)
    neg_max = jnp.where(any_seen, -top, jnp.inf)
    recip = jnp.where(any_seen, 1 / total, 1)
    return (out.astype(q.dtype), neg_max, recip, *new_keys)


def attention_decode_bwd_plain(
    q: Array,
    k_active: Array | None,
    v_active: Array | None,
    k_prior: Array,
    v_prior: Array,
    mask: Array | None,
    lengths: Array | None,
    positions: Array | None,
    inv_freqs: Array | None,
    *stored: Array | None,
    name: str,
    prior_slots: int,
    tp_k_prior: bool,
    fuse_rope: bool,
    **_hints: Any,
) -> tuple[Array, ...]:
    """The same as `attention_decode_bwd`, from the same stored statistics."""
    acc = accumulator(q.dtype)
    turned: tuple[Any, Any] = (q, k_active)
    unturn: Any = None
    if fuse_rope:
        turned, unturn = jax.vjp(
            lambda *a: rotate(a[0], a[1], positions, a[2]), q, k_active, inv_freqs
        )
    cached = (turned[1], v_active, k_prior, v_prior)

    def join(*arrays):
        return _joined(arrays, mask, lengths, q, prior_slots, tp_k_prior)[:2]

    seen = _joined(cached, mask, lengths, q, prior_slots, tp_k_prior)[2]
    (keys, values), unjoin = jax.vjp(join, *cached)
    d_scores, dv = _from_stored(turned[0], keys, values, seen, stored, acc)
    dq = _dot("bhts,bhsd->bhtd", d_scores, keys, acc).astype(q.dtype)
    dk = _dot("bhts,bhtd->bhsd", d_scores, turned[0], acc)
    dk, dv, *d_prior = unjoin((dk.astype(keys.dtype), dv.astype(values.dtype)))
    if not fuse_rope:
        new = () if k_active is None else (dk, dv)
        return dq, *new, *d_prior
    d_new = stored[len(stored) // 2 + 3]
    dk = dk if d_new is None else dk + d_new
    dq, dk, d_freqs = unturn((dq, dk))
    return dq, dk, dv, *d_prior, d_freqs


def _from_stored(q, keys, values, seen, stored, acc):
    """The gradients of scores and values, from stored statistics."""
    half = len(stored) // 2
    out, neg_max, recip = stored[:3]
    d_out, d_max, d_recip = stored[half : half + 3]
    z = _dot("bhtd,bhsd->bhts", q, keys, acc)
    p = jnp.where(seen, jnp.exp(z + neg_max) * recip, 0)
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    dp = _dot("bhdt,bhsd->bhts", d_out, values, acc)
    delta = (d_out.astype(acc) * out.astype(acc)).sum(2)[..., None]
    d_recip = jnp.zeros_like(recip) if d_recip is None else d_recip
    d_max = jnp.zeros_like(recip) if d_max is None else d_max
    ds = p * (dp - delta - d_recip * recip)
    tied = seen & (z == jnp.where(seen, z, -jnp.inf).max(-1, keepdims=True))
    share = tied.astype(acc) / jnp.maximum(tied.sum(-1, keepdims=True, dtype=acc), 1)
    ds = jnp.where(seen, ds + share * (d_recip * recip - d_max), 0).astype(q.dtype)
    return ds, _dot("bhts,bhdt->bhsd", p.astype(q.dtype), d_out, acc)


def _dot(spec, a, b, acc):
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=acc)


def _joined(arrays, mask, lengths, q, prior_slots, tp_k_prior):
    """Keys and values of cache and new tokens, a copy for each query head; who sees."""
    k_active, v_active, k_prior, v_prior = arrays
    batch, heads, seq, _ = q.shape
    keys = (k_prior if tp_k_prior else k_prior.mT)[:batch, :, :prior_slots]
    values = v_prior[:batch, :, :prior_slots]
    count = keys.shape[2]
    if k_active is not None:
        keys = jnp.concatenate([keys, k_active.astype(keys.dtype)], 2)
        values = jnp.concatenate([values, v_active.astype(values.dtype)], 2)
    slot, query = jnp.arange(keys.shape[2]), jnp.arange(seq)[:, None]
    if mask is None:
        below = slot.astype(lengths.dtype) < lengths[:, None, None]
        seen = below & (slot < count)
        seen = (seen | ((slot >= count) & (slot - count <= query)))[:, None]
    else:
        seen = jnp.moveaxis(mask.astype(bool), 0, -1)
    seen = jnp.broadcast_to(seen, (batch, heads, seq, keys.shape[2]))
    repeats = heads // keys.shape[1]
    keys, values = (jnp.repeat(t, repeats, 1) for t in (keys, values))
    used = seen.any(2)[..., None]
    return jnp.where(used, keys, 0), jnp.where(used, values, 0), seen
