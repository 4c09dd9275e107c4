"""Quantized QKV line by line from its equations, on whole tensors; nothing is fast."""

import functools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.mx.qkv import BLOCK_OPTIONS, mx_columns_plain
from neuronjax.kernels.qkv.plain import (
    columns_plain,
    laid_out,
    out_axes,
    retiled,
    rounded,
    stored_sum,
    untiled,
    wide_operands,
    wide_product_plain,
)
from neuronjax.kernels.quantization.fp8 import E4M3

PLAIN = 9


def qkv_quantized_plain(
    *operands: Array | None, name: str, is_tiled: bool, **config: Any
) -> tuple[Array, ...]:
    """What `qkv_quantized_fwd` returns."""
    o = wide_operands(operands[:PLAIN], is_tiled)
    c = SimpleNamespace(**config)
    scales = [
        None if x is None else untiled(x, 1)[0] if is_tiled else x[0]
        for x in operands[PLAIN : PLAIN + 2]
    ]
    product = functools.partial(_product, c=c, scales=scales)
    if c.quantization == "MX":
        packed: list[Any] = [operands[1], operands[PLAIN]]
        read = {key: config[key] for key in BLOCK_OPTIONS}
        product = lambda x, _: mx_columns_plain(x, *packed, **read)  # noqa: E731
    if c.quantization == "NONE":
        product = wide_product_plain
    y, x, statistics = columns_plain(o, c, product)
    dtype = c.out_dtype or o.dtype
    if c.kv_dtype is not None:
        query, caches = _cached(y, operands[PLAIN + 2 :], c)
        return (query.astype(dtype), *stored_sum(x, o, c), *statistics, *caches)
    outs = (laid_out(y, c).astype(dtype), *stored_sum(x, o, c), *statistics)
    return tuple(map(retiled, outs, out_axes(c))) if is_tiled else outs


def _product(normed, o, *, c, scales):
    """Activations, or their codes, times the constant weight; then the scales."""
    w_scale, in_scale = (
        None if s is None else lax.stop_gradient(s).astype(normed.dtype) for s in scales
    )
    w = lax.stop_gradient(rounded(o.w, o.factor))
    if c.quantization == "ROW":
        return rounded(normed, o.factor) @ w * w_scale
    codes = jnp.clip(normed / in_scale[0], -240.0, 240.0)
    if c.is_fp8_kernel:
        # Straight through: the value of the rounded code, the derivative of the clip.
        codes = codes + lax.stop_gradient(
            codes.astype(E4M3).astype(codes.dtype) - codes
        )
    y = rounded(codes, o.factor) @ w
    heads = y.reshape(*y.shape[:2], -1, c.d_head)
    kinds = [0] * c.num_q_heads + [1] * c.num_kv_heads + [2] * c.num_kv_heads
    group = jnp.array(kinds, jnp.int32)
    return (heads * w_scale[group][:, None] * in_scale[0]).reshape(y.shape)


def _cached(y, operands, c):
    """The query heads, and both caches with the new keys and values in them."""
    k_cache, v_cache, k_scale, v_scale, slots = operands
    width, query = c.num_kv_heads * c.d_head, c.num_q_heads * c.d_head
    low, high = c.kv_limits
    caches = []
    for start, cache, scale in (
        (query, k_cache, k_scale),
        (query + width, v_cache, v_scale),
    ):
        x = lax.stop_gradient(y[..., start : start + width])
        scale = lax.stop_gradient(scale[0, 0]).astype(x.dtype)
        rows = jnp.clip(x / scale, low, high).astype(cache.dtype)
        if slots is None:
            caches.append(jnp.concatenate([rows, cache[:, rows.shape[1] :]], 1))
            continue
        flat = cache.reshape(-1, width)
        if slots.dtype.itemsize < 4:  # too narrow to count the slots
            slots = slots.astype(jnp.int32)
        # Which row each slot holds: the last one that names it, or its own.
        named = (
            slots.reshape(-1) == jnp.arange(flat.shape[0], dtype=slots.dtype)[:, None]
        )
        row = named.shape[1] - 1 - jnp.argmax(named[:, ::-1], 1)
        new = rows.reshape(-1, width)[row]
        flat = jnp.where(named.any(1)[:, None], new, flat)
        caches.append(flat.reshape(cache.shape))
    return y[..., :query], caches
