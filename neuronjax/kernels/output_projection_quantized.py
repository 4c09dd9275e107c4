"""The output projection with a quantized weight.

`out = (codes @ weight) * scale + bias`:

- ROW: `codes` are the activations as they are, `scale[h]` belongs to column `h`;
- STATIC: `codes = fp8(clip(attention / input_scale, -240, 240))`, and the scale is
  `weight_scale * input_scale`;
- STATIC_MX: the same with a clip at 448, and the weight's rows interleaved in fours:
  the stored `[rows, d_model]` is a `[rows/4, d_model, 4]`.

Weight and scales are constants; the derivative of a rounding is one, beyond a clip it
is zero. Block-scaled weights (MX) are in `kernels.mx.output_projection`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.output_projection import (
    attention_of,
    bias_grad,
    finished,
    flat,
    plain_factors,
    plain_layout,
    rows_of,
)
from neuronjax.kernels.quantization.fp8 import E4M3, E4M3FN, is_fp8
from neuronjax.kernels.quantization.linear import scaled_linear_bwd, scaled_linear_fwd
from neuronjax.kernels.quantization.straight_through import (
    STATIC_LIMIT,
    STATIC_MX_LIMIT,
    static_codes,
    static_codes_bwd,
)
from neuronjax.kernels.shard_common import contract

# Where each quantization clips its activations, and the dtype it rounds them to.
_CODES = {"STATIC": (STATIC_LIMIT, E4M3), "STATIC_MX": (STATIC_MX_LIMIT, E4M3FN)}


def quantized_output_projection_fwd(
    attention: Float[Array, "..."],
    weight: Shaped[Array, "..."],
    bias: Float[Array, "..."] | None,
    weight_scale: Float[Array, "..."],
    input_scale: Float[Array, "..."] | None,
    *,
    name: str,
    form: str,
    transpose_out: bool,
    cores: int | None,
    out_dtype: str | None,
    is_tiled: bool,
    quantization: str,
    is_fp8_kernel: bool,
    **hints: Any,
) -> tuple[Array]:
    """Returns `(out,)` in the layouts of `output_projection_fwd`.

    `weight_scale` is `[rows, d_model]` for ROW, else one value, like `input_scale`; the
    first row counts. Activations are rounded where the weight is fp8
    (`is_fp8_kernel`); a wider weight is the reference, which clips alone.
    """
    x = attention if is_tiled else rows_of(attention, form)
    w, dtype = _logical(weight, quantization, is_tiled), _factor(attention, weight)
    one = _one(input_scale)
    if quantization in _CODES:
        limit, kind = _CODES[quantization]
        kind = kind if is_fp8_kernel else None
        x = static_codes(x, one, limit=limit, dtype=kind)
    scale = _scale(weight_scale, one, quantization, is_tiled)
    y = _scaled(x, w, scale, dtype, is_tiled)
    out = finished(y, bias, form, transpose_out, cores, is_tiled)
    return (out.astype(out_dtype or attention.dtype),)


def quantized_output_projection_bwd(
    attention: Float[Array, "..."],
    weight: Shaped[Array, "..."],
    bias: Float[Array, "..."] | None,
    weight_scale: Float[Array, "..."],
    input_scale: Float[Array, "..."] | None,
    d_out: Float[Array, "..."],
    *,
    name: str,
    form: str,
    transpose_out: bool,
    cores: int | None,
    out_dtype: str | None,
    is_tiled: bool,
    quantization: str,
    is_fp8_kernel: bool,
    **hints: Any,
) -> tuple[Array, Array | None]:
    """Returns the cotangents of attention and bias."""
    w, dtype = _logical(weight, quantization, is_tiled), _factor(attention, weight)
    acc, one = accumulator(dtype), _one(input_scale)
    scale = _scale(weight_scale, one, quantization, is_tiled)
    dy = flat(d_out.astype(acc), attention.shape[-1], transpose_out, is_tiled)
    if is_tiled:
        lined = scale.reshape(-1, 1, 1).astype(acc)
        scaled = (lax.collapse(dy, 0, 2) * lined).astype(dtype)
        like = attention.astype(dtype)
        dx = contract("pcnh,hbs->pcbns", w.astype(dtype), scaled, like=like)
    elif is_fp8(w.dtype):
        dx = scaled_linear_bwd(dy, w, scale, dtype=dtype)
    else:
        scaled = (dy * scale.astype(acc)).astype(dtype)
        like = rows_of(attention, form).astype(dtype)
        dx = contract("bsh,kh->bsk", scaled, w.astype(dtype), like=like)
    dx = dx if is_tiled else attention_of(dx, attention, form)
    if quantization in _CODES:
        dx = static_codes_bwd(dx, attention, one, limit=_CODES[quantization][0])
    return dx.astype(attention.dtype), bias_grad(dy, bias, is_tiled)


def quantized_output_projection_plain(
    attention: Float[Array, "..."],
    weight: Shaped[Array, "..."],
    bias: Float[Array, "..."] | None,
    weight_scale: Float[Array, "..."],
    input_scale: Float[Array, "..."] | None,
    *,
    name: str,
    form: str,
    transpose_out: bool,
    cores: int | None,
    out_dtype: str | None,
    is_tiled: bool,
    quantization: str,
    is_fp8_kernel: bool,
    **hints: Any,
) -> tuple[Array]:
    """The same as one sum over heads and channels, all in wide precision."""
    acc, dtype = accumulator(attention.dtype), attention.dtype
    x, w, spec = plain_factors(attention, weight, form, is_tiled)
    if quantization == "STATIC_MX":
        fours = w.reshape(-1, w.shape[2], 4)
        w = jnp.moveaxis(fours, 2, 1).reshape(w.shape)
    w, x = lax.stop_gradient(w).astype(acc), x.astype(acc)
    columns = weight_scale[..., 0] if is_tiled else weight_scale[0]
    scale = lax.stop_gradient(columns).reshape(-1).astype(acc)
    if input_scale is not None:
        limit, kind = (240.0, E4M3) if quantization == "STATIC" else (448.0, E4M3FN)
        one = lax.stop_gradient(input_scale.reshape(-1)[0]).astype(acc)
        x = jnp.clip(x / one, -limit, limit)
        if is_fp8_kernel:
            # Straight through: the value of the code, the derivative of the clip.
            x = x + lax.stop_gradient(x.astype(kind).astype(acc) - x)
        scale = scale * one
    out = jnp.einsum(spec, x.astype(dtype).astype(acc), w) * scale
    out = plain_layout(out, bias, form, transpose_out, cores, is_tiled)
    return (out.astype(out_dtype or attention.dtype),)


def _factor(attention, weight):
    """The dtype of the product's factors; an fp8 weight takes that of `attention`."""
    if is_fp8(weight.dtype):
        return attention.dtype
    return promoted(attention.dtype, weight.dtype)


