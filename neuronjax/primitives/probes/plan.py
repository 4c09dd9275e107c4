"""The plan of a matmul probe, as a user asks for it, and what it refuses."""

from typing import Any

from neuronjax.kernels.hw_ubench.plan import (
    KINDS,
    PARTITIONS,
    SIZES,
    ProbePlan,
    plan_of,
)
from neuronjax.primitives.kinds import described, is_count, is_flag

Pair = tuple[int, int]


def probe_plan(
    kind: str,
    tiles: int,
    k: int,
    m: int,
    *,
    tile_size: Pair | None = None,
    tile_position: Pair | tuple[Pair, ...] | None = None,
    double_row: bool = True,
) -> ProbePlan:
    """Says which small product lies in which band of the array, pass by pass.

    `"row"` cuts the 128 rows, which are contracted, into bands of 32, 64 or 128;
    `"column"` the 128 columns, each of which gives a row of the result; `"packed"` cuts
    the rows, and loads two logical rows into each. Tile `t` lies in band `t % P` of
    group `t // P`, with `P` the bands that are used. More rows than a band has are
    several passes of one PSUM group: the first overwrites, the others add.

    Args:
        kind: `"row"`, `"column"` or `"packed"`.
        tiles: how many small products there are.
        k: rows that each contracts; of double rows, the physical ones.
        m: columns of each stationary operand, at most those of a band.
        tile_size: rows and columns of a band. The smallest that holds a tile unless
            given.
        tile_position: row and column of the bands that a pass uses, one pair or
            several: multiples of the band's size. All bands unless given.
        double_row: of a packed probe: both halves are loaded at once; otherwise each
            is a pass of its own.

    Returns:
        A `ProbePlan`: its `passes`, each with its `group`, whether it `start`s it, and
        a placement for each tile; which part of the array is `occupied`; the `layout()`
        of every cell.

    Raises:
        ValueError: a setting is none of these; a band lies outside of the array or over
            another one.

    Source:
        The emitters of the compiler's `hw_ubench` probes have these settings; nothing
        public defines what a batch does, which is this project's own.

    Example:
        >>> plan = probe_plan("row", tiles=6, k=30, m=128)
        >>> plan.tile_size, [len(one.placements) for one in plan.passes]
        ((32, 128), [4, 2])
        >>> [(p.tile, p.row) for p in plan.passes[1].placements]
        [(4, 0), (5, 32)]
        >>> [one.start for one in probe_plan("column", tiles=2, k=300, m=64).passes]
        [True, False, False]
    """
    if kind not in KINDS:
        raise ValueError(f"probe_plan: kind must be one of {KINDS}, got {kind!r}")
    for name, value in dict(tiles=tiles, k=k, m=m).items():
        if not is_count(value):
            raise ValueError(
                f"probe_plan: {name} must be a positive integer, got {described(value)}"
            )
    if not is_flag(double_row):
        raise ValueError(
            f"probe_plan: double_row must be True or False, got {described(double_row)}"
        )
    sizes = int(tiles), int(k), int(m)
    odd = odd_size(kind, tile_size)
    if not odd:
        band = plan_of(kind, *sizes, pair_of(tile_size)).tile_size
        odd = odd_columns(sizes[2], band)
        odd = odd or odd_positions(tile_position, band, sizes[0])
    if odd:
        raise ValueError(f"probe_plan: {odd}")
    places = pairs_of(tile_position)
    return plan_of(kind, *sizes, pair_of(tile_size), places, bool(double_row))


def is_pair(value: Any) -> bool:
    """Whether `value` is two integers of at least 0."""
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(is_count(x, 0) for x in value)


def pair_of(value: Any) -> Pair | None:
    """A pair as the plan takes it."""
    return None if value is None else (int(value[0]), int(value[1]))


def pairs_of(value: Any) -> tuple[Pair, ...] | None:
    """One position or several, as the plan takes them."""
    if value is None:
        return None
    pairs = [value] if is_pair(value) else value
    return tuple((int(row), int(column)) for row, column in pairs)


def odd_size(kind: str, size: Any) -> str:
    """What is wrong with the size of a band; "" if nothing is."""
    cut = "columns" if kind == "column" else "rows"
    whole = "rows" if kind == "column" else "columns"
    if size is None:
        return ""
    if is_pair(size):
        rows, columns = (size[1], size[0]) if kind == "column" else size
        if rows in SIZES and columns == PARTITIONS:
            return ""
    shown = tuple(size) if is_pair(size) else described(size)
    return (
        f"tile_size must be (rows, columns) with 32, 64 or 128 {cut} and all 128 "
        f"{whole}, got {shown}"
    )


def odd_columns(m: Any, size: Pair) -> str:
    """What is wrong with more columns than a band has; "" if nothing is."""
    if not isinstance(m, int) or m <= size[1]:
        return ""
    return f"m must be at most {size[1]}, the columns of a band of {size}, got {m}"


def odd_positions(positions: Any, size: Pair, tiles: Any) -> str:
    """The first band that does not lie where bands can, by its tile; "" if all do."""
    if positions is None or is_pair(positions):
        positions = [] if positions is None else [positions]
    elif (
        not isinstance(positions, tuple | list)
        or not positions
        or not all(map(is_pair, positions))
    ):
        return (
            "tile_position must be (row, column), or a tuple of them, of integers of "
            f"at least 0, got {described(positions)}"
        )
    if isinstance(tiles, int) and len(positions) > tiles:
        return f"tile_position gives {len(positions)} bands to {tiles} tiles"
    for number, place in enumerate(positions):
        shown = tuple(map(int, place))
        if any(at % step for at, step in zip(place, size, strict=True)):
            return f"tile {number} at {shown} must lie at multiples of its size {size}"
        if any(at + step > PARTITIONS for at, step in zip(place, size, strict=True)):
            return (
                f"tile {number} at {shown} of size {size} must lie inside the "
                f"{PARTITIONS} x {PARTITIONS} array"
            )
        for other, taken in enumerate(positions[:number]):
            if tuple(taken) == tuple(place):
                return f"tile {number} at {shown} overlaps tile {other} there"
    return ""
