"""What `poison` found, and the table that `rich` prints of it."""

import collections
import dataclasses
import io
import threading
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Leak:
    """An output that was NaN though its equations do not see what was.

    Attributes:
        name: the macro NAME.
        output: which of its outputs.
        layer: how many macros of this NAME had run before it: in the first call of a
            model that has one a layer, the layer. Each device of a `shard_map`, and
            each element that `vmap` maps, counts as a run.
        elements: how many elements were bad.
        index: the first of them.
    """

    name: str
    output: str
    layer: int
    elements: int
    index: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} leaks into {self.output} in layer {self.layer}: "
            f"{self.elements} elements, the first at {list(self.index)}"
        )


@dataclasses.dataclass(frozen=True)
class _Run:
    """A macro that ran: where the traced program has it, and its leaks, in layer 0."""

    order: int
    name: str
    leaks: tuple[Leak, ...]


class Poisoning:
    """What happened in a `poison` block; true if macros ran and none leaked.

    Attributes:
        examined: how many macros of each NAME ran.
        filled: how many elements of each NAME's operands were NaN in its examination.
    """

    def __init__(self) -> None:
        self.examined: collections.Counter[str] = collections.Counter()
        self.filled: collections.Counter[str] = collections.Counter()
        self._runs: list[_Run] = []
        self._lock = threading.Lock()  # devices report at the same time

    def record(
        self,
        order: int,
        name: str,
        outputs: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        counts: Any,
        firsts: Any,
        filled: Any,
    ) -> None:
        """Enters one macro; what the traced program calls."""
        leaks = []
        for output, shape, count, first in zip(
            outputs, shapes, np.asarray(counts), np.asarray(firsts), strict=True
        ):
            if count:
                index = tuple(map(int, np.unravel_index(int(first), shape)))
                leaks.append(Leak(name, output, 0, int(count), index))
        with self._lock:
            self.examined[name] += 1
            self.filled[name] += int(filled)
            self._runs.append(_Run(order, name, tuple(leaks)))

    @property
    def leaks(self) -> list[Leak]:
        """In the order of the program."""
        found: list[Leak] = []
        before: collections.Counter[str] = collections.Counter()
        for run in _in_order(self._runs):
            layer = before[run.name]
            found += [dataclasses.replace(leak, layer=layer) for leak in run.leaks]
            before[run.name] += 1
        return found

    @property
    def first(self) -> Leak | None:
        """The first leak; `None` if no macro leaked."""
        return next(iter(self.leaks), None)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.first is not None:
            return str(self.first)
        if not self.examined:
            return "no macro ran"
        count = sum(self.filled.values())
        return f"no macro leaks; {count} unseen elements held NaN"

    def __bool__(self) -> bool:
        return bool(self.examined) and not self.leaks

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from rich.table import Table

        table = Table(title=self.verdict)
        table.add_column("NAME")
        for column in ("macros", "elements that held NaN", "leaks"):
            table.add_column(column, justify="right")
        for name, count in self.examined.items():
            leaks = sum(leak.name == name for leak in self.leaks)
            cells = name, str(count), str(self.filled[name]), str(leaks)
            table.add_row(*cells, style="bold red" if leaks else None)
        return table

    def __str__(self) -> str:
        """The same as plain text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return text.getvalue().rstrip()


def _in_order(runs: list[_Run]) -> list[_Run]:
    """As the program has them: examinations that do not wait for one another report
    in any order, but none twice before the others of its pass."""
    found: list[_Run] = []
    passed: dict[int, _Run] = {}
    for run in [*runs, None]:
        if run is None or run.order in passed:
            found += [passed[order] for order in sorted(passed)]
            passed = {}
        if run is not None:
            passed[run.order] = run
    return found
