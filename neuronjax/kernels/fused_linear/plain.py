"""What the leaf of `FusedLinear` computes, straight from the equations."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.fused_linear.leaf import stored_dtype
from neuronjax.kernels.fused_linear.operands import Operands, Options
from neuronjax.kernels.quantization.fp8 import is_fp8

_ACTIVATIONS = {
    "SiLU": lambda z: z * jax.nn.sigmoid(z),
    "Swish": lambda z: z * jax.nn.sigmoid(1.702 * z),
    "GELU": lambda z: z * (1 + erf(z / 2**0.5)) / 2,
    "GELU_Tanh_Approx": lambda z: jax.nn.gelu(z, approximate=True),
}


def fused_linear_plain(*operands, name: str, **config: Any) -> tuple[jax.Array, ...]:
    """What `fused_linear_fwd` returns."""
    ops, opts = Operands(*operands), Options.of(config)
    stats = _statistics(_wide(ops), opts)
    z = _pre_activation(ops, stats)
    kept = (z.astype(stored_dtype(ops.x.dtype)),) if opts.returned else ()
    out = z if opts.activation is None else _ACTIVATIONS[opts.activation](z)
    out = out if ops.residual is None else out + ops.residual.astype(out.dtype)
    return (out.astype(ops.x.dtype), *stats, *kept)


def fused_linear_plain_bwd(*args, name: str, **config: Any) -> tuple[jax.Array, ...]:
    """What `fused_linear_bwd` returns: each step is pulled back in turn."""
    opts, count = Options.of(config), len(Operands._fields)
    ops, rest = Operands(*args[:count]), args[count:]
    outs, cotangents = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    d_out, *d_more = (
        jnp.zeros_like(out) if c is None else c
        for out, c in zip(outs, cotangents, strict=True)
    )
    stats, live = outs[1 : 1 + opts.stats], ops.live()
    dz = d_out.astype(accumulator(_factor(ops)))
    if opts.activation is not None:
        z = outs[-1].astype(dz.dtype)
        (dz,) = jax.vjp(_ACTIVATIONS[opts.activation], z)[1](dz)
        dz = dz + d_more[-1].astype(dz.dtype)
    linear = [key for key in live if key != "residual"]

    def apply(moved, stats):
        return _pre_activation(ops._replace(**moved), stats)

    moved = {key: getattr(ops, key) for key in linear}
    grads, d_applied = jax.vjp(apply, moved, stats)[1](dz)
    if stats:
        d_stats = [a + b for a, b in zip(d_applied, d_more, strict=False)]
        more = _pull_statistics(_wide(ops), stats, d_stats)
        grads["x"] = grads["x"] + more.astype(ops.x.dtype)
    if ops.residual is not None:
        grads["residual"] = d_out.astype(ops.residual.dtype)
    return tuple(grads[key] for key in live)


def _factor(ops: Operands) -> jnp.dtype:
    return promoted(ops.x.dtype, ops.x.dtype if is_fp8(ops.w.dtype) else ops.w.dtype)


def _wide(ops: Operands) -> jax.Array:
    return ops.x.astype(accumulator(_factor(ops)))


def _statistics(x: jax.Array, opts: Options) -> tuple:
    """The norm's statistics."""
    if opts.norm == "none":
        return ()
    mean = (jnp.mean(x, -1, keepdims=True),) if opts.norm == "layer" else ()
    square = jnp.mean((x - mean[0] if mean else x) ** 2, -1, keepdims=True)
    return *mean, 1 / jnp.sqrt(square + opts.eps)


def _pull_statistics(x: jax.Array, stats: tuple, d_stats: list) -> jax.Array:
    """The cotangent of `x`, given those of its stored statistics."""
    (*mean, rstd), (*d_mean, d_rstd) = stats, d_stats
    # rstd = square**-0.5, square = mean(centred**2).
    d_square = -0.5 * rstd**3 * d_rstd
    dx = d_square * 2 * (x - mean[0] if mean else x) / x.shape[-1]
    if mean:
        shift = d_mean[0] - jnp.sum(dx, -1, keepdims=True)
        dx = dx + shift / x.shape[-1]
    return dx


def _pre_activation(ops: Operands, stats: tuple) -> jax.Array:
    n = _wide(ops)
    if stats:
        *mean, rstd = stats
        n = (n - mean[0] if mean else n) * rstd
    if ops.gamma is not None:
        n = n * ops.gamma.astype(n.dtype)
    if ops.beta is not None:
        n = n + ops.beta.astype(n.dtype)
    factor, w = _factor(ops), ops.w
    z = n.astype(factor).astype(n.dtype) @ w.astype(factor).astype(n.dtype)
    z = z if ops.w_scale is None else z * ops.w_scale.astype(z.dtype)
    return z if ops.bias is None else z + ops.bias.astype(z.dtype)
