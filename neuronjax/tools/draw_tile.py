"""Pictures of tiles: which elements of an axis lie in which partition and chunk.

No layout is written here: the library's own tile is made of the numbers 0, 1, 2, ...
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.context import settings, target
from neuronjax.primitives.tile import BUDGETS, MemrefTile, tile_bytes
from neuronjax.tools.drawing import Drawing

MOST_CHUNKS = 4096
_ALL, _FIRST, _LAST = 8, 4, 2  # partitions or chunks that are shown in a terminal


@dataclasses.dataclass(frozen=True)
class TilePicture(Drawing):
    """How a tensor lies in on-chip memory.

    Attributes:
        shape: of the tensor.
        dtype: of its elements.
        axis: the one on the partitions.
        buffer: `"sbuf"` or `"psum"`.
        generation: the target whose memory it is.
        layout: `[partitions, chunks]`, the index along `axis` that lies there.
        element: one element's coordinates, which is marked.
    """

    shape: tuple[int, ...]
    dtype: str
    axis: int
    buffer: str
    generation: str
    layout: np.ndarray
    element: tuple[int, ...] | None = None

    @property
    def free(self) -> tuple[int, ...]:
        """The other axes, which each chunk holds whole."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def bytes(self) -> int:
        """Of one partition."""
        return tile_bytes((*self.layout.shape, *self.free), jnp.dtype(self.dtype))

    @property
    def limit(self) -> int:
        """Bytes that a partition has."""
        return BUDGETS[self.generation].partition_bytes(self.buffer)

    @property
    def place(self) -> tuple[int, int, int] | None:
        """Partition and chunk of the marked element, and its byte in the partition."""
        if self.element is None:
            return None
        rest = self.element[: self.axis] + self.element[self.axis + 1 :]
        ((partition, chunk),) = np.argwhere(self.layout == self.element[self.axis])
        offset = int(np.ravel_multi_index(rest, self.free)) if rest else 0
        offset += int(chunk) * math.prod(self.free)
        return int(partition), int(chunk), offset * jnp.dtype(self.dtype).itemsize

    @property
    def title(self) -> str:
        """The tile in words."""
        partitions, chunks = self.layout.shape
        words = f"{self.dtype}[{','.join(map(str, self.shape))}]: axis {self.axis} on "
        words += f"{_count(partitions, 'partition')}, {_count(chunks, 'chunk')} of "
        return words + _count(math.prod(self.free), "element")

    @property
    def memory(self) -> str:
        """What it takes of the target's memory."""
        fits = "fits" if self.bytes <= self.limit else "does not fit"
        return (
            f"{self.buffer.upper()} of {self.generation}: {self.bytes} of "
            f"{self.limit} bytes a partition, {fits}"
        )

    def __rich__(self) -> Any:
        """The picture that `rich` prints."""
        from rich.text import Text  # a picture only: `import neuronjax` stays quick

        marked = self.place[:2] if self.place else (-1, -1)
        rows, columns = (
            _shown(size, mark)
            for size, mark in zip(self.layout.shape, marked, strict=True)
        )
        wide = max(9, len(str(self.layout.max())) + 4)
        lines = [Text(self.title, "bold"), Text(self.memory)]
        if self.place:
            lines.append(Text(self._told(), "#ee6677"))
        head = "".join((f"chunk {c}" if c >= 0 else "…").rjust(wide) for c in columns)
        lines.append(Text(" " * 13 + head, "dim"))
        for p in rows:
            if p < 0:
                lines.append(Text("⋮".rjust(13), "dim"))
                continue
            line = Text(f"partition {p:>3}", "dim")
            for c in columns:
                line.append(*self._cell(p, c, marked, wide))
            line.rstrip()
            lines.append(line)
        return Text("\n").join(lines)

    def _cell(self, p: int, c: int, marked: Sequence[int], wide: int) -> tuple:
        if c < 0:
            return "…".rjust(wide), "dim"
        index = self.layout[p, c]
        if (p, c) == tuple(marked):
            return f"[{index}]".rjust(wide), "bold #ee6677"
        return f"{index} ".rjust(wide), ""

    def _told(self) -> str:
        assert self.element is not None and self.place is not None
        partition, chunk, byte = self.place
        return (
            f"[{','.join(map(str, self.element))}] lies in partition {partition}, "
            f"chunk {chunk}, at byte {byte} of the partition"
        )

    def draw(self, axes: Any) -> None:
        """Draws into `axes` of matplotlib: a colour for each index along the axis."""
        image = axes.imshow(self.layout, aspect="auto", interpolation="none")
        partitions, chunks = self.layout.shape
        if partitions * chunks <= 128 * 4:
            for (p, c), index in np.ndenumerate(self.layout):
                color = "black" if index > self.layout.max() / 2 else "white"
                options: dict[str, Any] = dict(ha="center", va="center", fontsize=4)
                axes.text(c, p, index, color=color, **options)
        if self.place:
            from matplotlib.patches import Rectangle

            p, c, _ = self.place
            edge: dict[str, Any] = dict(fill=False, edgecolor="#ee6677", linewidth=2)
            axes.add_patch(Rectangle((c - 0.5, p - 0.5), 1, 1, **edge))
        bar = axes.figure.colorbar(image, ax=axes)
        bar.set_label(f"index along axis {self.axis}")
        axes.set_xticks(range(0, chunks, -(-chunks // 16)))
        axes.set(xlabel="chunk", ylabel="partition")
        words = [self.title, self.memory] + [self._told()] * (self.place is not None)
        axes.set_title("\n".join(words), loc="left", fontsize="small", wrap=True)

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the image."""
        return min(5.5 + 0.4 * self.layout.shape[1], 16), 8


def tile_picture(
    shape: Sequence[int],
    axis: int = 0,
    *,
    dtype: str = "float32",
    buffer: str = "sbuf",
    generation: str | None = None,
    element: Sequence[int] | None = None,
) -> TilePicture:
    """How a tensor lies in 128 partitions and chunks.

    Args:
        shape: of the tensor.
        axis: the one that lies on the partitions.
        dtype: of its elements.
        buffer: `"sbuf"` or `"psum"`.
        generation: `"gen2"`, `"gen3"` or `"gen4"`; the target in force unless given.
        element: coordinates of an element to mark.

    Returns:
        The picture of `MemrefTile.from_tensor`.

    Raises:
        ValueError: `MemrefTile.from_tensor` refuses the tensor, the element lies
            outside, there are more chunks than a picture can show, or no such dtype or
            target.

    Example:
        >>> print(tile_picture((3, 256), 1, element=(2, 5)))
        float32[3,256]: axis 1 on 128 partitions, 2 chunks of 3 elements
        SBUF of gen3: 24 of 196608 bytes a partition, fits
        [2,5] lies in partition 2, chunk 1, at byte 20 of the partition
                       chunk 0  chunk 1
        partition   0        0        1
        partition   1        2        3
        partition   2        4       [5]
        partition   3        6        7
                    ⋮
        partition 126      252      253
        partition 127      254      255
    """
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"draw: there is no dtype {dtype!r}") from None
    shape, element = tuple(shape), None if element is None else tuple(element)
    if not shape or min(shape) < 1:
        raise ValueError(f"draw: shape must be positive sizes, got {list(shape)}")
    if element is not None and not _inside(element, shape):
        raise ValueError(f"draw: element must lie in {shape}, got {element}")
    with target(settings().target if generation is None else generation):
        generation = settings().target
    whole = jax.ShapeDtypeStruct(shape, kind)
    tile = jax.eval_shape(
        lambda x: MemrefTile.from_tensor(x, axis, buffer=buffer), whole
    )
    if tile.data.shape[1] > MOST_CHUNKS:
        raise ValueError(
            f"draw: a picture shows at most {MOST_CHUNKS} chunks, got "
            f"{tile.data.shape[1]}"
        )
    indices = np.arange(shape[axis], dtype=np.int32)
    layout = np.asarray(MemrefTile.from_tensor(indices).data)
    return TilePicture(
        *(shape, kind.name, tile.axis, buffer, generation, layout, element)
    )


def _inside(element: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    pairs = zip(element, shape, strict=False)
    return len(element) == len(shape) and all(0 <= i < size for i, size in pairs)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _shown(size: int, marked: int) -> list[int]:
    """Which of `size` rows or columns are shown; -1 is a gap."""
    if size <= _ALL:
        return list(range(size))
    near = range(max(marked - 1, 0), min(marked + 2, size)) if marked >= 0 else ()
    kept = sorted({*range(_FIRST), *near, *range(size - _LAST, size)})
    found = []
    for index in kept:
        if found and index > found[-1] + 1:
            found.append(-1)
        found.append(index)
    return found
