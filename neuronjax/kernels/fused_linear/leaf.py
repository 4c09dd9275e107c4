"""A linear layer with norm, scale, bias, activation and residual in one pass.

    n = norm(x)
    z = (n @ w) * w_scale + bias
    out = act(z) + residual

The order is fixed, each part optional. RMSNorm: Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467, equation 4; LayerNorm: Ba, Kiros and Hinton 2016,
https://arxiv.org/abs/1607.06450, equation 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from neuronjax.kernels.activation import activation, activation_grad
from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.feature import LAST, per_feature, sum_rows
from neuronjax.kernels.fused_linear.operands import Operands, Options
from neuronjax.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.kernels.quantization.linear import scaled_linear_bwd, scaled_linear_fwd
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from neuronjax.kernels.shard_common import contract

Values = Float[Array, "..."]


def fused_linear_fwd(
    x: Float[Array, "*batch d_in"],
    w: Shaped[Array, "d_in d_out"],
    w_scale: Values | None,
    bias: Float[Array, " d_out"] | None,
    residual: Float[Array, "*batch d_out"] | None,
    gamma: Float[Array, " d_in"] | None,
    beta: Float[Array, " d_in"] | None,
    *,
    name: str,
    **config: Any,
) -> tuple[Array, ...]:
    """Returns `out`, the norm's statistics, and with `returned` the pre-activation `z`.

    Everything but the product's factors is float32, or float64; `out` is rounded once,
    to the dtype of `x`. So is `z`, except that a float16 one stays float32: beyond
    65504 the derivative of an activation would be lost.
    """
    ops = Operands(x, w, w_scale, bias, residual, gamma, beta)
    opts = Options.of(config)
    normed, stats = _norm(ops, opts)
    y = _product(normed, ops)
    z = y if w_scale is None else y * w_scale.astype(y.dtype)
    z = z if bias is None else z + per_feature(bias, z, LAST).astype(z.dtype)
    out = z if opts.activation is None else activation(z, opts.activation)
    out = out if residual is None else out + residual.astype(out.dtype)
    kept = (z.astype(stored_dtype(x.dtype)),) if opts.returned else ()
    return (out.astype(x.dtype), *stats, *kept)


def fused_linear_bwd(*args: Any, name: str, **config: Any) -> tuple[Array, ...]:
    """Returns the cotangents of the operands that are given, without an fp8 weight.

    Takes the operands of `fused_linear_fwd`, its outputs and their cotangents. It reads
    the stored statistics and `z`, and never `out`; neither norm nor product are made
    again. The products of rows and cotangents, `g = n^T dz`, give both `dw = g *
    w_scale` and `d w_scale = sum(w * g)`.
    """
    opts = Options.of(config)
    count = len(Operands._fields)
    ops, rest = Operands(*args[:count]), args[count:]
    outs, cotangents = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    acc = accumulator(_factor(ops))
    d_out = jnp.zeros_like(outs[0]) if cotangents[0] is None else cotangents[0]
    dz = _pre_activation_grad(d_out.astype(acc), outs, cotangents, opts)
    grads = _weight_grads(ops, dz, outs, opts)
    if ops.bias is not None:
        grads["bias"] = sum_rows(dz, ops.bias, LAST)
    if ops.residual is not None:
        grads["residual"] = d_out.astype(ops.residual.dtype)
    scale = jnp.ones((), acc) if ops.w_scale is None else ops.w_scale.astype(acc)
    d_normed = _product_bwd(dz, scale, ops)
    stats, d_stats = outs[1 : 1 + opts.stats], cotangents[1 : 1 + opts.stats]
    grads |= _norm_bwd(d_normed, stats, d_stats, ops, opts)
    return tuple(grads[key] for key in ops.live())


def stored_dtype(dtype: Any) -> jnp.dtype:
    """The dtype in which `z` waits for the backward."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def _factor(ops: Operands) -> jnp.dtype:
    """The dtype of the product's factors; an fp8 weight takes that of `x`."""
    if is_fp8(ops.w.dtype):
        return ops.x.dtype
    return promoted(ops.x.dtype, ops.w.dtype)


def _product(normed: jax.Array, ops: Operands) -> jax.Array:
    """The product of `normed`, in wide precision, and the weight, without a scale."""
    dtype = _factor(ops)
    if is_fp8(ops.w.dtype):
        one = jnp.ones((), normed.dtype)
        return scaled_linear_fwd(normed, ops.w, one, dtype=dtype)
    return linear_fwd(normed, ops.w, dtype=dtype)


