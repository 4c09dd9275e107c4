"""What the norm/reduce leaf computes, straight from the equations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.feature import wide
from neuronjax.kernels.reduce.options import Options, lined, unlined


def reduce_plain(x, scale, bias, *, name: str, **config: Any) -> tuple[jax.Array, ...]:
    """What `reduce_fwd` returns."""
    opts = Options.of(config)
    if opts.op == "norm":
        rows = lined(x, opts.axis)
        stats = _statistics(rows, opts)
        y = _apply(rows, scale, bias, stats, opts)
        return unlined(y, x, opts.axis).astype(x.dtype), *stats
    stats = () if opts.norm is None else (_root(wide(x), opts.axis, opts),)
    y = _reduced(x, stats, opts)
    return _scaled(y, scale, opts).astype(x.dtype), y, *stats


def reduce_plain_bwd(
    x, scale, bias, *both, name: str, **config: Any
) -> tuple[jax.Array, ...]:
    """What `reduce_bwd` returns: each step is pulled back in turn."""
    opts, half = Options.of(config), len(both) // 2
    outs = both[:half]
    cotangents = tuple(
        jnp.zeros_like(out) if c is None else c
        for out, c in zip(outs, both[half:], strict=True)
    )
    pull = _pull_norm if opts.op == "norm" else _pull_operation
    grads = pull(x, scale, bias, outs, cotangents, opts)
    return tuple(grad for grad in grads if grad is not None)


def _root(x: jax.Array, axes: tuple[int, ...], opts: Options) -> jax.Array:
    square = jnp.sum(x**2, axis=axes, keepdims=True) / _count(x, axes, opts)
    return 1 / jnp.sqrt(square + opts.eps)


def _count(x: jax.Array, axes: tuple[int, ...], opts: Options) -> int:
    size = 1
    for axis in axes:
        size *= x.shape[axis]
    return opts.divisor or size


def _statistics(rows: jax.Array, opts: Options) -> tuple[jax.Array, ...]:
    x, mean = wide(rows), ()
    if opts.norm == "layer":
        mean = (jnp.mean(x, axis=-1, keepdims=True),)
        x = x - mean[0]
    return *mean, _root(x, (-1,), opts)


def _apply(rows, scale, bias, stats, opts: Options) -> jax.Array:
    layer = opts.norm == "layer"
    y = (wide(rows) - stats[0] if layer else wide(rows)) * stats[-1]
    if opts.cast_before_scale and not layer and y.dtype != rows.dtype:
        info = jnp.finfo(rows.dtype)
        y = jax.lax.reduce_precision(y, info.nexp, info.nmant)
    if scale is not None:
        offset = 0.0 if layer else opts.offset
        y = y * (scale.astype(y.dtype).reshape(-1) + offset)
    return y if bias is None else y + bias.astype(y.dtype).reshape(-1)


def _pull_norm(x, scale, bias, outs, cotangents, opts: Options) -> tuple:
    stats, (dy, *d_stats) = outs[1:], cotangents
    rows, dy = lined(x, opts.axis), lined(dy, opts.axis)
    y, pull = jax.vjp(functools.partial(_apply, opts=opts), rows, scale, bias, stats)
    dx, dscale, dbias, d_applied = pull(dy.astype(y.dtype))
    *d_mean, d_rstd = (a + b for a, b in zip(d_applied, d_stats, strict=True))
    dx, rstd = wide(dx), stats[-1]
    centred = wide(rows) - stats[0] if d_mean else wide(rows)
    # rstd = square**-0.5, square = sum(centred**2) / count.
    d_square = -0.5 * rstd**3 * d_rstd
    d_centred = d_square * 2 * centred / _count(rows, (-1,), opts)
    dx = dx + d_centred
    if d_mean:
        shift = d_mean[0] - jnp.sum(d_centred, axis=-1, keepdims=True)
        dx = dx + shift / rows.shape[-1]
    return unlined(dx, x, opts.axis).astype(x.dtype), dscale, dbias


def _reduced(x: jax.Array, stats: tuple, opts: Options) -> jax.Array:
    z, over = wide(x), dict(axis=opts.axis, keepdims=True)
    z = z * stats[0] if stats else z
    return {
        "add": jnp.sum,
        "max": jnp.max,
        "min": jnp.min,
        "mul": jnp.prod,
        "absmax": lambda z, **over: jnp.max(jnp.abs(z), **over),
        "sumsq": lambda z, **over: jnp.sum(z**2, **over),
    }[opts.op](z, **over)


def _scaled(y: jax.Array, scale: jax.Array | None, opts: Options) -> jax.Array:
    y = y if opts.keepdims else jnp.squeeze(y, opts.axis)
    return y if scale is None else y * scale.astype(y.dtype)


def _pull_operation(x, scale, bias, outs, cotangents, opts: Options) -> tuple:
    _, y, *stats = outs
    d_out, d_y, *d_stats = cotangents
    _, pull = jax.vjp(functools.partial(_scaled, opts=opts), y, scale)
    d_scaled, dscale = pull(d_out.astype(y.dtype))
    over = functools.partial(_reduced, opts=opts)
    dx, d_applied = jax.vjp(over, x, tuple(stats))[1](d_scaled + d_y)
    if stats:
        d_square = -0.5 * stats[0] ** 3 * (d_applied[0] + d_stats[0])
        dx = wide(dx) + d_square * 2 * wide(x) / _count(x, opts.axis, opts)
    return dx.astype(x.dtype), dscale, None
