"""The norm/reduce leaf: what `NeuronReduceMacro` and its backward run.

`op="norm"` normalises the last axis; its statistics are outputs because the backward
reads them. Root-mean-square norms give `(y, rstd)`, layer norm `(y, mean, rstd)`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.feature import per_feature, wide
from neuronjax.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd

Rows = Float[Array, "*batch d_model"]
Gain = Float[Array, "..."]


def reduce_fwd(
    x: Rows,
    scale: Gain | None,
    bias: Gain | None,
    *,
    name: str,
    op: str = "norm",
    norm: str = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
) -> tuple[jax.Array, ...]:
    """The norm of each row and its statistics."""
    if norm == "layer":
        return layer_norm_fwd(x, scale, bias, eps=eps)
    return rms_norm_fwd(
        x,
        scale if norm == "rms" else None,
        eps=eps,
        offset=offset,
        cast_before_scale=cast_before_scale,
        hidden_actual=hidden_actual,
    )


def reduce_bwd(
    x: Rows,
    scale: Gain | None,
    bias: Gain | None,
    *outs_and_cotangents: Float[Array, "..."] | None,
    name: str,
    op: str = "norm",
    norm: str = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of `(x, scale, bias)`; those of the statistics count too."""
    half = len(outs_and_cotangents) // 2
    outs, (dy, *d_stats) = outs_and_cotangents[:half], outs_and_cotangents[half:]
    if dy is None:
        dy = jnp.zeros_like(outs[0])
    if norm == "layer":
        _, mean, rstd = outs
        d_mean, d_rstd = d_stats
        return layer_norm_bwd(
            dy, x, scale, bias, mean, rstd, d_mean=d_mean, d_rstd=d_rstd
        )
    dx, dscale = rms_norm_bwd(
        dy,
        x,
        scale if norm == "rms" else None,
        outs[1],
        d_rstd=d_stats[0],
        offset=offset,
        cast_before_scale=cast_before_scale,
        hidden_actual=hidden_actual,
    )
    return dx, dscale, None


def reduce_plain(
    x: Rows,
    scale: Gain | None,
    bias: Gain | None,
    *,
    name: str,
    op: str = "norm",
    norm: str = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
) -> tuple[jax.Array, ...]:
    """The same from the equations, for `neuronjax.plain()`."""
    x32 = wide(x)
    statistics = ()
    if norm == "layer":
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        statistics, x32 = (mean,), x32 - mean
    size = hidden_actual if norm != "layer" and hidden_actual else x.shape[-1]
    rstd = 1 / jnp.sqrt(jnp.sum(x32**2, axis=-1, keepdims=True) / size + eps)
    y = x32 * rstd
    if cast_before_scale and norm != "layer" and y.dtype != x.dtype:
        info = jnp.finfo(x.dtype)
        y = jax.lax.reduce_precision(y, info.nexp, info.nmant)
    if scale is not None and norm != "rms_skip_gamma":
        gain = per_feature(scale, x, (-1,)).astype(y.dtype)
        y = y * (gain if norm == "layer" else gain + offset)
    if bias is not None and norm == "layer":
        y = y + per_feature(bias, x, (-1,)).astype(y.dtype)
    return (y.astype(x.dtype), *statistics, rstd)
