"""QKV with a quantized weight, and with quantized keys and values.

`y = (codes @ w) * scale`, the scale after the product and before the bias:

- ROW: `codes` are the normed activations as they are, `scale[c]` belongs to column `c`;
- STATIC: `codes = fp8(clip(x / in_scale, -240, 240))`, and the scale is `in_scale`
  times one value for all query, all key and all value columns;
- MX: `codes` and `w` are blocks with a power of two each (`kernels.mx.qkv`).

`PRODUCTS` names the products by the config's `quantization`. Weight and scales are
constants; the derivative of a rounding is one, beyond a clip it is zero.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.mx.qkv import BLOCK_OPTIONS, mx_columns_bwd, mx_columns_fwd
from neuronjax.kernels.qkv.cache import (
    quantized_cache_rows,
    write_block_rows,
    write_flat_rows,
)
from neuronjax.kernels.qkv.projection import (
    TILED,
    WHOLE,
    Form,
    Product,
    arranged,
    columns_bwd,
    columns_fwd,
    factor_dtype,
    flat,
    wide_product,
)
from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.kernels.quantization.linear import scaled_linear_bwd, scaled_linear_fwd
from neuronjax.kernels.quantization.straight_through import (
    STATIC_LIMIT,
    static_codes,
    static_codes_bwd,
)
from neuronjax.kernels.shard_common import contract

# Operands of the macro: those of the plain leaf, two scales, and five of the caches.
PLAIN, OPERANDS = 9, 16


def qkv_quantized_fwd(
    *operands: Array | None, name: str, is_tiled: bool, **config: Any
) -> tuple[Array, ...]:
    """Returns what `qkv_fwd` does, and with caches both caches.

    The operands are the nine of `qkv_fwd`, then `w_scale`, `in_scale`, `k_cache`,
    `v_cache`, `k_scale`, `v_scale` and `slots`, absent ones `None`. With caches `out`
    is `[batch, seq, num_q_heads*head_dim]`, the query heads alone.
    """
    form = TILED if is_tiled else WHOLE
    hidden, w, *_ = operands[:PLAIN]
    product = _product(form, hidden, w, operands[PLAIN : PLAIN + 2], config)
    y, stored, statistics = columns_fwd(form, operands[:PLAIN], config, product)
    dtype = config["out_dtype"] or hidden.dtype
    if config["kv_dtype"] is None:
        return (arranged(form, y.astype(dtype), config), *stored, *statistics)
    query, *new = _split_heads(y, config)
    caches = _written(new, operands[PLAIN + 2 :], config)
    return (query.astype(dtype), *stored, *statistics, *caches)


def qkv_quantized_bwd(
    *args: Array | None, name: str, is_tiled: bool, **config: Any
) -> tuple[Array | None, ...]:
    """Returns the gradients of the first nine operands, `None` for a constant one.

    Takes all operands, the outputs of the forward leaf and their cotangents; those of
    the caches do not count: quantized values are constants.
    """
    form, operands, rest = TILED if is_tiled else WHOLE, args[:PLAIN], args[OPERANDS:]
    hidden, w, *_ = operands
    outs, cotangents = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    dtype = factor_dtype(hidden, w)
    scales = args[PLAIN : PLAIN + 2]
    product = _product(form, hidden, w, scales, config)
    dy = flat(form, cotangents[0], outs[0], accumulator(dtype), config)
    if config["kv_dtype"] is not None:
        outs, cotangents = outs[:-2], cotangents[:-2]
        more = config["num_kv_heads"] * config["d_head"] * 2
        dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), (0, 0, 0), (0, more, 0)])
    return columns_bwd(form, operands, (outs[1:], cotangents[1:]), dy, config, product)


def _product(form, hidden, w, scales, config) -> Product:
    dtype = factor_dtype(hidden, w)
    return PRODUCTS[config["quantization"]](form, dtype, scales, config)


def _unquantized(form, dtype, scales, config):
    return wide_product(dtype)


def _row(form, dtype, scales, config):
    return scaled_product(dtype, _values(form, scales[0]))


def _static(form, dtype, scales, config):
    w_scale, in_scale = (_values(form, scale) for scale in scales)
    groups = [config["num_q_heads"], *[config["num_kv_heads"]] * 2]
    widths = [count * config["d_head"] for count in groups]
    scale = jnp.concatenate(
        [jnp.broadcast_to(w_scale[i], (n,)) for i, n in enumerate(widths)]
    )
    inner, one = scaled_product(dtype, scale * in_scale), in_scale[0]
    codes = E4M3 if config["is_fp8_kernel"] else None

    def forward(form, normed, w):
        x = static_codes(normed, one, limit=STATIC_LIMIT, dtype=codes)
        return inner.forward(form, x, w)

    def backward(form, normed, w, dy, hidden):
        dw, dx = inner.backward(form, normed, w, dy, hidden)
        return dw, static_codes_bwd(dx, normed, one, limit=STATIC_LIMIT)

    return Product(forward, backward)


def _block_scaled(form, dtype, scales, config):
    """Whole tensors only; the cotangent keeps its wide precision."""
    scale, read = scales[0], {key: config[key] for key in BLOCK_OPTIONS}

    def forward(form, normed, w):
        return mx_columns_fwd(normed, w, scale, **read)

    def backward(form, normed, w, dy, hidden):
        return None, mx_columns_bwd(normed, w, scale, dy, **read)

    return Product(forward, backward)


PRODUCTS = {"NONE": _unquantized, "ROW": _row, "STATIC": _static, "MX": _block_scaled}


def scaled_product(dtype: Any, scale: Array) -> Product:
    """The product with a constant weight, times `scale[c]` for column `c`."""

    def forward(form, x, w):
        if form is WHOLE and w.dtype.itemsize == 1:
            return scaled_linear_fwd(x, w, scale, dtype=dtype)
        w = lax.stop_gradient(w)
        if form is WHOLE:
            y = linear_fwd(x, w, dtype=dtype)
            return y * scale.astype(y.dtype)
        y = wide_product(dtype).forward(form, x, w)
        return y * scale.astype(y.dtype)[:, None, None]

    def backward(form, x, w, dy, hidden):
        if form is WHOLE and w.dtype.itemsize == 1:
            return None, scaled_linear_bwd(dy, w, scale, dtype=dtype)
        lined = scale if form is WHOLE else scale[:, None, None]
        scaled = (dy * lined.astype(dy.dtype)).astype(dtype)
        pair = (scaled, w.astype(dtype))
        pair = pair if form is WHOLE else pair[::-1]
        return None, contract(form.input_grad, *pair, like=hidden.astype(dtype))

    return Product(forward, backward)


def _values(form: Form, scale: Array) -> Array:
    """The first row of a scale, one value a column; all its rows are alike."""
    row = scale[0] if form is WHOLE else lax.collapse(scale[..., 0], 0, 2)
    return lax.stop_gradient(row)


def _split_heads(y, config):
    """The columns of query, key and value heads."""
    query = config["num_q_heads"] * config["d_head"]
    key = query + config["num_kv_heads"] * config["d_head"]
    return jnp.split(y, [query, key], axis=2)


def _written(new, operands, config):
    """Both caches with the new keys and values in them."""
    k_cache, v_cache, k_scale, v_scale, slots = operands
    low, high = config["kv_limits"]
    more = dict(low=low, high=high, dtype=config["kv_dtype"])
    caches = []
    for x, cache, scale in zip(
        new, (k_cache, v_cache), (k_scale, v_scale), strict=True
    ):
        rows = quantized_cache_rows(lax.stop_gradient(x), scale, **more)
        if slots is None:
            caches.append(write_flat_rows(cache, rows))
        else:
            caches.append(write_block_rows(cache, rows, slots))
    return caches
