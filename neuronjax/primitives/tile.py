"""Tiles: tensors that lie in on-chip memory, 128 partitions wide."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from neuronjax.context import settings

PARTITIONS = 128
BUFFERS = ("sbuf", "psum")
MIXED = (
    "Inputs/outputs to {function} must be all tensors or all tiles, not a mix of both"
)

PSUM_TO_HBM = "dma_copy cannot read from psum directly"


@dataclasses.dataclass(frozen=True)
class Budget:
    """On-chip memory of one target, in bytes."""

    sbuf_bytes: int
    psum_bytes: int

    def partition_bytes(self, buffer: str) -> int:
        """What one of the 128 partitions of `buffer` holds."""
        total = self.sbuf_bytes if buffer == "sbuf" else self.psum_bytes
        return total // PARTITIONS


BUDGETS = {
    "gen2": Budget(24 << 20, 2 << 20),
    "gen3": Budget(24 << 20, 2 << 20),
    "gen4": Budget(32 << 20, 2 << 20),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemrefTile:
    """A tensor in SBUF or PSUM: `data` is `[partitions <= 128, chunks, *free]`.

    An axis of size `N = 128 * C` is split as `n = p * C + c` into partition `p` and
    chunk `c`; an axis of at most 128 becomes that many partitions and one chunk. The
    other axes of the tensor follow in their order.

    Attributes:
        data: the values, `[partitions, chunks, *free]`.
        axis: which axis of the tensor lies on the partitions.
        buffer: `"sbuf"` or `"psum"`.
    """

    data: jax.Array
    axis: int = dataclasses.field(default=0, metadata={"static": True})
    buffer: str = dataclasses.field(default="sbuf", metadata={"static": True})

    @classmethod
    def from_tensor(
        cls, x: jax.Array | np.ndarray, axis: int = 0, *, buffer: str = "sbuf"
    ) -> "MemrefTile":
        """Lays `x` out with `axis` on the partitions.

        Args:
            x: any tensor.
            axis: the axis to split; its size is at most 128 or a multiple of 128.
            buffer: `"sbuf"` or `"psum"`.

        Returns:
            A tile whose `data` is `[partitions, chunks, *other axes]`.

        Raises:
            ValueError: the axis does not exist, its size does not fill the partitions
                (the message names the nearest sizes that do), or the buffer is unknown.

        Example:
            >>> import jax.numpy as jnp
            >>> tile = MemrefTile.from_tensor(jnp.zeros((3, 256)), axis=1)
            >>> tile.data.shape
            (128, 2, 3)
            >>> tile.to_tensor().shape
            (3, 256)
        """
        if buffer not in BUFFERS:
            raise ValueError(
                f"MemrefTile.from_tensor: buffer must be one of {BUFFERS}, "
                f"got {buffer!r}"
            )
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"MemrefTile.from_tensor: axis must lie in [{-x.ndim}, {x.ndim}) for x "
                f"of shape {x.shape}, got {axis}"
            )
        axis %= x.ndim
        size = x.shape[axis]
        if size == 0 or (size > PARTITIONS and size % PARTITIONS):
            raise ValueError(
                f"MemrefTile.from_tensor: axis {axis} of x must have at most "
                f"{PARTITIONS} elements or a multiple of them, got shape {x.shape}; "
                f"nearest size that fits: {nearest_partition_size(size)}"
            )
        partitions = min(size, PARTITIONS)
        rows = jnp.moveaxis(x, axis, 0)
        data = rows.reshape(partitions, size // partitions, *rows.shape[1:])
        return cls(data, axis, buffer)

    def to_tensor(self) -> jax.Array:
        """The tensor this tile holds: the inverse of `from_tensor`.

        Raises:
            ValueError: the tile lies in PSUM and macros are lowered as composites
                (`neuronjax.lowering("composite")`): `to_sbuf` first.
        """
        if self.buffer == "psum" and settings().route == "composite":
            raise ValueError(PSUM_TO_HBM)
        rows = self.data.reshape(-1, *self.data.shape[2:])
        return jnp.moveaxis(rows, 0, self.axis)

    def to_sbuf(self) -> "MemrefTile":
        """The same tile in SBUF, where a result of PSUM is copied to be stored."""
        return dataclasses.replace(self, buffer="sbuf")

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """How `treescope` shows a tile: where its tensor lies, and its fields."""
        from treescope import rendering_parts as parts

        fields = dict(data=self.data, axis=self.axis, buffer=self.buffer)
        children = [
            parts.siblings_with_annotations(
                f"{name}=",
                subtree_renderer(value, path=path and f"{path}.{name}"),
            )
            for name, value in fields.items()
        ]
        note = parts.comment_color(parts.text(self._words()))
        return parts.build_foldable_tree_node_from_children(
            prefix=parts.siblings(
                parts.maybe_qualified_type_name(MemrefTile),
                "(",
                parts.fold_condition(expanded=note),
            ),
            children=children,
            suffix=")",
            comma_separated=True,
            path=path,
        )

    def _words(self) -> str:
        """The tensor and where it lies; nothing of a spec in the place of an array."""
        data_shape = getattr(self.data, "shape", ())
        if len(data_shape) < 2:
            return ""
        sizes = ",".join(map(str, self.shape))
        size = tile_bytes(data_shape, self.dtype)
        return (
            f"  # {self.dtype}[{sizes}]: axis {self.axis} on {data_shape[0]} "
            f"partitions of {self.buffer}, {data_shape[1]} chunks, {size} bytes a "
            "partition"
        )

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor this tile holds."""
        partitions, chunks, *free = self.data.shape
        free.insert(self.axis, partitions * chunks)
        return tuple(free)


