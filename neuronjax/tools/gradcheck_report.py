"""What `gradcheck` found, and the table that `rich` prints of it."""

import dataclasses
import io
from typing import Any

COLUMNS = "", "forward", "reverse", "second", "operand", "NAME", "against"
JUSTIFY = "left", "right", "right", "right", "right", "left", "left"
LINE = "{:4}  {:>7}  {:>7}  {:>7}  {:>7}  {}  ({})"
HEAD = LINE.format(*COLUMNS)


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
        raised: the error, where the check did not come to an end.
    """

    name: str
    forward: float | None
    reverse: float | None
    second: float | None
    operand: int | None
    tolerance: float
    against: str
    raised: str | None = None

    @property
    def errors(self) -> tuple[float, ...]:
        """The three errors; none where there is no derivative."""
        found = self.forward, self.reverse, self.second
        return tuple(error for error in found if error is not None)

    def __bool__(self) -> bool:
        few = all(error <= self.tolerance for error in self.errors)
        return few and self.raised is None

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        errors = [f"{error:.1e}" for error in self.errors] or ["-"] * 3
        operand = "-" if self.operand is None else str(self.operand)
        verdict = "pass" if self else "FAIL"
        return verdict, *errors, operand, self.name, self.raised or self.against

    @property
    def line(self) -> str:
        """The same on a line of its own, under `HEAD`."""
        return LINE.format(*self.cells)


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

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        passed = sum(map(bool, self.rows))
        return f"{passed} of {len(self.rows)} macros pass, within {self.tolerance:g}"

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self.verdict)
        for column, justify in zip(COLUMNS, JUSTIFY, strict=True):
            table.add_column(column, justify=justify, overflow="fold")
        for row in self.rows:
            style = None if row else "bold red"
            table.add_row(*map(escape, row.cells), style=style)
        return table

    def __str__(self) -> str:
        """The same as plain text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return text.getvalue().rstrip()
