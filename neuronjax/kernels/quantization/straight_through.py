"""fp8 codes of activations, held wide, with the straight-through derivative.

A rounding passes a tangent on unchanged; a clip passes none from outside. Scales are
constants. Bengio et al. 2013, section 4, https://arxiv.org/abs/1308.3432.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.quantization.fp8 import E4M3, largest, row_scales, saturate


def requantize_rows(
    x: Float[Array, "..."],
    *,
    bound: float = 0.0,
    axis: int | tuple[int, ...] = -1,
    dtype: DTypeLike = E4M3,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns codes in at least float32 and the scale of each row of `axis`.

    With a positive `bound` magnitudes are clipped to it first, which the derivative
    sees; that the codes end at the type's largest value, it does not.
    """
    wide = x.astype(accumulator(x.dtype))
    wide = _clip(wide, bound) if bound > 0 else wide
    limit = largest(dtype)
    scale = lax.stop_gradient(row_scales(wide, limit=limit, axis=axis))
    return _rounded(wide / scale, jnp.dtype(dtype)), scale


def requantize_static(
    x: Float[Array, "..."], scale: Float[Array, ""], *, dtype: DTypeLike = E4M3
) -> Float[Array, "..."]:
    """Returns `fp8(clip(x / scale))` in at least float32; the clip has a derivative."""
    wide = x.astype(accumulator(x.dtype)) / lax.stop_gradient(scale)
    return _rounded(_clip(wide, largest(dtype)), jnp.dtype(dtype))


def _clip(x: jax.Array, limit: float) -> jax.Array:
    edge = jnp.asarray(limit, x.dtype)
    return lax.clamp(-edge, x, edge)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x, dtype):
    return saturate(x, dtype).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return _rounded(*primals, dtype), *tangents
