"""Norms of a line of elements: root-mean-square, by the sum of squares, and layer norm.

Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4; Ba, Kiros and
Hinton 2016, https://arxiv.org/abs/1607.06450, equation 4. The line is the normalised
axes as one last axis; the statistics are `[*others, 1]`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.feature import wide
from neuronjax.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from neuronjax.kernels.reduce.options import Options, lined, unlined
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd

Rows = Float[Array, "..."]
Gain = Float[Array, "..."]


def norm_fwd(
    x: Rows, scale: Gain | None, bias: Gain | None, opts: Options
) -> tuple[Array, ...]:
    """Returns `(y, rstd)`, for layer norm `(y, mean, rstd)`."""
    rows = lined(x, opts.axis)
    gain, offset = _line(scale, rows), _line(bias, rows)
    if opts.norm == "layer":
        outs = layer_norm_fwd(rows, gain, offset, eps=opts.eps)
    else:
        outs = rms_norm_fwd(
            rows,
            gain,
            eps=opts.eps,
            offset=opts.offset,
            cast_before_scale=opts.cast_before_scale,
            hidden_actual=opts.divisor,
        )
    return unlined(outs[0], x, opts.axis), *outs[1:]


def norm_bwd(
    x: Rows,
    scale: Gain | None,
    bias: Gain | None,
    outs: tuple,
    cotangents: tuple,
    opts: Options,
) -> tuple[Array | None, ...]:
    """Returns the cotangents of `(x, scale, bias)`; those of the statistics count."""
    dy, *d_stats = cotangents
    dy = jnp.zeros_like(outs[0]) if dy is None else dy
    rows, dy = lined(x, opts.axis), lined(dy, opts.axis)
    gain, offset = _line(scale, rows), _line(bias, rows)
    if opts.norm == "layer":
        stats = dict(d_mean=d_stats[0], d_rstd=d_stats[1])
        grads = layer_norm_bwd(dy, rows, gain, offset, *outs[1:], **stats)
    else:
        found = rms_norm_bwd(
            dy,
            rows,
            gain,
            outs[1],
            d_rstd=d_stats[0],
            offset=opts.offset,
            cast_before_scale=opts.cast_before_scale,
            hidden_actual=opts.divisor,
        )
        grads = (*found, None)
    dx, d_scale, d_bias = grads
    d_scale, d_bias = _shaped(d_scale, scale), _shaped(d_bias, bias)
    return unlined(dx, x, opts.axis), d_scale, d_bias


def _line(gain: jax.Array | None, rows: jax.Array) -> jax.Array | None:
    """A gain as one value for each element of the line."""
    if gain is None or gain.ndim == 1:
        return gain
    if gain.ndim == 0:
        return jnp.broadcast_to(wide(gain), rows.shape[-1:])
    return gain.reshape(-1)


def _shaped(d_line: jax.Array | None, gain: jax.Array | None) -> jax.Array | None:
    """The cotangent of `_line`, which is the line's, for the gain that it came from."""
    if d_line is None or gain is None:
        return None
    if gain.ndim == 0:
        return d_line.sum().astype(gain.dtype)
    return d_line.reshape(gain.shape)
