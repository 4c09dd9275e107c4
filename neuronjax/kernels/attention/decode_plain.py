"""Decode attention in plain jax.numpy, over one joined and repeated array of keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.attention.decode import rotate
from neuronjax.kernels.dtypes import accumulator, is_differentiable


class _Rest(NamedTuple):
    """The operands beside keys and values, and the layout."""

    mask: Any
    lengths: Any
    starts: Any
    table: Any
    sink: Any
    prior_slots: int
    tp_k_prior: bool


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
    sink: Array | None,
    starts: Array | None,
    table: Array | None,
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
    rest = _Rest(mask, lengths, starts, table, sink, prior_slots, tp_k_prior)
    keys, values = _joined(q, k_active, v_active, k_prior, v_prior, rest)
    seen = _seen(q, v_prior, k_active is not None, rest)
    z, seen = _with_sink(_dot("bhtd,bhsd->bhts", q, keys, acc), seen, sink)
    any_seen = seen.any(-1, keepdims=True)
    z = jnp.where(any_seen, jnp.where(seen, z, -jnp.inf), 0)
    top = z.max(-1, keepdims=True, initial=-jnp.inf)
    p = jnp.where(seen, jnp.exp(z - top), 0)
    total = jnp.where(any_seen, p.sum(-1, keepdims=True), 1)
    weights = (p / total)[..., : values.shape[2]].astype(q.dtype)
    out = _dot("bhts,bhsd->bhdt", weights, values, acc)
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
    sink: Array | None,
    starts: Array | None,
    table: Array | None,
    *stored: Array | None,
    name: str,
    prior_slots: int,
    tp_k_prior: bool,
    fuse_rope: bool,
    **_hints: Any,
) -> tuple[Array, ...]:
    """The same as `attention_decode_bwd`, from the same stored statistics."""
    acc, half = accumulator(q.dtype), len(stored) // 2
    rest = _Rest(mask, lengths, starts, table, sink, prior_slots, tp_k_prior)
    operands = (q, k_active, v_active, k_prior, v_prior, inv_freqs)
    live = [is_differentiable(x.dtype) if x is not None else False for x in operands]

    def prepare(*floats):
        given = iter(floats)
        merged = [
            next(given) if is_live else x
            for x, is_live in zip(operands, live, strict=True)
        ]
        return _prepared(merged, positions, rest, fuse_rope)

    floats = [x for x, is_live in zip(operands, live, strict=True) if is_live]
    made: tuple[Any, ...]
    made, pull = jax.vjp(prepare, *floats)
    seen = _seen(q, v_prior, k_active is not None, rest)
    ds, dv, d_sink = _from_stored(made, seen, sink, stored, acc)
    dq = _dot("bhts,bhsd->bhtd", ds, made[1], acc)
    dk = _dot("bhts,bhtd->bhsd", ds, made[0], acc)
    seeds = [g.astype(x.dtype) for g, x in zip((dq, dk, dv), made, strict=False)]
    if fuse_rope:
        d_new = stored[half + 3]
        seeds.append(jnp.zeros_like(made[3]) if d_new is None else d_new)
    last = () if d_sink is None else (d_sink,)
    return (*pull(tuple(seeds)), *last)


def _prepared(operands, positions, rest, fuse_rope):
    """Rotated queries, joined keys and values: what the scores are made of."""
    q, new_k, new_v, keys, values, freqs = operands
    if fuse_rope:
        q, new_k = rotate(q, new_k, positions, freqs)
    made = (q, *_joined(q, new_k, new_v, keys, values, rest))
    return (*made, new_k) if fuse_rope else made


def _from_stored(made, seen, sink, stored, acc):
    """The gradients of scores, values and sink, from stored statistics."""
    (q, keys, values), half = made[:3], len(stored) // 2
    out, neg_max, recip = stored[:3]
    d_out, d_max, d_recip = stored[half : half + 3]
    z, seen = _with_sink(_dot("bhtd,bhsd->bhts", q, keys, acc), seen, sink)
    p = jnp.where(seen, jnp.exp(z + neg_max) * recip, 0)
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    dp = _dot("bhdt,bhsd->bhts", d_out, values, acc)
    delta = (d_out.astype(acc) * out.astype(acc)).sum(2)[..., None]
    d_recip = jnp.zeros_like(recip) if d_recip is None else d_recip
    d_max = jnp.zeros_like(recip) if d_max is None else d_max
    if sink is not None:  # it has no value
        dp = jnp.concatenate([dp, jnp.zeros_like(dp[..., :1])], -1)
    ds = p * (dp - delta - d_recip * recip)
    top = jnp.where(seen, z, -jnp.inf).max(-1, keepdims=True, initial=-jnp.inf)
    tied = seen & (z == top)
    share = tied.astype(acc) / jnp.maximum(tied.sum(-1, keepdims=True, dtype=acc), 1)
    ds = jnp.where(seen, ds + share * (d_recip * recip - d_max), 0)
    count = values.shape[2]
    p = p[..., :count].astype(q.dtype)
    dv = _dot("bhts,bhdt->bhsd", p, d_out, acc)
    d_sink = None
    if sink is not None:
        d_sink = ds[..., count:].sum((0, 2)).astype(sink.dtype)
    return ds[..., :count].astype(q.dtype), dv, d_sink


def _dot(spec, a, b, acc):
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=acc)


def _with_sink(z, seen, sink):
    """One more column, which every query sees unless the sink is -inf."""
    if sink is None:
        return z, seen
    column = jnp.zeros_like(z[..., :1]) + sink.astype(z.dtype)[None, :, :, None]
    z = jnp.concatenate([z, column], -1)
    return z, jnp.concatenate([seen, column > -jnp.inf], -1)


def _by_sequence(cache, table):
    """`[batch, num_kv_heads, slots, width]`, one block after the other."""
    if not is_differentiable(cache.dtype):
        cache = cache.astype(jnp.bfloat16)  # which holds every fp8 value
    index = jnp.where(_known(table, cache), table, 0).astype(jnp.int32)
    blocks = [jnp.take(cache, index[:, j], axis=0) for j in range(table.shape[1])]
    return jnp.concatenate(blocks, 2)


def _known(table, cache):
    """Which entries of the table are blocks."""
    return (table >= 0) & (table < cache.shape[0])


def _joined(q, k_active, v_active, k_prior, v_prior, rest):
    """Keys and values of cache and new tokens, a copy for each query head.

    Those that no query sees are zero.
    """
    batch, heads, *_ = q.shape
    if rest.table is None:
        keys, values = k_prior if rest.tp_k_prior else k_prior.mT, v_prior
        keys, values = keys[:batch], values[:batch]
    else:
        keys, values = (_by_sequence(x, rest.table) for x in (k_prior, v_prior))
    keys, values = (x[:, :, : rest.prior_slots] for x in (keys, values))
    if k_active is not None:
        keys = jnp.concatenate([keys, k_active.astype(keys.dtype)], 2)
        values = jnp.concatenate([values, v_active.astype(values.dtype)], 2)
    repeats = heads // keys.shape[1]
    keys, values = (jnp.repeat(x, repeats, 1) for x in (keys, values))
    used = _seen(q, v_prior, k_active is not None, rest).any(2)[..., None]
    return jnp.where(used, keys, 0), jnp.where(used, values, 0)


def _seen(q, v_prior, has_new, rest):
    """Who sees whom, `[batch, num_heads, seq, slots]`, the new tokens last."""
    batch, heads, seq, _ = q.shape
    count, table = rest.prior_slots, rest.table
    total = count + seq if has_new else count
    mask = None if rest.mask is None else jnp.moveaxis(rest.mask.astype(bool), 0, -1)
    seen = mask
    if rest.lengths is not None:
        ends = rest.lengths if rest.lengths.ndim == 2 else rest.lengths[:, None]
        slot = jnp.arange(count)
        seen = _below(slot, rest.starts, ends)[:, None]
        seen = jnp.broadcast_to(seen, (batch, heads, seq, count))
        if has_new:
            causal = jnp.tril(jnp.ones((seq, seq), bool))
            new = causal if mask is None else mask
            new = jnp.broadcast_to(new, (batch, heads, seq, seq))
            seen = jnp.concatenate([seen, new], -1)
    assert seen is not None
    if table is not None:
        known = jnp.repeat(_known(table, v_prior), v_prior.shape[2], 1)[:, :count]
        known = jnp.pad(known, [(0, 0), (0, total - count)], constant_values=True)
        seen = seen & known[:, None, None]
    return jnp.broadcast_to(seen, (batch, heads, seq, total))


def _below(slot, starts, ends):
    """`[batch, seq or 1, slots]`: from start to end, going up and around."""
    ends = ends.astype(slot.dtype)[..., None]
    if starts is None:
        return slot < ends
    starts = starts.astype(slot.dtype)[..., None]
    inside = (slot >= starts) & (slot < ends)
    return inside | ((starts > ends) & ((slot >= starts) | (slot < ends)))
