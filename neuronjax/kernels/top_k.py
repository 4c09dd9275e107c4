"""The k largest of each row, in an order that no tiling can change."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def top_k_indices(x: Float[Array, "*rows n"], k: int) -> Int[Array, "*rows k"]:
    """Where the `k` largest of each row are, in descending order, as int32.

    Among equals the lowest index comes first, whatever the dtype or the split over
    devices. Zeros of either sign are equal; NaN ranks above infinity. `lax.top_k` alone
    compares bit patterns, in which a negative zero or NaN ranks lower.
    """
    x = lax.stop_gradient(x)
    zero, nan = jnp.zeros((), x.dtype), jnp.full((), jnp.nan, x.dtype)
    keys = jnp.where(x == 0, zero, jnp.where(jnp.isnan(x), nan, x))
    # Behind the barrier XLA cannot fold a reader's slice into the k columns: it would
    # no longer see a top-k there and sort whole rows, at twenty times the cost.
    return lax.optimization_barrier(lax.top_k(keys, k)[1].astype(jnp.int32))
