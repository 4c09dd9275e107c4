"""What `gradcheck` found, and the table that `rich` prints of it."""

import dataclasses
import io
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The derivatives of one macro.

    Attributes:
        name: its NAME, or the variant's label.
        forward: relative error of forward mode; `None` where there is no derivative.
        reverse: that of the worst operand in reverse mode.
        second: that of the second derivative.
        operand: the worst operand of reverse mode, counted among the float ones.
        tolerance: the largest error that passes.
        against: what they are compared with; the reason where there is no derivative.
    """

    name: str
    forward: float | None
    reverse: float | None
    second: float | None
    operand: int | None
    tolerance: float
    against: str

    @property
    def errors(self) -> tuple[float, ...]:
        """The three errors; none where there is no derivative."""
        found = self.forward, self.reverse, self.second
        return tuple(error for error in found if error is not None)

    def __bool__(self) -> bool:
        return all(error <= self.tolerance for error in self.errors)


@dataclasses.dataclass(frozen=True)
class Gradcheck:
    """The derivatives of macros; true if every one passes.

    Attributes:
        rows: one a macro.
        tolerance: the largest error that passes.
    """

    rows: tuple[Gradient, ...]
    tolerance: float

    def __bool__(self) -> bool:
        return all(self.rows)

    @property
    def failed(self) -> tuple[Gradient, ...]:
        """The macros with a derivative that does not pass."""
        return tuple(row for row in self.rows if not row)

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from rich.table import Table

        passed = sum(map(bool, self.rows))
        title = f"{passed} of {len(self.rows)} macros pass, within {self.tolerance:g}"
        table = Table(title=title)
        table.add_column("NAME", overflow="fold")
        for column in ("forward", "reverse", "second order"):
            table.add_column(column, justify="right")
        table.add_column("worst operand", justify="right")
        table.add_column("against", overflow="fold")
        table.add_column("")
        for row in self.rows:
            errors = [f"{error:.1e}" for error in row.errors] or ["-"] * 3
            operand = "-" if row.operand is None else str(row.operand)
            verdict = "pass" if row else "FAIL"
            style = None if row else "bold red"
            cells = row.name, *errors, operand, row.against, verdict
            table.add_row(*cells, style=style)
        return table

    def __str__(self) -> str:
        """The same as plain text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return text.getvalue().rstrip()
