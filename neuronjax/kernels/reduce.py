"""The norm/reduce leaf: what `NeuronReduceMacro` and its backward run.

`op="norm"` normalises the last axis; its statistics are outputs because the backward
reads them. Root-mean-square norms give `(y, rstd)`, layer norm `(y, mean, rstd)`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.feature import wide
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
) -> tuple[jax.Array, ...]:
    """The cotangents of those of `(x, scale, bias)` that are given.

    Those of the statistics count too.
    """
    outs, (dy, *d_stats) = _halves(outs_and_cotangents)
    dy = jnp.zeros_like(outs[0]) if dy is None else dy
    if norm == "layer":
        d_mean, d_rstd = d_stats
        stats = dict(d_mean=d_mean, d_rstd=d_rstd)
        grads = layer_norm_bwd(dy, x, scale, bias, *outs[1:], **stats)
    else:
        grads = rms_norm_bwd(
            dy,
            x,
            scale if norm == "rms" else None,
            outs[1],
            d_rstd=d_stats[0],
            offset=offset,
            cast_before_scale=cast_before_scale,
            hidden_actual=hidden_actual,
        )
    return tuple(grad for grad in grads if grad is not None)


def _halves(both: tuple) -> tuple[tuple, tuple]:
    half = len(both) // 2
    return both[:half], both[half:]


def reduce_plain(x, scale, bias, *, name: str, **config) -> tuple[jax.Array, ...]:
    """What `reduce_fwd` returns, from the equations."""
    stats = _plain_statistics(x, config)
    return _plain_apply(x, scale, bias, stats, config).astype(x.dtype), *stats


def _plain_count(x: jax.Array, config) -> int:
    return config.get("hidden_actual") or x.shape[-1]


def _plain_statistics(x: jax.Array, config) -> tuple[jax.Array, ...]:
    x, mean = wide(x), ()
    if config["norm"] == "layer":
        mean = (jnp.mean(x, axis=-1, keepdims=True),)
        x = x - mean[0]
    square = jnp.sum(x**2, axis=-1, keepdims=True) / _plain_count(x, config)
    return *mean, 1 / jnp.sqrt(square + config["eps"])


def _plain_apply(x, scale, bias, stats, config) -> jax.Array:
    layer = config["norm"] == "layer"
    y = (wide(x) - stats[0] if layer else wide(x)) * stats[-1]
    if config.get("cast_before_scale") and not layer and y.dtype != x.dtype:
        info = jnp.finfo(x.dtype)
        y = jax.lax.reduce_precision(y, info.nexp, info.nmant)
    if scale is not None:
        offset = 0.0 if layer else config.get("offset", 0.0)
        y = y * (scale.astype(y.dtype).reshape(-1) + offset)
    return y if bias is None else y + bias.astype(y.dtype).reshape(-1)


def reduce_plain_bwd(x, scale, bias, *both, name: str, **config):
    """What `reduce_bwd` returns: each step of the norm pulled back in turn."""
    outs, cotangents = _halves(both)
    stats = outs[1:]
    dy, *d_stats = (
        jnp.zeros_like(out) if c is None else c
        for out, c in zip(outs, cotangents, strict=True)
    )
    y, pull = jax.vjp(
        functools.partial(_plain_apply, config=config), x, scale, bias, stats
    )
    dx, dscale, dbias, d_applied = pull(dy.astype(y.dtype))
    *d_mean, d_rstd = (a + b for a, b in zip(d_applied, d_stats, strict=True))
    dx, rstd = wide(dx), stats[-1]
    centred = wide(x) - stats[0] if d_mean else wide(x)
    # rstd = square**-0.5, square = sum(centred**2) / count.
    d_square = -0.5 * rstd**3 * d_rstd
    d_centred = d_square * 2 * centred / _plain_count(x, config)
    dx = dx + d_centred
    if d_mean:
        shift = d_mean[0] - jnp.sum(d_centred, axis=-1, keepdims=True)
        dx = dx + shift / x.shape[-1]
    grads = dx.astype(x.dtype), dscale, dbias
    return tuple(grad for grad in grads if grad is not None)