# So that an exported program can take and return tiles.
export.register_pytree_node_serialization(
    MemrefTile,
    serialized_name="neuronjax.MemrefTile",
    serialize_auxdata=lambda laid: json.dumps(laid).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def nearest_partition_size(size: int) -> int:
    """The size closest to `size` that fills whole partitions; the larger one of two."""
    if size <= PARTITIONS:
        return max(size, 1)
    return (size + PARTITIONS // 2) // PARTITIONS * PARTITIONS


def tile_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Bytes that data `[partitions, *free]` takes in one partition."""
    return math.prod(shape[1:]) * jnp.dtype(dtype).itemsize


def is_all_io_type_memref_tile(ios: tuple, emitter: str) -> bool:
    """Whether every input and output is a tile.

    Args:
        ios: tensors and tiles; `None` (an absent option) does not count.
        emitter: whose inputs they are, for the message.

    Returns:
        True when all are tiles, False when none is.

    Raises:
        ValueError: some are tiles and some are tensors.
    """
    tiles = [isinstance(x, MemrefTile) for x in ios if x is not None]
    if any(tiles) and not all(tiles):
        raise ValueError(MIXED.format(function=emitter))
    return any(tiles)


def require_fit(emitter: str, **tiles: MemrefTile | None) -> None:
    """Refuses tiles that together do not fit the target's on-chip memory."""
    budget, generation = BUDGETS[settings().target], settings().target
    for buffer in BUFFERS:
        asked = {
            argument: tile_bytes(tile.data.shape, tile.dtype)
            for argument, tile in tiles.items()
            if tile is not None and tile.buffer == buffer
        }
        limit = budget.partition_bytes(buffer)
        if sum(asked.values()) > limit:
            parts = ", ".join(f"{name} {size}" for name, size in asked.items())
            raise ValueError(
                f"{emitter}: tiles must fit {buffer.upper()} of {generation}: "
                f"{limit} bytes a partition, got {sum(asked.values())} ({parts})"
            )


def require_partitions(emitter: str, **tiles: MemrefTile | None) -> None:
    """Refuses a tile that was built by hand with more than 128 partitions."""
    for argument, tile in tiles.items():
        if tile is not None and tile.data.shape[0] > PARTITIONS:
            raise ValueError(
                f"{emitter}: {argument} must have at most {PARTITIONS} partitions, "
                f"got data of shape {tile.data.shape}"
            )
