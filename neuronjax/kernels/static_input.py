"""The activations of a STATIC product: divided by one scale, clipped, rounded to fp8.

The derivative is the straight-through one: the rounding passes it unchanged, and beyond
the clip it is zero. The scale is a constant.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator

# Where the chip clips: its own fp8 ends at 240, that of the block formats at 448.
STATIC_LIMIT, STATIC_MX_LIMIT = 240.0, 448.0


def static_codes(
    x: Float[Array, "..."],
    scale: Float[Array, ""],
    *,
    limit: float,
    dtype: DTypeLike | None,
) -> Float[Array, "..."]:
    """Returns `clip(x / scale, -limit, limit)`, rounded to `dtype` unless that is None.

    The result is held in at least float32. An infinity saturates, a NaN stays NaN.
    """
    z = _divided(x, scale)
    bound = jnp.asarray(limit, z.dtype)
    z = lax.clamp(-bound, z, bound)
    return z if dtype is None else _rounded(z, jnp.dtype(dtype))


def static_codes_bwd(
    d_codes: Float[Array, "..."],
    x: Float[Array, "..."],
    scale: Float[Array, ""],
    *,
    limit: float,
) -> Float[Array, "..."]:
    """Returns the cotangent of `x`: `d_codes / scale` where nothing was clipped."""
    inside = jnp.abs(_divided(x, scale)) < limit
    return jnp.where(inside, d_codes / scale.astype(d_codes.dtype), 0)


def _divided(x, scale):
    wide = x.astype(accumulator(x.dtype))
    return wide / lax.stop_gradient(scale).astype(wide.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x, dtype):
    return x.astype(dtype).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return _rounded(*primals, dtype), *tangents
