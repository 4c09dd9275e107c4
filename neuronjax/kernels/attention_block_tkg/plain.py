"""The decode block line by line from its equations, in wide precision."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.attention.decode_plain import attention_decode_plain
from neuronjax.kernels.attention_block_tkg.operands import Operands
from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.output_projection import output_projection_plain
from neuronjax.kernels.output_projection_quantized import (
    quantized_output_projection_plain,
)
from neuronjax.kernels.quantization.fp8 import E4M3, is_fp8


def attention_block_plain(
    *operands: Array | None, name: str, **config: Any
) -> tuple[Array, ...]:
    """The same as `attention_block_fwd`."""
    o, c = Operands(*operands), SimpleNamespace(**config)
    found = heads_plain(o, c, {})
    q, k, v, statistics = (found[key] for key in ("q", "k", "v", "statistics"))
    k, v = own(k, 0, c), own(v, 0, c)
    new = kept_plain(k, o.k_scale, o, c), kept_plain(v, o.v_scale, o, c)
    stored = stored_plain(*new, o.k_cache, o.v_cache, o, c)
    if c.skip_attention:
        heads = q.astype(o.x.dtype).swapaxes(2, 3)
        return (out_plain(heads, o.w_out, o.bias_out, o, c), *stored, *statistics)
    scaled = scaled_plain(q, o.softmax_scale, o, c)
    held = attention_decode_plain(*attended(scaled, *new, o, c), **decode_config(o, c))
    heads = own_heads_plain(held[0], c)
    x_out = out_plain(heads, o.w_out, o.bias_out, o, c)
    return (x_out, *stored, *statistics, *held)


def heads_plain(o: Operands, c: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Query, key and value heads; what each norm was given; the statistics.

    A statistic in `given` is taken as it is instead of computed.
    """
    acc, d = accumulator(promoted(o.x.dtype, o.w_qkv.dtype)), o.head_dim
    x, statistics, inputs = o.x.astype(acc), [], {}

    def norm(t, gain, eps, key, count):
        if eps is None:
            return t
        inputs[key] = t
        mean = (t * t).sum(-1, keepdims=True) / count
        rstd = given.get(key, 1 / jnp.sqrt(mean + eps))
        statistics.append((key, rstd))
        return t * rstd if gain is None else t * rstd * gain[0].astype(acc)

    width = c.hidden_actual or x.shape[-1]
    y = _columns(norm(x, o.x_gain, c.x_eps, "rstd", width), o, c)
    y = y if o.bias_qkv is None else y + o.bias_qkv[0].astype(acc)
    heads = y.reshape(*y.shape[:2], -1, d).swapaxes(1, 2)
    q, k, v = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    q = norm(q, o.q_pre_gain, c.pre_eps, "q_pre_rstd", d)
    k = norm(k, o.k_pre_gain, c.pre_eps, "k_pre_rstd", d)
    if o.cos is not None:
        q, k = (_turned(t, o, c) for t in (q, k))
    q = norm(q, o.q_post_gain, c.post_eps, "q_post_rstd", d)
    k = norm(k, o.k_post_gain, c.post_eps, "k_post_rstd", d)
    stored = tuple(rstd for _, rstd in statistics)
    return dict(q=q, k=k, v=v, inputs=inputs, statistics=stored)


def _columns(normed, o, c):
    """The product with the weight; a quantized one is a constant."""
    factor = o.x.dtype if is_fp8(o.w_qkv.dtype) else None
    factor = factor or promoted(o.x.dtype, o.w_qkv.dtype)
    w = _rounded(o.w_qkv.astype(normed.dtype), factor)
    if c.quantization == "NONE":
        return _rounded(normed, factor) @ w
    w, scale = lax.stop_gradient((w, o.qkv_scale[0].astype(normed.dtype)))
    if c.quantization == "ROW":
        return _rounded(normed, factor) @ w * scale
    one = lax.stop_gradient(o.qkv_in_scale[0, 0]).astype(normed.dtype)
    codes = _clipped(normed / one)
    codes = _straight_through(codes) if is_fp8(o.w_qkv.dtype) else codes
    kinds = jnp.array([0] * o.num_heads + [1, 2], jnp.int32)
    per_column = jnp.repeat(scale[kinds], o.head_dim)
    return _rounded(codes, factor) @ w * per_column * one


def _turned(t, o, c):
    """The rotation of channel pairs, each by its angle: `[batch, heads, seq, d]`."""
    half = t.shape[-1] // 2
    index = jnp.arange(2 * half, dtype=jnp.int32)
    pairs = index.reshape(half, 2).T if c.interleaved else index.reshape(2, half)
    cos, sin = (jnp.moveaxis(a.astype(t.dtype), 0, -1)[:, None] for a in (o.cos, o.sin))
    first, second = t[..., pairs[0]], t[..., pairs[1]]
    turned = first * cos - second * sin, first * sin + second * cos
    return jnp.concatenate(turned, -1)[..., jnp.argsort(pairs.reshape(-1))]


def scaled_plain(q: Array, scale: Array | None, o: Operands, c: Any) -> Array:
    """The queries that attention gets."""
    factor = c.softmax_scale if scale is None else scale.astype(q.dtype)
    return (q * factor).astype(o.x.dtype)


