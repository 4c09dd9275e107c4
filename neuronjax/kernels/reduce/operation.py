"""Reductions of any axes, of `x` or of `x` divided by its root of squares.

    z = x, or x / sqrt(sum(x**2) / count + eps)
    y = op(z) over the axes
    out = y * scale

`op` is the sum, the maximum, the minimum, the product, the largest magnitude or the sum
of squares. The arithmetic is float32, or float64.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from neuronjax.kernels.feature import wide
from neuronjax.kernels.reduce.options import Options, lined, unlined
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from neuronjax.kernels.shard_common import laid_like

Values = Float[Array, "..."]

OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "mul": jnp.prod,
    "absmax": lambda z, **axes: jnp.max(jnp.abs(z), **axes),
    "sumsq": lambda z, **axes: jnp.sum(z * z, **axes),
}


def operation_fwd(x: Values, scale: Values | None, opts: Options) -> tuple[Values, ...]:
    """Returns `(out, y)`, with a norm `(out, y, rstd)`.

    `out` has the dtype of `x`; `y` and `rstd` are wide, with axes of size 1.
    """
    z, stats = wide(x), ()
    if opts.norm is not None:
        z, rstd = rms_norm_fwd(
            z, None, eps=opts.eps, axes=opts.axis, hidden_actual=opts.divisor
        )
        stats = (rstd,)
    y = OPERATIONS[opts.op](z, axis=opts.axis, keepdims=True)
    result = _result(y, opts)
    out = result if scale is None else result * scale.astype(y.dtype)
    return out.astype(x.dtype), y, *stats


def operation_bwd(
    x: Values,
    scale: Values | None,
    outs: tuple,
    cotangents: tuple,
    opts: Options,
) -> tuple[Array, Array | None]:
    """Returns the cotangents of `(x, scale)`; those of `y` and `rstd` count.

    It reads the stored `y` (of extremes, and for the gain) and `rstd`.
    """
    _, y, *stats = outs
    d_out, d_y, *d_stats = cotangents
    d_result = jnp.zeros_like(_result(y, opts))
    d_scale = None if scale is None else jnp.zeros_like(scale)
    if d_out is not None:
        d_result = d_out.astype(y.dtype)
        if scale is not None:
            d_scale = _summed(d_result * _result(y, opts), scale)
            d_result = d_result * scale.astype(y.dtype)
    total = d_result if opts.keepdims else jnp.expand_dims(d_result, opts.axis)
    total = total if d_y is None else total + d_y
    z = wide(x) * stats[0] if stats else wide(x)
    dx = _pulled(total, z, y, opts)
    if stats:
        more = dict(axes=opts.axis, hidden_actual=opts.divisor)
        dx, _ = rms_norm_bwd(dx, wide(x), None, *stats, d_rstd=d_stats[0], **more)
    return dx.astype(x.dtype), d_scale


def _result(y: jax.Array, opts: Options) -> jax.Array:
    return y if opts.keepdims else jnp.squeeze(y, opts.axis)


def _summed(d: jax.Array, scale: jax.Array) -> jax.Array:
    """The cotangent of a broadcast `scale`: summed where it was repeated."""
    more = d.ndim - scale.ndim
    ones = [more + i for i, size in enumerate(scale.shape) if size == 1]
    total = d.sum([*range(more), *ones])
    return total.reshape(scale.shape).astype(scale.dtype)


def _pulled(d_y: jax.Array, z: jax.Array, y: jax.Array, opts: Options) -> jax.Array:
    """The cotangent of `z`, given that of `y = op(z)`."""
    if opts.op == "add":
        return jnp.zeros_like(z) + d_y
    if opts.op == "sumsq":
        return 2 * z * d_y
    if opts.op == "mul":
        return d_y * _others(z, opts.axis)
    size = jnp.abs(z) if opts.op == "absmax" else z
    here = size == y
    # Equal extremes share alike; a NaN equals none, and is passed on.
    count = jnp.sum(here, axis=opts.axis, keepdims=True, dtype=z.dtype)
    share = jnp.where(here, 1 / jnp.maximum(count, 1), 0)
    share = jnp.where(jnp.isnan(y), jnp.nan, share)
    if opts.op == "absmax":
        # As in `jax.numpy.abs`, whose derivative at 0 is 1.
        share = jnp.where(z >= 0, share, -share)
    return d_y * share


def _others(z: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The product of all other elements: from both ends, so that zeros are right."""
    rows = _whole(lined(z, axes))
    last, one = rows.ndim - 1, jnp.ones((), z.dtype)
    rest = [(0, 0, 0)] * last
    # Moved by one place: the product before each element, and that behind it.
    left = lax.pad(lax.cumprod(rows, last), one, [*rest, (1, -1, 0)])
    right = lax.cumprod(rows, last, reverse=True)
    right = lax.pad(right, one, [*rest, (-1, 1, 0)])
    return laid_like(unlined(left * right, z, axes), z)


def _whole(rows: jax.Array) -> jax.Array:
    """Lines that no explicit mesh divides: a running product needs all before it."""
    spec = jax.typeof(rows).sharding.spec
    if not spec or spec[-1] is None:
        return rows
    return jax.sharding.reshard(rows, PartitionSpec(*spec[:-1], None))
