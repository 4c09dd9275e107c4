"""What each query sees, as text in a terminal and as an image in a file."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_COLORS = {"prior": "#4477aa", "cache": "#4477aa", "new": "#ee7733", "sink": "#ddaa33"}
_KEYS = "#228833"
_UNSEEN = "#eeeeee"


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
class Picture:
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

    def __str__(self) -> str:
        return self.__rich__().plain

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
        image = np.where(self.seen[..., None], seen, to_rgb(_UNSEEN))
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

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the picture to a file that matplotlib can write: `.png`, `.svg`.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the file's ending is none that matplotlib knows.
        """
        module = figure_module()
        rows, columns = self.weights.shape
        size = (min(3.5 + 0.22 * columns, 16), min(1.5 + 0.22 * rows, 16))
        figure = module.Figure(figsize=size, layout="constrained")
        self.draw(figure.add_subplot())
        write_figure(figure, path)


def write_figure(figure: Any, path: str | pathlib.Path) -> None:
    """Writes a figure: what an `.svg` says is text, and the same each time."""
    from matplotlib import rc_context

    svg = pathlib.Path(path).suffix == ".svg"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "neuronjax"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if svg else None)


def figure_module() -> Any:
    """`matplotlib.figure`, or one line that says how to get it."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError(
            "a picture in a file needs matplotlib: pip install matplotlib",
            name=error.name,
        ) from None
    return figure
