"""The macros of a program as a graph: who reads whose results."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from neuronjax.tools.draw_graph_flow import INPUTS, MacroNode, flow_of
from neuronjax.tools.draw_graph_fold import Box, Folded, fold
from neuronjax.tools.trace import Trace


@dataclasses.dataclass(frozen=True)
class MacroGraph:
    """The macros of a trace and the edges between them.

    An edge leads to a macro from the last macros whose results it reads, directly or
    through other operations; what follows from other edges is left out. Layers that
    repeat are folded: the first stands for all.

    Attributes:
        trace: whose graph it is.
        nodes: every macro, in the order of emission, numbered from 1; one in a loop
            once.
        folded: what is drawn of them.
    """

    trace: Trace
    nodes: tuple[MacroNode, ...]
    folded: Folded

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of numbers, the second reads the first's result; 0 is the arguments."""
        return self.folded.edges

    @property
    def carried(self) -> tuple[tuple[int, int], ...]:
        """Such pairs that lead from one repetition to the next."""
        return self.folded.carried

    @functools.cached_property
    def lines(self) -> tuple[int, ...]:
        """For each node the number of its row in the table, from 0."""
        rows = [dataclasses.replace(row, count=0) for row in self.trace.rows]
        alike = (dataclasses.replace(node.row, count=0) for node in self.nodes)
        return tuple(rows.index(row) for row in alike)

    def __str__(self) -> str:
        return self.__rich__().plain

    def __rich__(self) -> Any:
        """The list that `rich` prints: each macro and where its operands come from."""
        from rich.text import Text  # a picture only: `import neuronjax` stays quick

        text = Text("\n").join(self._lines(self.folded.items, ""))
        ends = ", ".join(map(_told, self.folded.results)) or "no macro"
        return text.append(f"\nresults ← {ends}", "dim")

    @property
    def width(self) -> int:
        """Characters of a line in a terminal."""
        return max(map(len, str(self).splitlines()))

    def _lines(self, items: "tuple[int | Box, ...]", indent: str) -> Iterator[Any]:
        from rich.text import Text

        for item in items:
            if isinstance(item, Box):
                yield Text(f"{indent}┌ {item.title}", "bold")
                yield from self._lines(item.items, indent + "│ ")
                yield Text(f"{indent}└")
                continue
            before = [_told(a) for a, b in self.edges if b == item]
            before += [f"⟲{a}" for a, b in self.carried if b == item]
            node = self.nodes[item - 1]
            line = Text(f"{indent}{item:>3} ").append(node.row.name, "bold")
            line.append(f" {', '.join(node.outputs)}")
            yield line.append(f" ← {', '.join(before)}" if before else "", "dim")

    def svg(self, *, standalone: bool = True) -> str:
        """The picture as SVG; it follows the reader's light or dark theme.

        Args:
            standalone: whether it carries its own style; a page may hold one for all.
        """
        from neuronjax.tools.draw_graph_svg import svg

        return svg({"": self}, standalone=standalone)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the picture to an `.svg` file.

        Raises:
            ValueError: the file's name ends otherwise.
        """
        GraphPicture({"": self}).save(path)


@dataclasses.dataclass(frozen=True)
class GraphPicture:
    """Graphs under each other.

    Attributes:
        graphs: by title.
    """

    graphs: Mapping[str, MacroGraph]

    @property
    def width(self) -> int:
        """Characters of a line in a terminal."""
        return max(graph.width for graph in self.graphs.values())

    def __str__(self) -> str:
        return self.__rich__().plain

    def __rich__(self) -> Any:
        """The lists that `rich` prints."""
        from rich.text import Text

        parts = []
        for title, graph in self.graphs.items():
            parts.append(Text(f"{title}\n", "bold").append_text(graph.__rich__()))
        return Text("\n\n").join(parts)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the picture to an `.svg` file.

        Raises:
            ValueError: the file's name ends otherwise.
        """
        from neuronjax.tools.draw_graph_svg import svg

        path = pathlib.Path(path)
        if path.suffix != ".svg":
            raise ValueError(
                f"draw: a graph is written as SVG: expected a name that ends in .svg, "
                f"got {path}"
            )
        path.write_text(svg(self.graphs), "utf-8")


def macro_graph(trace: Trace, *, fold_repeated: bool = True) -> MacroGraph:
    """The graph of a trace; `trace.graph` is the same.

    Args:
        trace: what `neuronjax.trace` returned.
        fold_repeated: whether layers that repeat are drawn once; loops always are.

    Returns:
        The macros, and who reads whose results.

    Raises:
        ValueError: the table was not made by `neuronjax.trace`.

    Example:
        >>> import jax, neuronjax
        >>> x = jax.ShapeDtypeStruct((4, 64), "float32")
        >>> scale = jax.ShapeDtypeStruct((64,), "float32")
        >>> twice = lambda x, s: neuronjax.rms_norm(neuronjax.rms_norm(x, s) * 2, s)
        >>> print(neuronjax.trace(twice, x, scale).graph)
          1 NeuronReduceMacro f32[4,64], f32[4,1] ← arguments
          2 NeuronReduceMacro f32[4,64], f32[4,1] ← 1
        results ← 2
    """
    if trace.jaxpr is None:
        raise ValueError("graph: expected a table that neuronjax.trace made, got rows")
    flow = flow_of(trace.jaxpr)
    return MacroGraph(trace, flow.nodes, fold(flow, fold_repeated))


def _told(number: int) -> str:
    return "arguments" if number == INPUTS else str(number)
