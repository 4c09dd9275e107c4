"""What every picture is: text in a terminal, an image in a file."""

import abc
import pathlib
from typing import Any

COLORS = ("#4477aa", "#228833", "#ccbb44", "#ee6677", "#66ccee", "#aa3377")
EMPTY = "#eeeeee"


class Drawing(abc.ABC):
    """A picture, of which a class says the text, the image and its size."""

    @abc.abstractmethod
    def __rich__(self) -> Any:
        """The picture that `rich` prints."""

    @abc.abstractmethod
    def draw(self, axes: Any) -> None:
        """Draws into `axes` of matplotlib."""

    @property
    @abc.abstractmethod
    def inches(self) -> tuple[float, float]:
        """Width and height of the image."""

    def __str__(self) -> str:
        return self.__rich__().plain

    @property
    def width(self) -> int:
        """Characters of a line in a terminal."""
        return max(map(len, str(self).splitlines()))

    def fill(self, figure: Any) -> None:
        """Draws into a figure of matplotlib."""
        self.draw(figure.add_subplot())

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the picture to a file that matplotlib can write: `.png`, `.svg`.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the file's ending is none that matplotlib knows.
        """
        figure = _figure_module().Figure(figsize=self.inches, layout="constrained")
        self.fill(figure)
        write_figure(figure, path)


def write_figure(figure: Any, path: str | pathlib.Path) -> None:
    """Writes a figure: what an `.svg` says is text, and the same each time."""
    from matplotlib import rc_context

    svg = pathlib.Path(path).suffix == ".svg"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "neuronjax"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if svg else None)


def _figure_module() -> Any:
    """`matplotlib.figure`, or one line that says how to get it."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError(
            "a picture in a file needs matplotlib: pip install matplotlib",
            name=error.name,
        ) from None
    return figure
