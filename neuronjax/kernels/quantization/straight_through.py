"""fp8 codes of activations, held wide, with the straight-through derivative.

A rounding passes a tangent on unchanged; a clip passes none from outside. Scales are
constants. Bengio et al. 2013, section 4, https://arxiv.org/abs/1308.3432.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.own_derivative import own_derivative
from neuronjax.kernels.quantization.fp8 import (
    E4M3,
    E4M3FN,
    largest,
    row_scales,
    saturate,
)

# Where the chip clips: its own fp8 ends at 240, that of the block formats at 448.
STATIC_LIMIT, STATIC_MX_LIMIT = largest(E4M3), largest(E4M3FN)


def requantize_rows(
    x: Float[Array, "..."],
    *,
    bound: float = 0.0,
    axis: int | tuple[int, ...] = -1,
    dtype: DTypeLike = E4M3,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns codes in at least float32 and the scale of each row of `axis`.

    With a positive `bound` magnitudes are clipped to it first, which the derivative
    sees; that the codes end at the type's largest value, it does not. An infinity
    counts as the largest finite value: an overflow stays visible in what it gives.
    """
    wide = x.astype(accumulator(x.dtype))
    wide = _clip(wide, bound if bound > 0 else float(jnp.finfo(wide.dtype).max))
    limit = largest(dtype)
    scale = lax.stop_gradient(row_scales(wide, limit=limit, axis=axis))
    return _rounded(wide / scale, dtype=jnp.dtype(dtype)), scale


def static_codes(
    x: Float[Array, "..."],
    scale: Float[Array, ""],
    *,
    limit: float = STATIC_LIMIT,
    dtype: DTypeLike | None = E4M3,
) -> Float[Array, "..."]:
    """Returns `clip(x / scale, -limit, limit)`, rounded to `dtype` unless that is None.

    The result is held in at least float32. An infinity saturates, a NaN stays NaN.
    """
    codes = _clip(_divided(x, scale), limit)
    return codes if dtype is None else _rounded(codes, dtype=jnp.dtype(dtype))


def static_codes_bwd(
    d_codes: Float[Array, "..."],
    x: Float[Array, "..."],
    scale: Float[Array, ""],
    *,
    limit: float = STATIC_LIMIT,
) -> Float[Array, "..."]:
    """Returns the cotangent of `x`: `d_codes / scale` where nothing was clipped."""
    inside = jnp.abs(_divided(x, scale)) < limit
    return jnp.where(inside, d_codes / scale.astype(d_codes.dtype), 0)


def _divided(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(accumulator(x.dtype))
    return wide / lax.stop_gradient(scale).astype(wide.dtype)


def _clip(x: jax.Array, limit: float) -> jax.Array:
    edge = jnp.asarray(limit, x.dtype)
    return lax.clamp(-edge, x, edge)


@own_derivative(lambda x, dx, dtype: dx[0])
def _rounded(x, *, dtype):
    return saturate(x, dtype).astype(x.dtype)