def _one(scale) -> Any:
    """The value that a scale repeats; a constant."""
    return None if scale is None else lax.stop_gradient(scale.reshape(-1)[0])


def _scale(weight_scale, one, quantization: str, is_tiled: bool):
    """What the products are multiplied by: one value, or one a column."""
    if quantization != "ROW":
        return _one(weight_scale) * one
    row = lax.collapse(weight_scale[..., 0], 0, 2) if is_tiled else weight_scale[0]
    return lax.stop_gradient(row)


def _logical(weight, quantization: str, is_tiled: bool):
    """The weight with its rows in order, a constant, still in its own dtype."""
    weight = lax.stop_gradient(weight)
    if quantization != "STATIC_MX":
        return weight
    if not is_tiled:
        return _woven(weight)
    partitions, chunks, *free = weight.shape
    heads = jnp.moveaxis(lax.collapse(weight, 0, 2), 1, 0)
    rows = jnp.moveaxis(_woven(lax.collapse(heads, 0, 2)).reshape(heads.shape), 0, 1)
    return rows.reshape(partitions, chunks, *free)


def _woven(weight):
    """Row `4*r + j` of the result is element `j` of the fours of group `r`."""
    rows, width = weight.shape
    return weight.reshape(rows // 4, width, 4).swapaxes(1, 2).reshape(rows, width)


def _scaled(x, w, scale, dtype, is_tiled: bool):
    """`(x @ w) * scale`, accumulated wide."""
    if is_tiled:
        factors = w.astype(dtype), x.astype(dtype)
        acc = accumulator(dtype)
        y = jnp.einsum("pcnh,pcbns->hbs", *factors, preferred_element_type=acc)
        return y * scale.reshape(-1, 1, 1).astype(acc)
    if is_fp8(w.dtype):
        return scaled_linear_fwd(x, w, scale, dtype=dtype)
    y = linear_fwd(x, w, dtype=dtype)
    return y * scale.astype(y.dtype)
