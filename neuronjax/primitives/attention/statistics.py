"""Row statistics of attention between the plain layout and the chip's."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def statistics_to_tiles(statistics: Float[Array, "heads q_seq 1"]) -> Array:
    """Row statistics in the chip's layout.

    Args:
        statistics: `[heads, q_seq, 1]`; `q_seq` is a multiple of 128.

    Returns:
        `[heads, 128, q_seq / 128]`: element `[h, p, g]` is query `g * 128 + p`.

    Raises:
        ValueError: `q_seq` is not a multiple of 128.

    Example:
        >>> import jax.numpy as jnp
        >>> statistics_to_tiles(jnp.arange(256.0).reshape(1, 256, 1))[0, 3]
        Array([  3., 131.], dtype=float32)
    """
    if statistics.ndim != 3 or statistics.shape[1] % 128:
        raise ValueError(
            "statistics_to_tiles: statistics must have shape [heads, q_seq, 1] with "
            f"q_seq a multiple of 128, got {statistics.shape}"
        )
    return jnp.swapaxes(statistics.reshape(statistics.shape[0], -1, 128), 1, 2)


def statistics_from_tiles(statistics: Float[Array, "heads 128 _"]) -> Array:
    """The inverse of `statistics_to_tiles`.

    Args:
        statistics: `[heads, 128, q_seq / 128]`.

    Returns:
        `[heads, q_seq, 1]`.

    Raises:
        ValueError: `statistics` has another shape.

    Example:
        >>> import jax.numpy as jnp
        >>> statistics_from_tiles(jnp.zeros((2, 128, 3))).shape
        (2, 384, 1)
    """
    if statistics.ndim != 3 or statistics.shape[1] != 128:
        raise ValueError(
            "statistics_from_tiles: statistics must have shape [heads, 128, q_seq / "
            f"128], got {statistics.shape}"
        )
    return jnp.swapaxes(statistics, 1, 2).reshape(statistics.shape[0], -1, 1)
