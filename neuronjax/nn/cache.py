"""The key/value cache of one layer: a pytree; an update returns a new one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from neuronjax.kernels.kv_cache import write_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
        key: `[batch, num_kv_heads, head_dim, slots]`: transposed, as decoding reads it.
        value: `[batch, num_kv_heads, slots, head_dim]`.
    """

    key: Float[Array, "batch num_kv_heads head_dim slots"]
    value: Float[Array, "batch num_kv_heads slots head_dim"]

    @classmethod
    def zeros(
        cls, batch: int, num_kv_heads: int, head_dim: int, slots: int, dtype: Any
    ) -> "LayerCache":
        """An empty cache."""
        return cls(
            jnp.zeros((batch, num_kv_heads, head_dim, slots), dtype),
            jnp.zeros((batch, num_kv_heads, slots, head_dim), dtype),
        )

    def write(
        self,
        key: Float[Array, "batch num_kv_heads seq head_dim"],
        value: Float[Array, "batch num_kv_heads seq head_dim"],
        position: Int[Array, " batch"],
    ) -> "LayerCache":
        """The cache with `seq` tokens more, from slot `position[b]`: `write_cache`."""
        return LayerCache(
            write_cache(self.key, jnp.swapaxes(key, 2, 3), position, axis=3),
            write_cache(self.value, value, position, axis=2),
        )


def write_cache(
    cache: Float[Array, "batch ..."],
    new: Float[Array, "batch ..."],
    position: Int[Array, " batch"],
    *,
    axis: int = 1,
) -> Array:
    """Writes `new` into `cache` from slot `position[b]` on, row by row.

    Args:
        cache: `[batch, ...]`, slots along `axis`.
        new: the same shape, with as many slots as are written; cast to the cache's
            dtype.
        position: `[batch]`, the first slot of each row.
        axis: the slots' axis, not 0.

    Returns:
        The updated cache. Under `jit` a row whose write does not fit (a negative
        position, or past the end) comes back unchanged: nothing is clamped onto other
        slots.

    Raises:
        ValueError: positions are concrete and a write does not fit, or shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> cache = jnp.array([[10.0, 20.0, 30.0, 40.0]])
        >>> write_cache(cache, jnp.array([[99.0]]), jnp.array([1]))
        Array([[10., 99., 30., 40.]], dtype=float32)
    """
    expected = (*cache.shape[:axis], new.shape[axis], *cache.shape[axis + 1 :])
    if new.shape != expected or position.shape != cache.shape[:1]:
        raise ValueError(
            f"write_cache: new and position must have shapes {expected} and "
            f"{cache.shape[:1]}, got {new.shape} and {position.shape}"
        )
    if not isinstance(position, Tracer):
        last = cache.shape[axis] - new.shape[axis]
        # In NumPy: under jit even a constant's comparison would be traced.
        held = np.asarray(position)
        if ((held < 0) | (held > last)).any():
            raise ValueError(
                f"write_cache: position must lie in [0, {last}] so that "
                f"{new.shape[axis]} slots fit in {cache.shape[axis]}, "
                f"got {position.tolist()}"
            )
    return write_slots(cache, new, position, axis=axis)
