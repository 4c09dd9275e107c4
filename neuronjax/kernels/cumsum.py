"""Running sums along the last axis, and their transpose.

The carry is float32 to the end of the row: rounded to bfloat16 every so often, as where
it is read back from a narrow output, a sum of ones stops at 256.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator


def cumsum_fwd(
    x: Float[Array, "*batch n"], *, name: str, **hints: Any
) -> tuple[Float[Array, "*batch n"]]:
    """Returns `(y,)`, `y[i] = x[0] + ... + x[i]`, rounded once to the dtype of `x`."""
    return (_running_sum(x, reverse=False),)


def cumsum_bwd(
    dy: Float[Array, "*batch n"], *, name: str, **hints: Any
) -> tuple[Float[Array, "*batch n"]]:
    """Returns `(dx,)`, `dx[i] = dy[i] + ... + dy[n - 1]`."""
    return (_running_sum(dy, reverse=True),)


def _running_sum(x: jax.Array, reverse: bool) -> jax.Array:
    total = lax.cumsum(x.astype(accumulator(x.dtype)), x.ndim - 1, reverse=reverse)
    return total.astype(x.dtype)


def cumsum_plain(x, *, name: str, **hints: Any) -> tuple[jax.Array]:
    """The sums as a product with a triangle of ones, the transposed one backwards."""
    acc, n = accumulator(x.dtype), x.shape[-1]
    triangle = jnp.triu(jnp.ones((n, n), acc))
    triangle = triangle.T if name.endswith("Bwd") else triangle
    return ((x.astype(acc) @ triangle).astype(x.dtype),)
