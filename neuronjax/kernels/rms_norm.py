"""Root-mean-square normalisation of an array's features, forwards and backwards.

Zhang and Sennrich 2019, Root Mean Square Layer Normalization, equation 4,
https://arxiv.org/abs/1910.07467.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.feature import LAST, per_feature, sum_rows, wide

Activation = Float[Array, "*batch d_model"]
Statistic = Float[Array, "..."]
Gain = Float[Array, "..."]


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds to `dtype` in place. XLA may drop a cast there and back, never this."""
    info = jnp.finfo(dtype)
    if x.dtype == dtype:
        return x
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def rms_norm_fwd(
    x: Activation,
    scale: Gain | None,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
    axes: tuple[int, ...] = LAST,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Activation, Statistic]:
    """Returns `y = x * rstd * (scale + offset)` and `rstd`.

    `rstd = (mean(x**2) + eps) ** -0.5`. The arithmetic is float32 whatever the inputs
    are: a running bfloat16 sum of 4096 squares comes out half too small. `y` has the
    dtype of `x`; `rstd` stays float32. `hidden_actual` is the count behind the mean
    where the rest of a row is zero padding.
    `cast_before_scale` rounds `x * rstd` to the dtype of `x` before the gain.
    """
    x32 = wide(x)
    count = hidden_actual or math.prod(x.shape[axis] for axis in axes)
    mean_square = jnp.sum(x32 * x32, axis=axes, keepdims=True) * (1.0 / count)
    rstd = lax.rsqrt(mean_square + eps)
    y = x32 * rstd
    if cast_before_scale:
        y = _round(y, x.dtype)
    if scale is not None:
        y = y * (per_feature(scale, x, axes).astype(y.dtype) + offset)
    return y.astype(out_dtype or x.dtype), rstd


def rms_norm_bwd(
    dy: Activation,
    x: Activation,
    scale: Gain | None,
    rstd: Statistic,
    *,
    d_rstd: Statistic | None = None,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
    axes: tuple[int, ...] = LAST,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Activation, Gain | None]:
    """Returns the cotangents `(dx, dscale)` of `rms_norm_fwd`.

    `d_rstd` is the cotangent of `rstd` itself. A rounding before the gain passes `dy`
    through unchanged.
    """
    x32, dy32 = wide(x), dy.astype(rstd.dtype)
    count = hidden_actual or math.prod(x.shape[axis] for axis in axes)
    x_hat, dx_hat, dscale = x32 * rstd, dy32, None
    if scale is not None:
        dx_hat = dy32 * (per_feature(scale, x, axes).astype(rstd.dtype) + offset)
        scaled = _round(x_hat, x.dtype) if cast_before_scale else x_hat
        dscale = sum_rows(dy32 * scaled, scale, axes)
    # rstd depends on x too: d rstd / dx = -rstd**3 * x / count.
    along = jnp.sum(dx_hat * x32, axis=axes, keepdims=True)
    along = along if d_rstd is None else along + d_rstd
    dx = rstd * (dx_hat - x_hat * (along * rstd * (1.0 / count)))
    return dx.astype(out_dtype or x.dtype), dscale
