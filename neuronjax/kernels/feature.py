"""Features of an activation: its last axis, or the two leading axes of a tile.

Per-feature operands (a gain, an offset) arrive with or without their unit axes: `[H]`
and `[1, H]` beside rows, `[P, C]` and `[P, C, 1]` beside tiles.
"""

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.dtypes import accumulator

LAST = (-1,)
TILE = (0, 1)


def per_feature(scale: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`scale` with unit axes so that it broadcasts against `x`, in its own dtype."""
    if axes == TILE:
        extra = scale.ndim - x.ndim
        if extra > 0:
            return lax.squeeze(scale, range(x.ndim, scale.ndim))
        return lax.expand_dims(scale, range(scale.ndim, x.ndim))
    extra = scale.ndim - x.ndim
    if extra > 0:
        return lax.squeeze(scale, range(extra))
    return lax.expand_dims(scale, range(-extra))


def sum_rows(z: jax.Array, like: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum of `z` over everything but its features, shaped and typed as `like`."""
    kept = {axis % z.ndim for axis in axes}
    total = jnp.sum(z, axis=[axis for axis in range(z.ndim) if axis not in kept])
    units = range(total.ndim, like.ndim) if axes == TILE else range(like.ndim - 1)
    return lax.expand_dims(total, units).astype(like.dtype)


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its statistics: float32, or float64 where `x` is."""
    return x.astype(accumulator(x.dtype))
