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


class Poisoning:
    """What happened in a `poison` block; true if macros ran and none leaked.

    Attributes:
        leaks: in the order in which the macros ran.
        examined: how many macros of each NAME ran.
        filled: how many elements of each NAME's operands were NaN in its examination.
    """

    def __init__(self) -> None:
        self.leaks: list[Leak] = []
        self.examined: collections.Counter[str] = collections.Counter()
        self.filled: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()  # devices report at the same time

    def record(
        self,
        name: str,
        outputs: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        counts: Any,
        firsts: Any,
        filled: Any,
    ) -> None:
        """Enters one macro; what the traced program calls."""
        with self._lock:
            layer = self.examined[name]
            self.examined[name] += 1
            self.filled[name] += int(filled)
            for output, shape, count, first in zip(
                outputs, shapes, np.asarray(counts), np.asarray(firsts), strict=True
            ):
                if count:
                    index = tuple(map(int, np.unravel_index(int(first), shape)))
                    self.leaks.append(Leak(name, output, layer, int(count), index))

    @property
    def first(self) -> Leak | None:
        """The first leak; `None` if no macro leaked."""
        return self.leaks[0] if self.leaks else None

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
