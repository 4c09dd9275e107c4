"""Prefill attention and its backward in plain jax.numpy: all scores at once.

The prior and the keys are joined into one array of columns, and who sees whom is
written as one comparison of positions.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.attention.blocks import (
    clean,
    grouped,
    lowest,
    product,
    row_products,
    unseen,
)
from neuronjax.kernels.attention.dropout import kept_weights
from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.attention.prefill import capped, rounded
from neuronjax.kernels.dtypes import accumulator


class _Call(NamedTuple):
    """Everything with one axis of columns; `slope` is the soft cap's derivative."""

    q: Array
    key: Array
    value: Array
    z: Array
    slope: Array
    seen: Array
    drop: Any
    sink: Any


def attention_plain(
    q: Array,
    k: Array,
    v: Array,
    extras: Extras,
    *,
    name: str,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    **config: object,
) -> tuple[Array, Array, Array]:
    """The same as `attention_fwd`."""
    options, acc = Options.of(config), accumulator(q.dtype)
    call = _prepare(q, k, v, extras, options, tp_q, tp_k)
    z, seen = _with_sink(call)
    any_seen = seen.any(-1, keepdims=True)
    top = jnp.where(any_seen, z.max(-1, keepdims=True), 0)
    e = jnp.where(seen, jnp.exp(jnp.where(seen, z - top, 0)), 0)
    e = rounded(e, options.softmax_dtype)
    total = jnp.where(any_seen, e.sum(-1, keepdims=True), 1)
    weights = (e / total)[..., : call.z.shape[-1]] * call.drop
    v, poison = clean(call.value, acc)
    out = product("ngqk,nkd->ngqd", weights.astype(v.dtype), v, acc)
    seen = call.seen
    out = out + jnp.where(seen, poison[:, None, None], 0).sum(-1, keepdims=True)
    out = jnp.where(any_seen, out, 0).astype(q.dtype)
    outs = out, jnp.where(any_seen, -top, jnp.inf), 1 / total
    out, neg_max, recip = (lax.collapse(x, 0, 2) for x in outs)
    return out.mT if tp_out else out, neg_max, recip


def attention_bwd_plain(
    q: Array,
    k: Array,
    v: Array,
    extras: Extras,
    out: Array,
    neg_max: Array,
    recip: Array,
    d_out: Array | None,
    d_neg_max: Array | None,
    d_recip: Array | None,
    *,
    name: str,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    **config: object,
) -> tuple[Array, ...]:
    """The same as `attention_bwd`, from the same stored statistics."""
    options, acc, dtype = Options.of(config), accumulator(q.dtype), q.dtype
    call = _prepare(q, k, v, extras, options, tp_q, tp_k)
    out = out.mT if tp_out else out
    d_out = jnp.zeros_like(out) if d_out is None else d_out.mT if tp_out else d_out
    d_neg_max, d_recip = (
        jnp.zeros_like(recip) if d is None else d for d in (d_neg_max, d_recip)
    )
    rows = (out, neg_max, recip, d_out, d_neg_max, d_recip)
    out, neg_max, recip, d_out, d_neg_max, d_recip = (
        grouped(x, k.shape[0]) for x in rows
    )
    z, seen = _with_sink(call)
    blank = neg_max == jnp.inf
    p = jnp.exp(jnp.where(seen & ~blank, z + jnp.where(blank, 0, neg_max), unseen(acc)))
    p = jnp.where(seen, p * recip, 0)
    dp = product("ngqd,nkd->ngqk", d_out, call.value, acc) * call.drop
    dp = jnp.pad(dp, [(0, 0)] * 3 + [(0, z.shape[-1] - dp.shape[-1])])
    delta = row_products(out, d_out, acc)
    dz = jnp.where(seen, p * (dp - delta - d_recip * recip), 0)
    tied = seen & (z == z.max(-1, keepdims=True))
    ties = jnp.maximum(tied.sum(-1, keepdims=True, dtype=acc), 1)
    dz = dz + jnp.where(tied, (d_recip * recip - d_neg_max) / ties, 0)
    dv = product(
        "ngqk,ngqd->nkd",
        (p[..., : call.z.shape[-1]] * call.drop).astype(dtype),
        d_out,
        acc,
    )
    return _pulled(call, dz, dv, v.shape[1], extras, options, (tp_q, tp_k))


