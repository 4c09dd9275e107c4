"""Where the boxes and lines of a macro graph lie.

Layer by layer from the arguments down, each box of repetitions arranged by itself and
then placed as one cell: a line that leaves a box does so through a port in its border.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from neuronjax.tools.draw_graph_flow import INPUTS
from neuronjax.tools.draw_graph_fold import Box, Folded

RESULTS = -1  # stands for the results, where an edge ends
_ACROSS, _DOWN, _PAD, _TITLE, _LANE = 26.0, 34.0, 18.0, 22.0, 12.0
_SWEEPS = 8

Key = tuple[str, int]
Point = tuple[float, float]


class Frame(NamedTuple):
    """A rectangle with words in its corner."""

    x: float
    y: float
    width: float
    height: float
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """The way of an edge.

    Attributes:
        points: straight from the first to the second, in a curve to the third, straight
            to the fourth, and so on.
        arrow: whether it ends at a macro, not in a border.
    """

    points: tuple[Point, ...]
    arrow: bool


@dataclasses.dataclass
class Layout:
    """A drawing of a graph.

    Attributes:
        width: of all.
        height: of all.
        nodes: by number; `INPUTS` and `RESULTS` too.
        frames: of the boxes, outer ones first.
        lines: of the edges.
        loops: of the edges that lead to the next turn, as corners.
    """

    width: float = 0
    height: float = 0
    nodes: dict[int, Frame] = dataclasses.field(default_factory=dict)
    frames: list[Frame] = dataclasses.field(default_factory=list)
    lines: list[Line] = dataclasses.field(default_factory=list)
    loops: list[tuple[Point, ...]] = dataclasses.field(default_factory=list)


def arrange(graph: Folded, size_of: Callable[[int], tuple[float, float]]) -> Layout:
    """Places every macro of `graph`, whose sizes `size_of` tells."""
    edges = [*graph.edges, *((number, RESULTS) for number in graph.results)]
    ends = {number for edge in edges for number in edge} & {INPUTS, RESULTS}
    first, last = (tuple({end} & ends) for end in (INPUTS, RESULTS))
    root = Box("", (*first, *graph.items, *last))
    level = _Level(root, edges, graph.carried, size_of)
    layout = Layout(level.width, level.height)
    level.place(layout, 0, 0)
    return layout


@dataclasses.dataclass
class _Cell:
    """A macro, a box, a port, or where a long line passes a layer."""

    width: float
    height: float
    layer: int = 0
    x: float = 0
    y: float = 0


class _Link(NamedTuple):
    """A line between cells of one level, and where it begins and ends in them."""

    start: Key
    end: Key
    dx_start: float
    dx_end: float
    via: tuple[Key, ...] = ()


class _Level:
    """What one box holds, arranged."""

    def __init__(
        self,
        box: Box,
        edges: Sequence[tuple[int, int]],
        carried: Sequence[tuple[int, int]],
        size_of: Callable[[int], tuple[float, float]],
    ) -> None:
        self.title, self._cells = box.title, {}
        self._children: dict[Key, _Level] = {}
        self._home: dict[int, Key] = {}
        for index, item in enumerate(box.items):
            if isinstance(item, Box):
                key = "box", index
                child = _Level(item, edges, carried, size_of)
                self._children[key] = child
                self._cells[key] = _Cell(child.width, child.height)
                self._home |= dict.fromkeys(item.numbers, key)
            else:
                key = "node", item
                self._cells[key] = _Cell(*size_of(item))
                self._home[item] = key
        home = self._home
        self._links = list(dict.fromkeys(self._local(edges)))
        self._carried = [
            (a, b)
            for a, b in carried
            if a in home
            and b in home
            and (home[a] != home[b] or home[a] not in self._children)
        ]
        self._set_layers()
        self._pass_layers()
        self._set_x()
        self._set_y()

    def _local(self, edges: Iterable[tuple[int, int]]) -> Iterable[_Link]:
        """The part of each edge that lies here, with a port where it leaves."""
        for a, b in edges:
            start, end = self._home.get(a), self._home.get(b)
            if start is None and end is None or start == end:
                continue
            if start is None:
                start = "in", b
                self._cells.setdefault(start, _Cell(1, 0))
            if end is None:
                end = "out", a
                self._cells.setdefault(end, _Cell(1, 0))
            yield _Link(start, end, self._dx(start, "out", a), self._dx(end, "in", b))

    def _dx(self, key: Key, way: str, number: int) -> float:
        """Where a line of `number` meets the border of a cell."""
        if key in self._children:
            return self._children[key].port(way, number)
        return self._cells[key].width / 2

    def port(self, way: str, number: int) -> float:
        """Where the lines of `number` cross the border."""
        return self._cells[way, number].x

    def _set_layers(self) -> None:
        entries = any(way == "in" for way, _ in self._cells)
        for (way, _), cell in self._cells.items():
            cell.layer = int(entries and way != "in")
        order = {key: i for i, key in enumerate(self._cells)}
        # Macros stand in the order of emission: the start of a link is settled first.
        inner = [link for link in self._links if link.end[0] != "out"]
        for link in sorted(inner, key=lambda link: order[link.end]):
            end = self._cells[link.end]
            end.layer = max(end.layer, self._cells[link.start].layer + 1)
        last = max(cell.layer for cell in self._cells.values())
        for (way, _), cell in self._cells.items():
            if way == "out":
                cell.layer = last + 1

    def _pass_layers(self) -> None:
        """Gives a link that is longer than one layer a cell in each that it passes."""
        numbers = itertools.count()
        for index, link in enumerate(self._links):
            start, end = self._cells[link.start].layer, self._cells[link.end].layer
            via = []
            for layer in range(start + 1, end):
                key = "via", next(numbers)
                self._cells[key] = _Cell(4, 0, layer)
                via.append(key)
            self._links[index] = link._replace(via=tuple(via))

    def _layers(self) -> list[list[Key]]:
        count = max(cell.layer for cell in self._cells.values()) + 1
        layers: list[list[Key]] = [[] for _ in range(count)]
        for key, cell in self._cells.items():
            layers[cell.layer].append(key)
        return layers

    def _set_x(self) -> None:
        """Sweeps down and up: each cell goes to the middle of those it is linked to."""
        above: dict[Key, list[tuple[Key, float]]] = {key: [] for key in self._cells}
        below: dict[Key, list[tuple[Key, float]]] = {key: [] for key in self._cells}
        for link in self._links:
            stops = [link.start, *link.via, link.end]
            for one, two in itertools.pairwise(stops):
                out = link.dx_start if one == link.start else 2
                come = link.dx_end if two == link.end else 2
                below[one].append((two, come - out))
                above[two].append((one, out - come))
        layers = self._layers()
        for layer in layers:
            self._spread(layer, {})
        for sweep in range(_SWEEPS):
            near, rows = (above, layers) if sweep % 2 == 0 else (below, layers[::-1])
            for layer in rows:
                self._spread(layer, near)
        left = min(cell.x for cell in self._cells.values())
        for cell in self._cells.values():
            cell.x += _PAD - left
        right = max(cell.x + cell.width for cell in self._cells.values())
        self.width = right + _PAD + _LANE * len(self._carried)
        self.width = max(self.width, 2 * _PAD + 8 * len(self.title))

    def _spread(self, layer: list[Key], near: dict[Key, list]) -> None:
        """Puts cells as near to where they want to be as they do not overlap."""
        cells, wanted = self._cells, {}
        for key in layer:
            places = [cells[other].x + dx for other, dx in near.get(key, [])]
            wanted[key] = sum(places) / len(places) if places else cells[key].x
        if near:
            layer.sort(key=lambda key: wanted[key] + cells[key].width / 2)
        right, edge = [], -math.inf
        for key in layer:
            edge = max(edge, wanted[key])
            right.append(edge)
            edge += cells[key].width + _ACROSS
        edge = math.inf
        for key, pushed in zip(reversed(layer), reversed(right), strict=True):
            edge = min(edge - cells[key].width - _ACROSS, wanted[key])
            # The mean of two arrangements without overlaps has none.
            cells[key].x = (pushed + edge) / 2

    def _set_y(self) -> None:
        layers = self._layers()
        self._bottoms, self._tops, y = [], [], 0.0
        for index, layer in enumerate(layers):
            ports = {key[0] for key in layer} & {"in", "out"}
            if index == 0 and not ports:
                y = _PAD + (_TITLE if self.title else 0)
            elif index and not ports and self._is_port(layers[index - 1]):
                y = _PAD + _TITLE
            self._tops.append(y)
            high = max(self._cells[key].height for key in layer)
            for key in layer:
                self._cells[key].y = y
            self._bottoms.append(y + high)
            y += high + _DOWN
        self.height = self._bottoms[-1]
        self.height += 0 if self._is_port(layers[-1]) else _PAD

    @staticmethod
    def _is_port(layer: list[Key]) -> bool:
        return any(way in ("in", "out") for way, _ in layer)

    def place(self, layout: Layout, x: float, y: float) -> None:
        """Writes all that lies here into `layout`, moved to `(x, y)`."""
        if self.title:
            layout.frames.append(Frame(x, y, self.width, self.height, self.title))
        for key, cell in self._cells.items():
            if key in self._children:
                self._children[key].place(layout, x + cell.x, y + cell.y)
            elif key[0] == "node":
                frame = Frame(x + cell.x, y + cell.y, cell.width, cell.height)
                layout.nodes[key[1]] = frame
        for link in self._links:
            points = tuple((x + a, y + b) for a, b in self._points(link))
            layout.lines.append(Line(points, link.end[0] == "node"))
        right = x + self.width - _PAD / 2
        for lane, (a, b) in enumerate(self._carried):
            start, end = layout.nodes[a], layout.nodes[b]
            low = start.y + start.height * 0.7
            high = end.y + end.height * 0.3
            far = right - _LANE * lane
            corners = (start.x + start.width, low), (far, low), (far, high)
            layout.loops.append((*corners, (end.x + end.width, high)))

    def _points(self, link: _Link) -> Iterable[Point]:
        start, end = self._cells[link.start], self._cells[link.end]
        yield start.x + link.dx_start, start.y + start.height
        yield start.x + link.dx_start, self._bottoms[start.layer]
        for key in link.via:
            cell = self._cells[key]
            yield cell.x + 2, self._tops[cell.layer]
            yield cell.x + 2, self._bottoms[cell.layer]
        yield end.x + link.dx_end, end.y
