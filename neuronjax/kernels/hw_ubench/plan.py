"""Which tile of a probe lies in which band of the array, pass by pass.

The array is 128 x 128: a pass contracts over its rows and yields its columns. Row
tiling cuts the rows into bands, column tiling the columns; each band holds a product of
its own. Passes that add into the same PSUM make one group: the first overwrites.
"""

import dataclasses
import functools

import numpy as np

PARTITIONS = 128
SIZES = (32, 64, 128)
KINDS = ("row", "column", "packed")


@dataclasses.dataclass(frozen=True)
class Placement:
    """A tile in its band.

    Attributes:
        tile: its number.
        row: of the array, where the band begins.
        column: of the array, where the band begins.
        first: of the tile's `k` rows, the first that is loaded.
        rows: how many are loaded.
    """

    tile: int
    row: int
    column: int
    first: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Pass:
    """What the array holds at one time.

    Attributes:
        group: the PSUM group that it belongs to.
        start: whether it overwrites PSUM; otherwise it adds.
        halves: which of the two rows that share a physical row are loaded; of a probe
            without double rows, the only one.
        placements: a tile for each band that is used.
    """

    group: int
    start: bool
    halves: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclasses.dataclass(frozen=True)
class ProbePlan:
    """How the array computes a probe; a pure function of its sizes.

    Attributes:
        kind: `"row"`, `"column"` or `"packed"`.
        tiles: how many small products there are.
        k: rows that each contracts; of double rows, the physical ones.
        m: columns of each stationary operand.
        tile_size: rows and columns of a band.
        positions: row and column of each band that a pass uses: tile `t` lies in band
            `t % len(positions)` of group `t // len(positions)`.
        halves: for each pass over the same rows, which halves of them it loads.
    """

    kind: str
    tiles: int
    k: int
    m: int
    tile_size: tuple[int, int]
    positions: tuple[tuple[int, int], ...]
    halves: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def bands(self) -> int:
        """Bands of the whole array, those that stay empty included."""
        return PARTITIONS // min(self.tile_size)

    @property
    def slots(self) -> tuple[int | None, ...]:
        """For each band of the array, which of the positions it is."""
        size = min(self.tile_size)
        held = {max(where) // size: i for i, where in enumerate(self.positions)}
        return tuple(held.get(band) for band in range(self.bands))

    @property
    def groups(self) -> int:
        """PSUM groups: each holds as many tiles as there are positions."""
        return -(-self.tiles // len(self.positions))

    @property
    def chunks(self) -> int:
        """Parts of at most a band's rows into which `k` is cut."""
        return -(-self.k // self.tile_size[0])

    @property
    def passes_of_a_group(self) -> int:
        """Passes that add into the same PSUM."""
        return self.chunks * len(self.halves)

    @functools.cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Every pass, in order."""
        turns = np.ndindex(self.groups, self.chunks, len(self.halves))
        return tuple(self._pass(*map(int, turn)) for turn in turns)

    @property
    def occupied(self) -> float:
        """The part of the array's cells that hold a value, over all passes."""
        columns = min(self.m, PARTITIONS)
        held = self.tiles * self.k * columns * len(self.halves)
        return held / (self.groups * self.passes_of_a_group * PARTITIONS**2)

    def layout(self) -> np.ndarray:
        """`[passes, 128, 128]`: the tile in each cell of the array; -1 for none."""
        cells = np.full((len(self.passes), PARTITIONS, PARTITIONS), -1, np.int64)
        for number, one in enumerate(self.passes):
            for p in one.placements:
                rows = slice(p.row, p.row + p.rows)
                cells[number, rows, p.column : p.column + self.m] = p.tile
        return cells

    def _pass(self, group: int, chunk: int, half: int) -> Pass:
        size, first = self.tile_size[0], chunk * self.tile_size[0]
        tiles = range(group * len(self.positions), self.tiles)
        placements = tuple(
            Placement(tile, row, column, first, min(size, self.k - first))
            for tile, (row, column) in zip(tiles, self.positions, strict=False)
        )
        start = chunk == 0 and half == 0
        return Pass(group, start, self.halves[half], placements)


def plan_of(
    kind: str,
    tiles: int,
    k: int,
    m: int,
    tile_size: tuple[int, int] | None = None,
    positions: tuple[tuple[int, int], ...] | None = None,
    double_row: bool = True,
) -> ProbePlan:
    """The plan of a probe; bands are as small as they can be, and all are used.

    Args:
        kind: one of `KINDS`.
        tiles: how many small products there are.
        k: rows that each contracts.
        m: columns of each.
        tile_size: of a band; the smallest that holds a tile unless given.
        positions: the bands that a pass uses; as many as there are tiles for unless
            given.
        double_row: of a packed probe, whether both halves are loaded at once.
    """
    size = default_size(kind, k, m) if tile_size is None else tile_size
    if positions is None:
        count = min(tiles, PARTITIONS // min(size))
        step = (0, size[1]) if kind == "column" else (size[0], 0)
        positions = tuple((i * step[0], i * step[1]) for i in range(count))
    halves = ((0,),) if kind != "packed" else ((0, 1),) if double_row else ((0,), (1,))
    return ProbePlan(kind, tiles, k, m, size, positions, halves)


def default_size(kind: str, k: int, m: int) -> tuple[int, int]:
    """The smallest band that holds the rows or columns of a tile; the whole array if
    none does."""
    asked = m if kind == "column" else k
    fit = next((size for size in SIZES if size >= asked), PARTITIONS)
    return (PARTITIONS, fit) if kind == "column" else (fit, PARTITIONS)
