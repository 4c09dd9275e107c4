"""Rotary tables from positions, and the rotation as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.settings import (
    require_dtypes,
    require_even,
    require_positive,
    require_sizes,
)
from neuronjax.primitives.rope import RoPE


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

    Example:
        >>> import jax.numpy as jnp
        >>> cos, sin = rotary_tables(jnp.array([[0, 1]]), 2)
        >>> cos.round(4)[0].tolist()
        [[1.0, 1.0], [0.540..., 0.540...]]
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None] * theta**-exponent
    angles = jnp.concatenate([angles, angles], -1)
    return jnp.cos(angles), jnp.sin(angles)


class RotaryEmbedding(nnx.Module):
    """The twin of `neuronjax.RoPE`, with the tables of `rotary_tables`.

    The tables are float32 whatever is rotated. It has no parameters, and keeps no
    tables: a long one takes longer to read than to compute. `nn.Attention` and `nn.QKV`
    rotate inside their projection instead.

    Args:
        head_dim: width of a head, even.
        theta: base of the angles.
        interleaved: pairs of channels are `(2i, 2i + 1)`, not `(i, i + head_dim/2)`.
        dtype: dtype of the computation; `None` keeps that of the input.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34.

    Example:
        >>> import jax.numpy as jnp
        >>> query = jnp.ones((1, 2, 3, 4))
        >>> RotaryEmbedding(4)(query, jnp.arange(3)[None]).shape
        (1, 2, 3, 4)
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        interleaved: bool = False,
        dtype: Any = None,
    ):
        require_sizes("RotaryEmbedding", head_dim=head_dim)
        require_even("RotaryEmbedding", "head_dim", head_dim)
        require_positive("RotaryEmbedding", theta=theta)
        require_dtypes("RotaryEmbedding", dtype)
        self.head_dim, self.theta = head_dim, theta
        self.interleaved, self.dtype = interleaved, dtype

    def __call__(
        self,
        x: Float[Array, "batch num_heads seq head_dim"],
        positions: Int[Array, "batch seq"],
    ) -> Float[Array, "batch num_heads seq head_dim"]:
        """Rotates the heads of queries or keys by the angles of their positions."""
        x = x if self.dtype is None else x.astype(self.dtype)
        tables = rotary_tables(positions, self.head_dim, theta=self.theta)
        half = (jnp.moveaxis(t[..., : self.head_dim // 2], -1, 0) for t in tables)
        turned = RoPE(
            jnp.moveaxis(x, -1, 0), *half, contiguous_layout=not self.interleaved
        )
        return jnp.moveaxis(turned, 0, -1)
