"""The two projections of the block: to query, key and value heads, and back."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels import output_projection as plain_weight
from neuronjax.kernels import output_projection_quantized as quantized_weight
from neuronjax.kernels.attention_block_tkg import ranks
from neuronjax.kernels.attention_block_tkg.operands import Operands
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.qkv import projection as qkv
from neuronjax.kernels.qkv.quantized import PRODUCTS
from neuronjax.kernels.quantization.fp8 import is_fp8


def columns_fwd(o: Operands, c: Any) -> tuple[Array, tuple[Array, ...]]:
    """The projected columns `[batch, seq, columns]`, wide, and the norm's `rstd`."""
    y, _, statistics = qkv.columns_fwd(
        qkv.WHOLE, _qkv_operands(o), _qkv_config(o, c), _product(o, c)
    )
    return y, tuple(statistics)


def columns_again(o: Operands, rstd: Array | None, c: Any) -> Array:
    """The same from the stored statistic."""
    normed = o.x.astype(_wide(o))
    if rstd is not None:
        normed = normed * rstd
        normed = normed if o.x_gain is None else normed * o.x_gain[0].astype(_wide(o))
    y = _product(o, c).forward(qkv.WHOLE, normed, o.w_qkv)
    return y if o.bias_qkv is None else y + o.bias_qkv[0].astype(y.dtype)


def columns_bwd(
    d_columns: Array, o: Operands, rstd: Array | None, d_rstd: Array | None, c: Any
) -> dict[str, Array | None]:
    """The cotangents of the operands of `columns_fwd`, by name."""
    stored = ((), ()) if rstd is None else ((rstd,), (d_rstd,))
    grads = qkv.columns_bwd(
        *(qkv.WHOLE, _qkv_operands(o), stored, d_columns.astype(_wide(o))),
        *(_qkv_config(o, c), _product(o, c)),
    )
    dx, dw, dgain, _, dbias, *_ = grads
    return dict(x=dx, w_qkv=dw, x_gain=dgain, bias_qkv=dbias)


def projected(attention: Array, o: Operands, c: Any) -> Array:
    """`x_out` from heads `[batch, num_heads, head_dim, seq]`."""
    if o.w_out is None:
        return _arranged(attention) if c.out_in_sb else attention
    config = _out_config(o, c)
    operands = (attention.transpose(2, 0, 1, 3), o.w_out, o.bias_out)
    if c.quantization_out == "NONE":
        return plain_weight.output_projection_fwd(*operands, **config)[0]
    scales = o.out_scale, o.out_in_scale
    fwd = quantized_weight.quantized_output_projection_fwd
    return fwd(*operands, *scales, **config)[0]


def projected_bwd(
    d_out: Array, attention: Array, o: Operands, c: Any
) -> tuple[Array, dict[str, Array | None]]:
    """The cotangents of the heads, and by name those of weight and bias."""
    batch, heads, width, seq = attention.shape
    if o.w_out is None:
        if not c.out_in_sb:
            return d_out, {}
        return d_out.reshape(width, batch, heads, seq).transpose(1, 2, 0, 3), {}
    config = _out_config(o, c)
    operands = (attention.transpose(2, 0, 1, 3), o.w_out, o.bias_out)
    if c.quantization_out == "NONE":
        bwd = plain_weight.output_projection_bwd
        found, dw, dbias = bwd(*operands, d_out, **config)
    else:
        bwd = quantized_weight.quantized_output_projection_bwd
        found, dbias = bwd(*operands, o.out_scale, o.out_in_scale, d_out, **config)
        dw = None
    d_heads = ranks.all_columns_bwd(found.transpose(1, 2, 0, 3), c)
    return d_heads, dict(w_out=dw, bias_out=dbias)


def _wide(o: Operands) -> jnp.dtype:
    return accumulator(qkv.factor_dtype(o.x, o.w_qkv))


def _qkv_operands(o: Operands) -> tuple:
    return o.x, o.w_qkv, o.x_gain, None, o.bias_qkv, None, None, None, None


def _qkv_config(o: Operands, c: Any) -> dict[str, Any]:
    return dict(
        norm="none" if c.x_eps is None else "rms",
        eps=c.x_eps,
        hidden_actual=c.hidden_actual,
        fused_add="none",
        fused_rope=False,
        d_head=o.head_dim,
        num_q_heads=o.num_heads,
        num_kv_heads=1,
        is_fp8_kernel=is_fp8(o.w_qkv.dtype),
    )


def _product(o: Operands, c: Any) -> qkv.Product:
    scales = (o.qkv_scale, o.qkv_in_scale)
    dtype = qkv.factor_dtype(o.x, o.w_qkv)
    return PRODUCTS[c.quantization](qkv.WHOLE, dtype, scales, _qkv_config(o, c))


def _out_config(o: Operands, c: Any) -> dict[str, Any]:
    config: dict[str, Any] = dict(
        name="OutputProjection",
        form="DBNS",
        transpose_out=c.transposed_out,
        cores=c.cores,
        out_dtype=None,
        is_tiled=False,
    )
    if c.quantization_out != "NONE":
        config |= dict(quantization=c.quantization_out)
        config |= dict(is_fp8_kernel=is_fp8(o.w_out.dtype))
    return config


def _arranged(attention: Array) -> Array:
    """`[head_dim, batch*num_heads*seq]`."""
    first = attention.transpose(2, 0, 1, 3)
    return lax.collapse(lax.collapse(first, 1, 3), 1, 3)
