"""Two macro tables side by side."""

import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from neuronjax.tools.tables_that_fit import NARROW
from neuronjax.tools.trace import MacroRow, Trace, trace

_MARKS = {"same": "", "count": "≠", "changed": "≠", "only a": "<", "only b": ">"}
_UNITS = ("count", "MFLOP", "MB")
_STYLES = {"same": "dim", "count": "yellow", "changed": "yellow"}
_STYLES |= {"only a": "red", "only b": "green"}


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """Alike macros of two tables, or those of one NAME that differ.

    Attributes:
        name: the macro NAME.
        a: the row of the first table; `None` where only the second has it.
        b: the row of the second; `None` where only the first has it.
    """

    name: str
    a: MacroRow | None
    b: MacroRow | None

    @property
    def sides(self) -> tuple[list[MacroRow], list[MacroRow]]:
        """What each table has."""
        return [self.a] if self.a else [], [self.b] if self.b else []

    @property
    def kind(self) -> str:
        """`"same"`, `"count"`, `"changed"`, `"only a"` or `"only b"`."""
        if self.b is None:
            return "only a"
        if self.a is None:
            return "only b"
        if self.a == self.b:
            return "same"
        return "count" if _alike(self.a) == _alike(self.b) else "changed"

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs besides the count, such as `"eps 1e-06 → 1e-05"`."""
        if self.a is None or self.b is None:
            return ()
        return tuple(_changes(self.a, self.b))


@dataclasses.dataclass(frozen=True)
class Difference:
    """What `neuronjax.diff` returns: true where the tables differ.

    Attributes:
        a: the first table.
        b: the second.
        rows: the macros of both, NAME by NAME.
        titles: what the two are called.
    """

    a: Trace
    b: Trace
    rows: tuple[DiffRow, ...]
    titles: tuple[str, str] = ("A", "B")

    @property
    def differing(self) -> tuple[DiffRow, ...]:
        """The rows that are not the same in both."""
        return tuple(row for row in self.rows if row.kind != "same")

    def __bool__(self) -> bool:
        """Whether anything differs, as `diff` of two files says."""
        return bool(self.differing)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """The table that `rich` prints, in which a NAME is never folded."""
        yield self._narrow() if options.max_width < NARROW else self._wide()

    def _wide(self) -> Any:
        from rich.table import Table  # a picture only: `import neuronjax` stays quick

        table = Table(title=self._title())
        for column in ("", "NAME", "operands", "config"):
            table.add_column(column, overflow="fold")
        for unit in _UNITS:
            for title in self.titles:
                table.add_column(f"{unit} {title}", justify="right", overflow="fold")
        for row in self.rows:
            numbers = itertools.chain(*_numbers(*row.sides))
            table.add_row(*_words(row), *numbers, style=_STYLES[row.kind])
        table.add_section()
        totals = itertools.chain(*_numbers(self.a.rows, self.b.rows))
        table.add_row("", "all", "", "", *totals)
        return table

    def _narrow(self) -> Any:
        """Operands and config stand below the NAME, both sides in one column."""
        from rich.table import Table

        table = Table(title=self._title(), show_lines=True)
        for column in ("", "NAME"):
            table.add_column(column, overflow="fold")
        for unit in _UNITS:
            table.add_column(unit, justify="right", overflow="fold")
        for row in self.rows:
            mark, *words = _words(row)
            numbers = map(_both, _numbers(*row.sides))
            text = "\n".join(filter(None, words))
            table.add_row(mark, text, *numbers, style=_STYLES[row.kind])
        table.add_row("", "all", *map(_both, _numbers(self.a.rows, self.b.rows)))
        return table

    def __str__(self) -> str:
        """The table as text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(self)
        return text.getvalue().rstrip()

    def _title(self) -> str:
        names = " and ".join(self.titles)
        if not self:
            return f"{names} emit the same macros"
        count = len(self.differing)
        return f"{names} differ in {count} row{'s' if count > 1 else ''}"


