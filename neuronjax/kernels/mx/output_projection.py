"""The output projection of prefill with a block-scaled weight.

`out[b, s] = round(concat_n attention[b, n, :, s]) @ weight + bias`: blocks are 32
consecutive rows of the weight, `N*D` in all, and four rows share a container. Attention
is rounded to float8_e4m3fn blocks here, or comes as containers. Weight and scales are
constants, and so is attention in containers.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.mx.formats import E4M3FN, FORMATS, decode, element, scaled
from neuronjax.kernels.mx.layout import CONTIGUOUS, unpack_weight
from neuronjax.kernels.mx.linear import rounded, rounded_bwd
from neuronjax.kernels.mx.plain import rounded_plain
from neuronjax.kernels.mx.product import product_bwd, product_fwd
from neuronjax.kernels.mx.quantize import ROWS
from neuronjax.kernels.output_projection import (
    attention_of,
    bias_grad,
    finished,
    flat,
    plain_layout,
    rows_of,
)

Attention = Float[Array, "batch num_heads head_dim seq"] | Integer[Array, "b 1 p seq"]


def mx_output_projection_fwd(
    attention: Attention,
    weight: Integer[Array, "p d_model"],
    bias: Float[Array, "1 d_model"] | None,
    weight_scale: UInt8[Array, "p_blocks d_model"],
    input_scale: UInt8[Array, "batch p_blocks seq"] | None,
    *,
    weight_format: str,
    out_dtype: str,
    **config: Any,
) -> tuple[Array]:
    """Returns `(out,)`, `[batch, seq, d_model]`.

    `attention` in containers is `[batch, 1, N*D/4, seq]`, with `input_scale`
    `[batch, N*D/32, seq]`.
    """
    if input_scale is None:
        left = rounded(rows_of(attention, "BNDS"), CONTIGUOUS)
    else:
        left = _dequantized_rows(attention, input_scale)
    packed = weight[:, None], weight_scale[:, None]
    y = product_fwd(left, *packed, kind=FORMATS[weight_format])
    return (finished(y, bias, "BNDS", False, None, False).astype(out_dtype),)


def mx_output_projection_bwd(
    attention: Attention,
    weight: Integer[Array, "p d_model"],
    bias: Float[Array, "1 d_model"] | None,
    weight_scale: UInt8[Array, "p_blocks d_model"],
    input_scale: UInt8[Array, "batch p_blocks seq"] | None,
    d_out: Float[Array, "batch seq d_model"],
    *,
    weight_format: str,
    **config: Any,
) -> tuple[Array | None, Array | None]:
    """Returns the cotangents of attention, unless it is packed, and of the bias."""
    dy = flat(d_out.astype(accumulator(d_out.dtype)), attention.shape[-1], False, False)
    dbias = bias_grad(dy, bias, False)
    if input_scale is not None:
        return None, dbias
    packed = weight[:, None], weight_scale[:, None]
    dleft = product_bwd(dy, *packed, kind=FORMATS[weight_format])
    drows = rounded_bwd(dleft, rows_of(attention, "BNDS"), CONTIGUOUS)
    dx = attention_of(drows, attention, "BNDS").astype(attention.dtype)
    return dx, dbias


def mx_output_projection_plain(
    attention: Attention,
    weight: Integer[Array, "p d_model"],
    bias: Float[Array, "1 d_model"] | None,
    weight_scale: UInt8[Array, "p_blocks d_model"],
    input_scale: UInt8[Array, "batch p_blocks seq"] | None,
    *,
    weight_format: str,
    out_dtype: str,
    **config: Any,
) -> tuple[Array]:
    """The same with the weight as a whole matrix."""
    size, kind = 4 * weight.shape[0], FORMATS[weight_format]
    packed = weight[:, None], weight_scale[:, None]
    w = unpack_weight(*packed, CONTIGUOUS, kind, size)
    if input_scale is None:
        rows = attention.transpose(0, 3, 1, 2)
        rows = rows.reshape(*rows.shape[:2], size)
        rows = rounded_plain(rows.astype(accumulator(rows.dtype)), CONTIGUOUS)
    else:
        blocks = _dequantized_rows(attention, input_scale)[..., 0]
        rows = jnp.swapaxes(blocks, 2, 3).reshape(*blocks.shape[:2], size)
    out = plain_layout(rows @ w.astype(rows.dtype), bias, "BNDS", False, None, False)
    return (out.astype(out_dtype),)


def _dequantized_rows(attention, scale):
    """Packed attention as the left factor of the product: `[batch, seq, 4, P, 1]`."""
    packed, scale = (jnp.swapaxes(x, 1, 2) for x in (attention[:, 0], scale))
    values = [decode(element(packed, E4M3FN, q), E4M3FN) for q in range(4)]
    repeated = jnp.repeat(scale, ROWS, axis=2)[:, :, None]
    return scaled(jnp.stack(values, axis=2), repeated)[..., None]
