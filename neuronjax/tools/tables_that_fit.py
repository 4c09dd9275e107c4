"""Tables that stay legible in a narrow terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from neuronjax.tools.trace import MacroRow

_ANY_WIDTH = 10_000
_AT_ONCE = 3  # rows that stand side by side in 80 columns
NARROW = 130  # columns, in which a NAME would be folded


@dataclasses.dataclass(frozen=True)
class Fitting:
    """A table that is turned where it is too wide: its rows stand side by side.

    Attributes:
        table: as it is where there is room; its first column names the rows.
    """

    table: Table

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """The tables that `rich` prints."""
        room = options.update(max_width=_ANY_WIDTH)
        if console.measure(self.table, options=room).maximum <= options.max_width:
            yield self.table
            return
        for first in range(0, self.table.row_count, _AT_ONCE):
            yield self._turned(slice(first, first + _AT_ONCE))

    def _turned(self, some: slice) -> Table:
        from rich.table import Table

        names, *columns = self.table.columns
        turned = Table(title=None if some.start else self.table.title)
        turned.add_column(names.header)
        for name, row in zip([*names.cells][some], self.table.rows[some], strict=True):
            turned.add_column(name, style=row.style, overflow="fold")
        for column in columns:
            turned.add_row(column.header, *[*column.cells][some])
        return turned


@dataclasses.dataclass(frozen=True)
class Macros:
    """The table of a trace, in which a NAME is never folded: operands and config stand
    below it where columns of their own would be too narrow.
    """

    rows: tuple[MacroRow, ...]

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """The table that `rich` prints."""
        from rich.table import Table

        count = sum(row.count for row in self.rows)
        narrow = options.max_width < NARROW
        title = f"{count} macro{'s' * (count != 1)}"
        table = Table(title=title, show_lines=narrow)
        words = ("tiled", "leaf", "count", "operands", "config")
        table.add_column("NAME", overflow="fold", no_wrap=not narrow)
        for column in ("count",) if narrow else words:
            table.add_column(column, overflow="fold")
        for column in ("MFLOP", "MB"):
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*(_short if narrow else _long)(row), *_numbers(row))
        yield table


def _long(row: MacroRow) -> tuple[str, ...]:
    tiled = "yes" if row.tiled else "no"
    return row.name, tiled, row.leaf, str(row.count), _operands(row), _config(row)


def _short(row: MacroRow) -> tuple[Any, ...]:
    from rich.text import Text

    name = row.name + (" (tiled)" if row.tiled else "")
    lines = "\n".join(filter(None, (_operands(row), _config(row))))
    return Text.assemble((name, "bold"), "\n", (lines, "dim")), str(row.count)


def _operands(row: MacroRow) -> str:
    return ", ".join(row.shapes) + " vmap" * row.vmapped


def _config(row: MacroRow) -> str:
    return ", ".join(f"{k}={v}" for k, v in row.config)


def _numbers(row: MacroRow) -> tuple[str, str]:
    return f"{row.flops / 1e6:.3g}", f"{row.bytes / 1e6:.3g}"