def _pulled(call: _Call, dz, dv, kv_seq: int, extras: Extras, options, layout):
    """The gradients, from those of the scores, the sink's column last, and `dv`."""
    (tp_q, tp_k), acc, dtype = layout, dz.dtype, call.q.dtype
    count = call.z.shape[-1]
    d_sink, dz = dz[..., count:], dz[..., :count]
    bias = _bias_gradient(dz, extras.bias)
    dz = (dz * call.slope * options.scale).astype(dtype)
    dq = product("ngqk,nkd->ngqd", dz, clean(call.key, acc)[0], acc)
    dk = product("ngqk,ngqd->nkd", dz, clean(call.q, acc)[0], acc)
    dq, dk, dv = (x.astype(dtype) for x in (lax.collapse(dq, 0, 2), dk, dv))
    prior = count - kv_seq
    keys = [x if tp_k else x.mT for x in (dk[:, :prior], dk[:, prior:])]
    grads = [dq if tp_q else dq.mT, keys[1], dv[:, prior:], *bias]
    if extras.sink is not None:
        grads.append(d_sink.sum(2).reshape(extras.sink.shape).astype(extras.sink.dtype))
    return (*grads, *([keys[0], dv[:, :prior]] if prior else []))


def _prepare(q, k, v, extras: Extras, options: Options, tp_q, tp_k) -> _Call:
    """The scaled and biased scores, a sentinel where unseen: `[n, g, q, kv]`."""
    acc = accumulator(q.dtype)
    q, k = q if tp_q else q.mT, k if tp_k else k.mT
    q, prior = grouped(q, k.shape[0]), 0
    if extras.k_prior is not None and extras.v_prior is not None:
        k_prior = extras.k_prior if tp_k else extras.k_prior.mT
        k = jnp.concatenate([k_prior, k], 1)
        v = jnp.concatenate([extras.v_prior, v], 1)
        prior = k_prior.shape[1]
    (rows, q_poison), (key, k_poison) = clean(q, acc), clean(k, acc)
    z = product("ngqd,nkd->ngqk", rows, key, acc)
    z = rounded(z, options.mm_out_dtype) * options.scale
    slope = jnp.ones_like(z)
    if options.soft_cap:
        slope = 1 - jnp.tanh(z / options.soft_cap) ** 2
    z = capped(z, options.soft_cap) + q_poison[..., None] + k_poison[:, None, None]
    seen = _visible(q.shape[2], k.shape[1], prior, extras, options)
    mask = _spread(extras.mask, k.shape[0])
    seen = seen if mask is None else seen & mask
    bias = _spread(extras.bias, k.shape[0])
    if bias is not None:
        seen = seen & (bias != -jnp.inf)
        total = z + jnp.where(bias == -jnp.inf, 0, bias).astype(acc)
        z = jnp.where(total < lowest(acc), lowest(acc), total)
    seen = jnp.broadcast_to(seen, z.shape)
    sink = None if extras.sink is None else grouped(extras.sink.astype(acc), k.shape[0])
    drop = _drop(extras, options, z.shape, k.shape[0])
    return _Call(q, k, v, jnp.where(seen, z, lowest(acc)), slope, seen, drop, sink)


def _visible(q_seq, kv_seq, prior, extras: Extras, options: Options):
    """Which column each row sees, `[1, 1, q_seq, kv_seq]`, by position."""
    row = extras.positions(jnp.arange(q_seq, dtype=jnp.int32), options)[:, None]
    column = jnp.arange(kv_seq, dtype=jnp.int32)
    used = 0 if extras.used is None else extras.used
    position = jnp.where(column < prior, column - used, column - prior)
    seen = (column >= prior) | (column < used)
    seen = jnp.broadcast_to(seen, (q_seq, kv_seq))
    if options.is_causal:
        seen &= position <= row
    if options.window:
        seen &= position > row - options.window
    if extras.bound_min is not None and extras.bound_max is not None:
        seen &= column >= extras.bound_min[:, None]
        seen &= column < extras.bound_max[:, None]
    return seen[None, None]


def _spread(x, num_kv_heads):
    if x is None:
        return None
    return x[None] if x.shape[0] == 1 else grouped(x, num_kv_heads)


def _drop(extras: Extras, options: Options, shape, num_kv_heads):
    if extras.key is None:
        return 1
    numbers = [jnp.arange(n, dtype=jnp.int32) for n in shape[2:]]
    rows = extras.positions(numbers[0], options)
    keys = grouped(extras.key, num_kv_heads)
    return kept_weights(keys, options, rows, numbers[1])


def _with_sink(call: _Call):
    """Scores and visibility with the sink's column."""
    if call.sink is None:
        return call.z, call.seen
    column = jnp.broadcast_to(call.sink[..., None], (*call.z.shape[:3], 1))
    shown = jnp.broadcast_to(column != -jnp.inf, column.shape)
    z = jnp.concatenate([call.z, jnp.maximum(column, lowest(column.dtype))], -1)
    return z, jnp.concatenate([call.seen, shown], -1)


def _bias_gradient(dz, bias):
    if bias is None:
        return []
    whole = lax.collapse(dz, 0, 2)
    summed = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
    return [whole.sum(summed, keepdims=True).astype(bias.dtype)]
