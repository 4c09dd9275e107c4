"""Products with an fp8 weight: the scale goes into the product's epilogue.

No weight is dequantized as a whole: a block of columns at a time is widened, multiplied
and scaled.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator

Scale = Float[Array, ""] | Float[Array, " d_out"]


def scaled_linear_fwd(
    x: Float[Array, "*rows d_in"],
    w: Float[Array, "d_in d_out"],
    scale: Scale,
    *,
    dtype: DTypeLike,
) -> Float[Array, "*rows d_out"]:
    """Returns `(x @ w) * scale` in at least float32; factors are multiplied in `dtype`.

    `w` is fp8. `scale` is one value or one for each column.
    """
    acc = accumulator(x.dtype)
    y = jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=acc)
    return y * scale.astype(acc)


def scaled_linear_bwd(
    dy: Float[Array, "*rows d_out"],
    w: Float[Array, "d_in d_out"],
    scale: Scale,
    *,
    dtype: DTypeLike,
) -> Float[Array, "*rows d_in"]:
    """Returns the cotangent of `x` of `scaled_linear_fwd`: `(dy * scale) @ w^T`.

    Weight and scale are constants.
    """
    acc = accumulator(dy.dtype)
    scaled = (dy.astype(acc) * scale.astype(acc)).astype(dtype)
    return lax.dot_general(
        scaled,
        w.astype(dtype),
        (((dy.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=acc,
    )
