"""What each query sees, as text in a terminal and as an image in a file."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronjax.tools.drawing import EMPTY, Drawing

_COLORS = {"prior": "#4477aa", "cache": "#4477aa", "new": "#ee7733", "sink": "#ddaa33"}
_KEYS = "#228833"


@dataclasses.dataclass(frozen=True)
class Part:
    """Neighbouring columns of one kind.

    Attributes:
        name: what they are, such as `"prior"`.
        columns: the number of each.
    """

    name: str
    columns: Sequence[int]

    @property
    def wide(self) -> int:
        """Characters of a line in a terminal."""
        return max(2 * len(self.columns), len(self.name)) + 2

    @property
    def color(self) -> str:
        """The colour of what is seen."""
        return _COLORS.get(self.name.split()[0], _KEYS)


@dataclasses.dataclass(frozen=True)
class Picture(Drawing):
    """What each query sees.

    Attributes:
        title: the call in words.
        weights: `[rows, columns]`, the weights of equal scores; the sink's last.
        rows: the position of each query.
        parts: the columns, in order.
    """

    title: str
    weights: np.ndarray
    rows: Sequence[int]
    parts: Sequence[Part]

    @property
    def seen(self) -> np.ndarray:
        """`[rows, columns]`, whether the query sees the key."""
        return self.weights > 0

    @property
    def width(self) -> int:
        """Characters of a line in a terminal."""
        return len(self._label(0)) + sum(part.wide for part in self.parts)

    def __rich__(self):
        """The picture that `rich` prints."""
        from rich.text import Text  # a picture only: `import neuronjax` stays quick

        margin = " " * len(self._label(0))
        lines = [Text(self.title, "bold"), Text(margin), Text(margin)]
        for part in self.parts:
            lines[1].append(part.name.ljust(part.wide), part.color)
            digits = "".join(f"{n % 10} " for n in part.columns)
            lines[2].append(digits.ljust(part.wide), "dim")
        for i, seen in enumerate(self.seen):
            line, at = Text(self._label(i), "dim"), 0
            for part in self.parts:
                for cell in seen[at : at + len(part.columns)]:
                    line.append(*(("■ ", part.color) if cell else ("· ", "dim")))
                at += len(part.columns)
                line.append(" " * (part.wide - 2 * len(part.columns)))
            lines.append(line)
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)

    def _label(self, row: int) -> str:
        wide = len(str(max(self.rows)))
        return f"query {self.rows[row]:>{wide}}  "

    def draw(self, axes: Any) -> None:
        """Draws into `axes` of matplotlib, one colour for each part."""
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Patch

        colors = [part.color for part in self.parts for _ in part.columns]
        seen = np.array([to_rgb(color) for color in colors])
        image = np.where(self.seen[..., None], seen, to_rgb(EMPTY))
        axes.imshow(image, aspect="auto", interpolation="none")
        for i in range(1, len(self.rows) if len(self.rows) <= 64 else 1):
            axes.axhline(i - 0.5, color="white", linewidth=0.5)
        edges = np.cumsum([len(part.columns) for part in self.parts])
        for j in range(1, len(colors)):
            if j in edges or len(colors) <= 64:
                thick = 2.5 if j in edges else 0.5
                axes.axvline(j - 0.5, color="white", linewidth=thick)
        columns = [n for part in self.parts for n in part.columns]
        for axis, names in ((axes.xaxis, columns), (axes.yaxis, self.rows)):
            step = -(-len(names) // 16)
            axis.set_ticks(range(0, len(names), step), list(names)[::step])
        kinds = {part.color: part.name.split()[0] for part in self.parts}
        patches = [Patch(color=color, label=name) for color, name in kinds.items()]
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set(xlabel="key", ylabel="query")
        axes.set_title(self.title, loc="left", fontsize="medium", wrap=True)

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the image."""
        rows, columns = self.weights.shape
        return min(3.5 + 0.22 * columns, 16), min(1.5 + 0.22 * rows, 16)
