"""The product of rows and a weight matrix, accumulated wide."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator


def linear_fwd(
    x: Float[Array, "*rows d_in"], w: Float[Array, "d_in d_out"], *, dtype: DTypeLike
) -> Float[Array, "*rows d_out"]:
    """Returns `x @ w` in at least float32; the factors are rounded to `dtype` first.

    A single row takes another form when `w` is narrow: XLA on a CPU widens the whole
    matrix for one row and not for two (576 x 960 bfloat16: 1070 us against 114). So the
    row goes in as its rounded value and, in a second row, what the rounding took away.
    """
    acc = accumulator(x.dtype)
    narrow = acc == jnp.float32 and w.dtype.itemsize == 2
    if narrow and math.prod(x.shape[:-1]) == 1:
        row = x.reshape(-1, x.shape[-1]).astype(acc)
        high = row.astype(w.dtype)
        low = (row - high.astype(acc)).astype(w.dtype)
        rows = jnp.concatenate([high, low])
        y = jnp.dot(rows, w, preferred_element_type=acc).sum(0)
        return y.reshape(*x.shape[:-1], w.shape[1])
    return jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=acc)