def kept_plain(t: Array, scale: Array | None, o: Operands, c: Any) -> Array:
    """The keys or values that attention gets."""
    if scale is not None:
        t = _clipped(t * lax.stop_gradient(scale.reshape(-1)[0]).astype(t.dtype))
        t = _straight_through(t) if c.round_activations else t
    return t.astype(o.x.dtype)


def stored_plain(
    k: Array, v: Array, k_cache: Array, v_cache: Array, o: Operands, c: Any
) -> tuple[Array, Array]:
    """Both caches, or without an update the new keys and values."""
    if not c.update_cache:
        fp8 = o.k_scale is not None and c.round_activations
        dtype = E4M3 if fp8 else k.dtype
        return jnp.moveaxis(k[:, 0], -1, 0).astype(dtype), v.astype(dtype)
    return (
        _placed(k_cache, k, c.k_transposed, o),
        _placed(v_cache, v, False, o),
    )


def _placed(cache, new, transposed, o):
    """Every slot asks for the last new token that goes there, or keeps its own."""
    whole = cache[:, 0] if cache.ndim == 4 else cache
    rows = whole.swapaxes(1, 2) if transposed else whole
    new, count = new[:, 0].astype(cache.dtype), o.x.shape[1]
    narrow = o.position.dtype.itemsize < 4
    position = o.position.astype(jnp.int32) if narrow else o.position
    if o.table is None:
        row = jax.vmap(_row, (0, 0, 0, None))
        rows = row(rows, new, position[:, 0], count)
    else:
        flat = rows.reshape(-1, rows.shape[-1])
        for b in range(new.shape[0]):
            flat = _row(flat, new[b], position[b, 0], count)
        rows = flat.reshape(rows.shape)
    return (rows.swapaxes(1, 2) if transposed else rows).reshape(cache.shape)


def _row(slots, new, start, count):
    """One sequence's slots `[slots, d]` with its tokens from `start` on."""
    size = slots.shape[0]
    if count > size:
        return slots
    fits = (start >= 0) & (start <= size - count)
    at = jnp.where(fits, start.astype(jnp.int32), size)
    token = jnp.arange(size, dtype=jnp.int32) - at
    inside = (token >= 0) & (token < count)
    return jnp.where(inside[:, None], new[jnp.clip(token, 0, count - 1)], slots)


def out_plain(
    heads: Array, w_out: Array | None, bias_out: Array | None, o: Operands, c: Any
) -> Array:
    """`x_out` from heads `[batch, num_heads, head_dim, seq]`."""
    if w_out is None:
        first = jnp.moveaxis(heads, 2, 0)
        return first.reshape(first.shape[0], -1) if c.out_in_sb else heads
    config: dict[str, Any] = dict(name="OutputProjection", form="DBNS")
    config |= dict(transpose_out=c.transposed_out)
    config |= dict(cores=c.cores, out_dtype=None, is_tiled=False)
    operands = (jnp.moveaxis(heads, 2, 0), w_out, bias_out)
    if c.quantization_out == "NONE":
        return output_projection_plain(*operands, **config)[0]
    config |= dict(quantization=c.quantization_out, is_fp8_kernel=is_fp8(w_out.dtype))
    plain = quantized_output_projection_plain
    return plain(*operands, o.out_scale, o.out_in_scale, **config)[0]


def attended(q: Array, k: Array, v: Array, o: Operands, c: Any) -> tuple:
    """The operands of attention."""
    # Joined with new tokens: fp8 values, but no derivative may pass through fp8.
    wide = [a.astype(q.dtype) if is_fp8(a.dtype) else a for a in (o.k_cache, o.v_cache)]
    caches = [a if a.ndim == 4 else a[:, None] for a in wide]
    sink = o.sink
    if c.kvdp > 1:
        q = own(lax.all_gather(q, c.axis, axis=1, tiled=True), 0, c)
        if sink is not None and sink.shape[0] == o.num_heads:
            sink = lax.all_gather(sink, c.axis, axis=0, tiled=True)
    mask = o.mask
    if mask.shape[0] == o.x.shape[1]:  # no slot of the cache: one that nobody sees
        mask = jnp.concatenate([jnp.zeros_like(mask[:1]), mask])
    return (q, k, v, *caches, mask, None, None, None, sink, None, o.table)


def decode_config(o: Operands, c: Any) -> dict[str, Any]:
    """The config of attention."""
    slots = max(o.mask.shape[0] - o.x.shape[1], 1)
    layout = dict(prior_slots=slots, tp_k_prior=not c.k_transposed, fuse_rope=False)
    return dict(layout, name="AttentionTkgFwd")


def own_heads_plain(attention: Array, c: Any) -> Array:
    """The heads of this rank, for all sequences."""
    if c.kvdp == 1:
        return attention
    return own(lax.all_gather(attention, c.axis, axis=0, tiled=True), 1, c)


def own(x: Array, axis: int, c: Any) -> Array:
    """The part of `axis` that belongs to this rank."""
    if c.kvdp == 1:
        return x
    size = x.shape[axis] // c.kvdp
    start = lax.axis_index(c.axis) * size
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _rounded(x, dtype):
    return x.astype(dtype).astype(x.dtype)


def _clipped(x):
    return jnp.clip(x, -240.0, 240.0)


def _straight_through(x):
    """The value of the fp8 code, the derivative of one."""
    return x + lax.stop_gradient(x.astype(E4M3).astype(x.dtype) - x)
