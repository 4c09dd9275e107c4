"""Pictures of the matmul probes: which tile lies where in the array, pass by pass."""

import dataclasses
from typing import Any

import numpy as np

from neuronjax.kernels.hw_ubench.plan import PARTITIONS, ProbePlan
from neuronjax.primitives.probes.plan import probe_plan
from neuronjax.tools.drawing import COLORS, EMPTY, Drawing

MOST_PASSES = 48
ROWS, COLUMNS = 8, 4  # of the array, for a character
ABREAST = 3  # passes beside each other in a terminal
_GAP = 12  # empty columns between passes in an image
_WIDE = PARTITIONS // COLUMNS
_LEGEND = (
    f"a character is {ROWS} rows (down) and {COLUMNS} columns of the array: the last "
    "digit of the tile there, · for none"
)


@dataclasses.dataclass(frozen=True)
class ProbePicture(Drawing):
    """The passes of a probe.

    Attributes:
        plan: what is drawn.
    """

    plan: ProbePlan

    @property
    def title(self) -> str:
        """The sizes in words."""
        plan, passes = self.plan, len(self.plan.passes)
        rows = f"2 x {plan.k}" if plan.kind == "packed" else f"{plan.k}"
        words = f"{plan.kind}: {plan.tiles} tile{'s' * (plan.tiles != 1)} of {rows} x "
        words += f"{plan.m} in bands of {plan.tile_size[0]} x {plan.tile_size[1]}: "
        words += f"{passes} pass{'es' * (passes != 1)}, "
        return words + f"{plan.occupied:.0%} of the array"

    def __rich__(self):
        """The picture that `rich` prints."""
        from rich.text import Text  # a picture only: `import neuronjax` stays quick

        lines = [Text(self.title, "bold"), Text(_LEGEND, "dim")]
        cells = self._characters()
        for first in range(0, len(cells), ABREAST):
            shown = range(first, min(first + ABREAST, len(cells)))
            labels = [self._label(i).ljust(_WIDE) for i in shown]
            lines.append(Text("  ".join(labels), "dim"))
            for row in range(PARTITIONS // ROWS):
                line = Text()
                for i in shown:
                    line.append("  " if i > first else "")
                    for tile in cells[i, row]:
                        line.append(*_mark(tile))
                lines.append(line)
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)

    def _label(self, number: int) -> str:
        one, halves = self.plan.passes[number], self.plan.halves
        half = f", half {one.halves[0]}" if len(halves) > 1 else ""
        turn = "starts" if one.start else "adds"
        return f"pass {number}, group {one.group} {turn}{half}"

    def _characters(self) -> np.ndarray:
        """`[passes, lines, characters]`: a tile of each character's cells, or -1."""
        blocks = (-1, PARTITIONS // ROWS, ROWS, _WIDE, COLUMNS)
        return self.plan.layout().reshape(blocks).max((2, 4))

    def draw(self, axes: Any) -> None:
        """Draws the arrays of all passes into `axes` of matplotlib, side by side."""
        from matplotlib.colors import to_rgb

        named = (*COLORS, EMPTY, "#ffffff")
        colors = np.array([to_rgb(color) for color in named])
        layout = self.plan.layout()
        index = np.where(layout < 0, len(COLORS), layout % len(COLORS))
        apart = np.pad(index, ((0, 0), (0, 0), (0, _GAP)), constant_values=-1)
        axes.imshow(colors[np.concatenate(apart, 1)], interpolation="none")
        step = PARTITIONS + _GAP
        for number, one in enumerate(self.plan.passes):
            for p in one.placements:
                columns = min(self.plan.m, PARTITIONS)
                at = number * step + p.column + columns / 2, p.row + p.rows / 2
                axes.text(*at, p.tile, ha="center", va="center")
        middles = [number * step + PARTITIONS / 2 for number in range(len(layout))]
        labels = [self._label(i).replace(", ", "\n") for i in range(len(layout))]
        axes.set_xticks(middles, labels)
        axes.set(ylabel="row of the array")
        axes.set_title(self.title, loc="left", fontsize="medium", wrap=True)

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the image."""
        return min(1.5 + 1.8 * len(self.plan.passes), 60), 3


def probe_picture(
    kind: str,
    tiles: int,
    k: int,
    m: int = PARTITIONS,
    *,
    size: int | None = None,
    at: list[int] | None = None,
    double_row: bool = True,
) -> ProbePicture:
    """Which tile of a probe lies where in the array, pass by pass.

    Args:
        kind: `"row"`, `"column"` or `"packed"`.
        tiles: how many small products there are.
        k: rows that each contracts; of double rows, the physical ones.
        m: columns of each.
        size: rows of a band, of `"column"` its columns.
        at: the first row, of `"column"` the first column, of each band that is used.
        double_row: of a packed probe: both halves share a pass.

    Returns:
        The picture of `probe_plan`.

    Raises:
        ValueError: `probe_plan` refuses a setting, or there are more passes than a
            picture can show.

    Example:
        >>> lines = str(probe_picture("row", 3, 64, 64, at=[64])).splitlines()
        >>> lines[0]
        'row: 3 tiles of 64 x 64 in bands of 64 x 128: 3 passes, 25% of the array'
        >>> [line[:20] for line in lines[10:12]]
        ['····················', '0000000000000000····']
    """
    across = kind == "column"
    band = (
        None if size is None else (PARTITIONS, size) if across else (size, PARTITIONS)
    )
    places = None if at is None else tuple((0, x) if across else (x, 0) for x in at)
    plan = probe_plan(
        *(kind, tiles, k, m),
        tile_size=band,
        tile_position=places,
        double_row=double_row,
    )
    passes = plan.groups * plan.passes_of_a_group
    if passes > MOST_PASSES:
        raise ValueError(
            f"draw: a picture shows at most {MOST_PASSES} passes, got {passes} for "
            f"tiles = {tiles} and k = {k}"
        )
    return ProbePicture(plan)


def _mark(tile: int) -> tuple[str, str]:
    if tile < 0:
        return "·", "dim"
    return str(tile % 10), COLORS[tile % len(COLORS)]
