"""What `verify` found, and the table that `rich` prints of it."""

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

from neuronjax.tools.tables_that_fit import Fitting
from neuronjax.tools.verify.comparison import Comparison, Worst

_COLUMNS = ("output", "worst element", "partition, chunk", "f", "float64")
_NUMBERS = ("|error|", "relative", "plain |error|", "ulps")
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True)
class Verification:
    """Every output of a function against its float64 reference.

    It is true when each output errs at most twice what the plain computation errs.

    Attributes:
        function: what was verified.
        against: what it was compared with.
        outputs: a comparison for each output.
        notes: what a reader has to know beside the numbers.
    """

    function: str
    against: str
    outputs: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(self.outputs)

    @property
    def failed(self) -> tuple[Comparison, ...]:
        """The outputs that err more than twice what the plain computation errs."""
        return tuple(output for output in self.outputs if not output)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self:
            return "every output errs at most twice what plain jnp errs"
        names = ", ".join(output.name for output in self.failed)
        return f"errs more than twice what plain jnp errs: {names}"

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from rich.console import Group

        tables = Fitting(self._errors()), Fitting(self._histogram())
        return Group(*tables, *self._words())

    def __str__(self) -> str:
        """The same as plain text, 120 columns wide or less."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return text.getvalue().rstrip()

    def _errors(self) -> Any:
        from rich.table import Table

        table = Table(title=f"{self.function} against {self.against}")
        for column in _COLUMNS:
            table.add_column(column, overflow="fold")
        for column in (*_NUMBERS, "within 2x"):
            table.add_column(column, justify="right")
        for output in self.outputs:
            table.add_row(*_cells(output), style=None if output else "bold red")
        return table

    def _histogram(self) -> Any:
        from rich.table import Table

        table = Table(title="elements by distance from float64, in ulps")
        for column in ("output", "dtype", "elements"):
            table.add_column(column)
        floats = [output for output in self.outputs if output.ulps]
        for column in floats[0].ulps if floats else ():
            table.add_column(column, justify="right")
        table.add_column("")
        for output in self.outputs:
            counts = list(output.ulps.values())
            told = map(str, counts) if counts else _unlike(output, len(table.columns))
            row = output.name, str(output.dtype), _shape(output), *told, _bars(counts)
            table.add_row(*row)
        return table

    def _words(self) -> Iterator[Any]:
        from rich.text import Text

        for note in self.notes:
            yield Text(f"note: {note}")
        yield Text(self.verdict, style="green" if self else "bold red")


def _cells(output: Comparison) -> tuple[str, ...]:
    verdict = "yes" if output else "NO"
    plain = f"{output.plain_absolute:.3g}"
    if output.worst is None:
        return output.name, "none errs", "", "", "", "0", "0", plain, "0", verdict
    worst = output.worst
    return (
        output.name,
        f"[{', '.join(map(str, worst.index))}]".replace("[", r"\["),
        _tile(worst),
        f"{worst.got:.9g}",
        f"{worst.exact:.9g}",
        f"{worst.absolute:.3g}",
        f"{worst.relative:.3g}",
        plain,
        "-" if not output.ulps else str(worst.ulps),
        verdict,
    )


def _tile(worst: Worst) -> str:
    if worst.tile is None:
        return "-"
    return "{}, {}".format(*worst.tile)


def _shape(output: Comparison) -> str:
    return " x ".join(map(str, output.shape)) or "scalar"


def _unlike(output: Comparison, columns: int) -> list[str]:
    """What stands in place of counts for integers: how many differ."""
    return [f"{output.misplaced} differ", *[""] * max(columns - 5, 0)]


def _bars(counts: list[int]) -> str:
    most = max(counts, default=0)
    if not most:
        return ""
    return "".join(_BLOCKS[-(-count * 8 // most)] for count in counts)
