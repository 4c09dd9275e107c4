"""Two macro tables side by side."""

import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from neuronjax.tools.trace import MacroRow, Trace, trace

_MARKS = {"same": "", "count": "≠", "changed": "≠", "only a": "<", "only b": ">"}
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

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from rich.table import Table  # a picture only: `import neuronjax` stays quick

        table = Table(title=self._title())
        for column in ("", "NAME", "operands", "config"):
            table.add_column(column, overflow="fold")
        for unit in ("count", "MFLOP", "MB"):
            for title in self.titles:
                table.add_column(f"{unit} {title}", justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(*_cells(row), style=_STYLES[row.kind])
        table.add_section()
        table.add_row("", "all", "", "", *_numbers(self.a.rows, self.b.rows))
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


def _cells(row: DiffRow) -> tuple[str, ...]:
    a, b = row.a or row.b, row.b or row.a
    assert a is not None and b is not None
    shapes = _shapes(a)
    if _shapes(b) != shapes:
        shapes = f"{shapes} → {_shapes(b)}"
    config = ", ".join(row.changes if row.kind == "changed" else _config(a))
    numbers = _numbers([row.a] if row.a else [], [row.b] if row.b else [])
    text = (shapes.replace("[", r"\["), config.replace("[", r"\["))
    return _MARKS[row.kind], row.name, *text, *numbers


def _shapes(row: MacroRow) -> str:
    return ", ".join(row.shapes) + " vmap" * row.vmapped


def _config(row: MacroRow) -> Iterator[str]:
    return (f"{key}={value}" for key, value in row.config)


def _numbers(a: Any, b: Any) -> Iterator[str]:
    """Counts, MFLOPs and MBs of both sides."""
    sides = (a, b)
    yield from (str(sum(r.count for r in rows)) if rows else "" for rows in sides)
    for unit in ("flops", "bytes"):
        for rows in sides:
            total = sum(r.count * getattr(r, unit) for r in rows) / 1e6
            yield f"{total:.3g}" if rows else ""
