"""The key/value cache of one layer: a pytree; an update returns a new one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from neuronjax.kernels.kv_cache import (
    block_places,
    write_around,
    write_blocks,
    write_slots,
)
from neuronjax.primitives.known import known


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
        The updated cache; no other slot changes, nor its bits. Under `jit` a row whose
        write does not fit (a negative position, or past the end) comes back unchanged:
        nothing is clamped onto other slots. Donate the cache to update it in place; one
        of a narrow float is passed over once, on a CPU, but not copied.

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
    held = known(position)
    if held is not None:
        last = cache.shape[axis] - new.shape[axis]
        if ((held < 0) | (held > last)).any():
            raise ValueError(
                f"write_cache: position must lie in [0, {last}] so that "
                f"{new.shape[axis]} slots fit in {cache.shape[axis]}, "
                f"got {position.tolist()}"
            )
    return write_slots(cache, new, position, axis=axis)


def write_circular_cache(
    cache: Shaped[Array, "batch ..."],
    new: Shaped[Array, "batch ..."],
    position: Integer[Array, " batch"],
    *,
    axis: int = 1,
) -> Array:
    """Writes `new` into a cache that wraps: the last tokens stay, however many came.

    Token `position[b] + t` goes to that slot modulo the slots. A window of `W` tokens
    needs `W` slots: attend to the cache and the new tokens first, then write these.

    Args:
        cache: `[batch, ...]`, slots along `axis`.
        new: the same shape, with any number of slots; cast to the cache's dtype, and
            clipped before it if that is fp8.
        position: `[batch]`, any integer dtype: how many tokens came before.
        axis: the slots' axis, not 0.

    Returns:
        The updated cache; no other slot changes, nor its bits. Under `jit` a negative
        position leaves its row as it was. Donate the cache to update it in place, as by
        `write_cache`.

    Raises:
        ValueError: a position is known while tracing and negative, or shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> cache = jnp.array([[10.0, 20.0, 30.0, 40.0]])
        >>> write_circular_cache(cache, jnp.array([[98.0, 99.0]]), jnp.array([7]))
        Array([[99., 20., 30., 98.]], dtype=float32)
    """
    expected = (*cache.shape[:axis], new.shape[axis], *cache.shape[axis + 1 :])
    if new.shape != expected or position.shape != cache.shape[:1]:
        raise ValueError(
            f"write_circular_cache: new and position must have shapes {expected} and "
            f"{cache.shape[:1]}, got {new.shape} and {position.shape}"
        )
    held = known(position)
    if held is not None and (held < 0).any():
        raise ValueError(
            f"write_circular_cache: position must be at least 0, got {held.tolist()}"
        )
    return write_around(cache, new, position, axis=axis)


def write_block_cache(
    cache: Shaped[Array, "num_blocks *heads block_len width"],
    new: Shaped[Array, "batch *heads seq width"],
    position: Integer[Array, " batch"],
    active_blocks_table: Integer[Array, "batch blocks"],
) -> Array:
    """Writes `new` into the blocks of a cache, from slot `position[b]` of sequence `b`.

    Slot `p` of a sequence is slot `p % block_len` of the block that its row of the
    table names at `p // block_len`, as `attention_tkg` reads it: a write that crosses
    the end of a block goes on in the next one of its sequence.

    Args:
        cache: `[num_blocks, block_len, width]`, or `[num_blocks, num_kv_heads,
            block_len, width]`.
        new: `[batch, seq, width]`, or `[batch, num_kv_heads, seq, width]`; cast to the
            cache's dtype, and clipped before it if that is fp8.
        position: `[batch]`, any integer dtype, the first slot of each sequence.
        active_blocks_table: `[batch, blocks]`, any integer dtype.

    Returns:
        The updated cache; no other slot changes, nor its bits. Under `jit` a sequence
        whose write does not fit its row of the table, or meets an entry that is no
        block, writes nothing; of two that write one slot, either may win. Donate the
        cache to update it in place, as by `write_cache`; a narrow one needs four bytes
        more for each slot of a block.

    Raises:
        ValueError: shapes differ; or positions and table are known while tracing and a
            write does not fit, or two write one slot.

    Example:
        >>> import jax.numpy as jnp
        >>> cache, table = jnp.zeros((3, 2, 1)), jnp.array([[2, 0]])
        >>> new = jnp.array([[[8.0], [9.0]]])
        >>> write_block_cache(cache, new, jnp.array([1]), table)[..., 0].tolist()
        [[9.0, 0.0], [0.0, 0.0], [0.0, 8.0]]
    """
    batch, table = new.shape[:1], active_blocks_table
    expected = (*batch, *cache.shape[1:-2], new.shape[-2], cache.shape[-1])
    if (
        cache.ndim not in (3, 4)
        or (new.shape, position.shape, table.shape[:1]) != (expected, batch, batch)
        or table.ndim != 2
    ):
        raise ValueError(
            f"write_block_cache: new, position and active_blocks_table must have "
            f"shapes {expected}, {batch} and [{batch[0]}, blocks], got {new.shape}, "
            f"{position.shape} and {table.shape}"
        )
    _require_places(cache, new.shape[-2], position, table)
    return write_blocks(cache, new, position, table)


def _require_places(cache, count, position, table) -> None:
    """Refuses known positions that do not fit known tables."""
    if known(position) is None or known(table) is None:
        return
    with jax.ensure_compile_time_eval():
        where = block_places(cache, count, position, table)
        block, offset = map(np.asarray, where)
    missed = (block >= cache.shape[0]).any(1)
    if missed.any():
        row = int(np.flatnonzero(missed)[0])
        raise ValueError(
            f"write_block_cache: {count} slots from position {position[row]} on must "
            f"lie in the blocks of active_blocks_table[{row}], got "
            f"{np.asarray(table)[row].tolist()} with {cache.shape[0]} blocks of "
            f"{cache.shape[-2]} slots"
        )
    slots = (block * cache.shape[-2] + offset).ravel()
    if np.unique(slots).size < slots.size:
        raise ValueError(
            "write_block_cache: sequences must write slots of their own, got one that "
            f"is written twice by positions {np.asarray(position).tolist()}"
        )
