"""Rotary tables from positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_tables(
    positions: Int[Array, "batch seq"], head_dim: int, *, theta: float = 10000.0
) -> tuple[Float[Array, "batch seq head_dim"], Float[Array, "batch seq head_dim"]]:
    r"""Cosines and sines of half-split pairs, both halves equal.

    $$\phi_{t,i} = p_t \, \theta^{-2i/d}, \qquad i < d/2$$

    Args:
        positions: `[batch, seq]`, integers.
        head_dim: `d`, even.
        theta: base of the angles.

    Returns:
        `(cos, sin)`, each `[batch, seq, head_dim]`, float32.

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 15.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None] * theta**-exponent
    angles = jnp.concatenate([angles, angles], -1)
    return jnp.cos(angles), jnp.sin(angles)