def diff(
    a: Callable | Trace,
    b: Callable | Trace,
    *args: Any,
    titles: tuple[str, str] = ("A", "B"),
    **kwargs: Any,
) -> Difference:
    """Lays the macros of two functions side by side; nothing runs.

    Rows of one NAME with the same operands and config stand together, whatever their
    counts are; what is left of a NAME is paired in the order in which it was emitted.

    Args:
        a: a function, or its `neuronjax.trace`.
        b: the other.
        *args: what both functions are called with; `jax.ShapeDtypeStruct`s will do.
        titles: what the two are called in the table.
        **kwargs: the same, by name.

    Returns:
        The rows, true where any differs: counts, operands, config, FLOPs and bytes, and
        what only one has. `print` and `rich.print` show them.

    Raises:
        ValueError: arguments are given, and both `a` and `b` are tables already.

    Example:
        >>> import functools, jax, neuronjax
        >>> x = jax.ShapeDtypeStruct((4, 64), "float32")
        >>> scale = jax.ShapeDtypeStruct((64,), "float32")
        >>> other = functools.partial(neuronjax.rms_norm, eps=1e-5)
        >>> difference = neuronjax.diff(neuronjax.rms_norm, other, x, scale)
        >>> [(row.name, row.kind, row.changes) for row in difference.differing]
        [('NeuronReduceMacro', 'changed', ('eps 1e-06 → 1e-05',))]
        >>> bool(neuronjax.diff(neuronjax.rms_norm, neuronjax.rms_norm, x, scale))
        False
    """
    given = bool(args or kwargs)
    if given and isinstance(a, Trace) and isinstance(b, Trace):
        raise ValueError("diff: arguments are for functions, got two tables with some")
    first, second = (
        x if isinstance(x, Trace) else trace(x, *args, **kwargs) for x in (a, b)
    )
    names = dict.fromkeys([*first.names, *second.names])
    rows = [row for name in names for row in _paired(name, first, second)]
    return Difference(first, second, tuple(rows), titles)


def _paired(name: str, a: Trace, b: Trace) -> Iterator[DiffRow]:
    theirs = {_alike(row): row for row in b.rows if row.name == name}
    left = []
    for row in a.rows:
        if row.name != name:
            continue
        if (twin := theirs.pop(_alike(row), None)) is not None:
            yield DiffRow(name, row, twin)
        else:
            left.append(row)
    for mine, other in itertools.zip_longest(left, theirs.values()):
        yield DiffRow(name, mine, other)


def _alike(row: MacroRow) -> MacroRow:
    return dataclasses.replace(row, count=0)


def _changes(a: MacroRow, b: MacroRow) -> Iterator[str]:
    mine, theirs = dict(a.config), dict(b.config)
    for key in dict.fromkeys([*mine, *theirs]):
        one, other = mine.get(key, "absent"), theirs.get(key, "absent")
        if one != other:
            yield f"{key} {one} → {other}"
    if a.tiled != b.tiled:
        yield f"{_form(a)} → {_form(b)}"
    if a.vmapped != b.vmapped:
        yield f"vmap {a.vmapped} → {b.vmapped}"


def _form(row: MacroRow) -> str:
    return "tiles" if row.tiled else "tensors"


def _words(row: DiffRow) -> tuple[str, ...]:
    """Mark, NAME, operands and config."""
    a, b = row.a or row.b, row.b or row.a
    assert a is not None and b is not None
    shapes = _shapes(a)
    if _shapes(b) != shapes:
        shapes = f"{shapes} → {_shapes(b)}"
    config = ", ".join(row.changes if row.kind == "changed" else _config(a))
    text = (shapes.replace("[", r"\["), config.replace("[", r"\["))
    return _MARKS[row.kind], row.name, *text


def _shapes(row: MacroRow) -> str:
    return ", ".join(row.shapes) + " vmap" * row.vmapped


def _config(row: MacroRow) -> Iterator[str]:
    return (f"{key}={value}" for key, value in row.config)


def _numbers(a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """Counts, MFLOPs and MBs, each of both sides; an absent side is empty."""
    yield _count(a), _count(b)
    for unit in ("flops", "bytes"):
        yield _millions(a, unit), _millions(b, unit)


def _count(rows: Sequence[MacroRow]) -> str:
    return str(sum(row.count for row in rows)) if rows else ""


def _millions(rows: Sequence[MacroRow], unit: str) -> str:
    total = sum(row.count * getattr(row, unit) for row in rows) / 1e6
    return f"{total:.3g}" if rows else ""


def _both(numbers: tuple[str, str]) -> str:
    """One number where both sides have it, else the first → the second."""
    a, b = numbers
    return a if a == b else f"{a or '-'} → {b or '-'}"
