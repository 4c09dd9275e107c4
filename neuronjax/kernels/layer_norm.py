"""Layer normalisation of an array's features, forwards and backwards.

Ba, Kiros and Hinton 2016, Layer Normalization, equation 4, with the population
variance, https://arxiv.org/abs/1607.06450.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.feature import LAST, per_feature, sum_rows, wide

Activation = Float[Array, "*batch d_model"]
Statistic = Float[Array, "..."]
Gain = Float[Array, "..."]


def layer_norm_fwd(
    x: Activation,
    scale: Gain | None,
    bias: Gain | None,
    *,
    eps: float,
    axes: tuple[int, ...] = LAST,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Activation, Statistic, Statistic]:
    """Returns `y = (x - mean) * rstd * scale + bias`, `mean` and `rstd`.

    `rstd = (var + eps) ** -0.5`. The arithmetic is float32 whatever the inputs are, and
    the variance is taken of the centred row: `mean(x**2) - mean**2` cancels where the
    mean is large. `y` has the dtype of `x`; the statistics stay float32.
    """
    x32 = wide(x)
    mean = jnp.mean(x32, axis=axes, keepdims=True)
    centred = x32 - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = centred * rstd
    if scale is not None:
        y = y * per_feature(scale, x, axes).astype(y.dtype)
    if bias is not None:
        y = y + per_feature(bias, x, axes).astype(y.dtype)
    return y.astype(out_dtype or x.dtype), mean, rstd


def layer_norm_bwd(
    dy: Activation,
    x: Activation,
    scale: Gain | None,
    bias: Gain | None,
    mean: Statistic,
    rstd: Statistic,
    *,
    d_mean: Statistic | None = None,
    d_rstd: Statistic | None = None,
    axes: tuple[int, ...] = LAST,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Activation, Gain | None, Gain | None]:
    """Returns the cotangents `(dx, dscale, dbias)` of `layer_norm_fwd`.

    `d_mean` and `d_rstd` are the cotangents of the statistics themselves.
    """
    centred, dy32 = wide(x) - mean, dy.astype(rstd.dtype)
    inverse = 1.0 / math.prod(x.shape[axis] for axis in axes)
    x_hat, dx_hat, dscale = centred * rstd, dy32, None
    if scale is not None:
        dx_hat = dy32 * per_feature(scale, x, axes).astype(rstd.dtype)
        dscale = sum_rows(dy32 * x_hat, scale, axes)
    dbias = None if bias is None else sum_rows(dy32, bias, axes)
    # rstd depends on the centred row: d rstd / d centred = -rstd**3 * centred / count.
    along = jnp.sum(dx_hat * centred, axis=axes, keepdims=True)
    along = along if d_rstd is None else along + d_rstd
    d_centred = rstd * (dx_hat - x_hat * (along * rstd * inverse))
    d_shift = -jnp.sum(d_centred, axis=axes, keepdims=True)
    d_shift = d_shift if d_mean is None else d_shift + d_mean
    dx = d_centred + d_shift * inverse
    return dx.astype(out_dtype or x.dtype), dscale, dbias