def _product_bwd(dz: jax.Array, scale: jax.Array, ops: Operands) -> jax.Array:
    """The cotangent of the normed rows: `(dz * scale) @ w^T`."""
    dtype, dz = _factor(ops), dz * scale
    if is_fp8(ops.w.dtype):
        # That function's own scale is a constant; this one has a derivative.
        one = jnp.ones((), dz.dtype)
        return scaled_linear_bwd(dz, ops.w, one, dtype=dtype)
    rows, like = _letters(dz.ndim - 1), ops.x.astype(dtype)
    factors = dz.astype(dtype), ops.w.astype(dtype)
    return contract(f"{rows}y,xy->{rows}x", *factors, like=like)


def _pre_activation_grad(
    d_out: jax.Array, outs: tuple, cotangents: tuple, opts: Options
) -> jax.Array:
    """The cotangent of `z`, through the activation and its own."""
    if opts.activation is None:
        return d_out
    slope = activation_grad(outs[-1].astype(d_out.dtype), opts.activation)[1]
    dz, own = d_out * slope, cotangents[-1]
    return dz if own is None else dz + own.astype(dz.dtype)


def _weight_grads(
    ops: Operands, dz: jax.Array, outs: tuple, opts: Options
) -> dict[str, jax.Array]:
    """The cotangents of the weight and its scale."""
    fp8 = is_fp8(ops.w.dtype)
    if fp8 and ops.w_scale is None:
        return {}
    dtype, rows = _factor(ops), _letters(dz.ndim - 1)
    normed = _norm_again(outs[1 : 1 + opts.stats], ops, opts).astype(dtype)
    dz = dz.astype(dtype)
    if not rows:
        normed, dz, rows = normed[None], dz[None], "A"
    like = ops.w.astype(dtype)
    grad = contract(f"{rows}x,{rows}y->xy", normed, dz, like=like)
    if ops.w_scale is None:
        return {"w": grad.astype(ops.w.dtype)}
    scale = ops.w_scale
    d_scale = jnp.sum(like.astype(grad.dtype) * grad, 0 if scale.ndim else None)
    found = {"w_scale": d_scale.reshape(scale.shape).astype(scale.dtype)}
    if not fp8:
        found["w"] = (grad * scale.astype(grad.dtype)).astype(ops.w.dtype)
    return found


def _norm(ops: Operands, opts: Options) -> tuple[jax.Array, tuple]:
    """The normed rows, wide, and `()`, `(rstd,)` or `(mean, rstd)`."""
    x = ops.x.astype(accumulator(_factor(ops)))
    if opts.norm == "none":
        return x, ()
    if opts.norm == "layer":
        normed, *stats = layer_norm_fwd(x, ops.gamma, ops.beta, eps=opts.eps)
    else:
        normed, *stats = rms_norm_fwd(x, ops.gamma, eps=opts.eps)
    return normed, tuple(stats)


def _norm_again(stats: tuple, ops: Operands, opts: Options) -> jax.Array:
    """The normed rows from the stored statistics."""
    x = ops.x.astype(accumulator(_factor(ops)))
    if not stats:
        return x
    *mean, rstd = stats
    y = (x - mean[0] if mean else x) * rstd
    if ops.gamma is not None:
        y = y * per_feature(ops.gamma, y, LAST).astype(y.dtype)
    if ops.beta is None:
        return y
    return y + per_feature(ops.beta, y, LAST).astype(y.dtype)


def _norm_bwd(
    d_normed: jax.Array, stats: tuple, d_stats: tuple, ops: Operands, opts: Options
) -> dict[str, jax.Array]:
    """The cotangents of `x`, gain and offset; those of the statistics count."""
    x, gamma, beta = ops.x.astype(d_normed.dtype), ops.gamma, ops.beta
    dx, dgamma, dbeta = d_normed, None, None
    if opts.norm == "layer":
        own = dict(d_mean=d_stats[0], d_rstd=d_stats[1])
        dx, dgamma, dbeta = layer_norm_bwd(dx, x, gamma, beta, *stats, **own)
    elif opts.norm != "none":
        dx, dgamma = rms_norm_bwd(dx, x, gamma, *stats, d_rstd=d_stats[0])
    found = dict(x=dx.astype(ops.x.dtype), gamma=dgamma, beta=dbeta)
    return {key: grad for key, grad in found.items() if grad is not None}


def _letters(count: int) -> str:
    """Subscripts of the batch axes; x and y are those of the weight."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvw"[:count]
