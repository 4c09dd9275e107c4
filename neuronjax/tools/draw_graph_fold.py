"""Layers that repeat are drawn once."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

from neuronjax.tools.draw_graph_flow import Flow, MacroNode

LEAST = 4  # macros that are worth a fold


@dataclasses.dataclass(frozen=True)
class Box:
    """Macros that run several times.

    Attributes:
        title: such as `"×30"` or `"scan ×30"`.
        items: numbers of macros, and boxes, in the order of emission.
    """

    title: str
    items: "tuple[int | Box, ...]"

    @property
    def numbers(self) -> Iterator[int]:
        """Of all macros in it."""
        return _numbers(self.items)


@dataclasses.dataclass(frozen=True)
class Folded:
    """A flow whose repetitions are boxes.

    Attributes:
        items: numbers of macros, and boxes.
        edges: those between the macros that are left.
        carried: those from one repetition, or turn of a loop, to the next.
        results: the macros that reach the results.
    """

    items: "tuple[int | Box, ...]"
    edges: tuple[tuple[int, int], ...]
    carried: tuple[tuple[int, int], ...]
    results: tuple[int, ...]


def fold(flow: Flow, repetitions: bool = True) -> Folded:
    """Boxes of loops and, if wanted, of macros that follow each other again and again.

    What repeats are the rows (NAME, operands, config) and the results' shapes. The
    first repetition stands for all; an edge that leads to another one's macro leads to
    the first one's.
    """
    items = _boxes(flow.nodes, 0)
    same = {node.number: node.number for node in flow.nodes} | {0: 0}
    if repetitions:
        items = _folded(items, _Keys(flow.nodes), same)
    edges, carried = set(), {(same[a], same[b]) for a, b in flow.carried}
    for a, b in flow.edges:
        pair = same[a], same[b]
        (edges if pair[0] < pair[1] else carried).add(pair)
    results = {same[number] for number in flow.results}
    return Folded(
        items, tuple(sorted(edges)), tuple(sorted(carried)), tuple(sorted(results))
    )


def _boxes(nodes: Sequence[MacroNode], depth: int) -> "tuple[int | Box, ...]":
    """A box for each loop; what a loop holds was emitted without a break."""
    found: list[int | Box] = []
    at = 0
    while at < len(nodes):
        loops, end = nodes[at].loops, at + 1
        if len(loops) == depth:
            found.append(nodes[at].number)
        else:
            loop = loops[depth]
            while end < len(nodes) and nodes[end].loops[depth : depth + 1] == (loop,):
                end += 1
            found.append(Box(loop.title, _boxes(nodes[at:end], depth + 1)))
        at = end
    return tuple(found)


class _Keys:
    """Small numbers that are equal where macros, or boxes of them, are alike."""

    def __init__(self, nodes: Sequence[MacroNode]) -> None:
        self._known: dict[Hashable, int] = {}
        self._nodes = {
            node.number: self._small((node.row, node.outputs)) for node in nodes
        }

    def __call__(self, item: "int | Box") -> int:
        if isinstance(item, int):
            return self._nodes[item]
        return self._small((item.title, tuple(map(self, item.items))))

    def _small(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))


def _folded(
    items: "Sequence[int | Box]", key: Callable, same: dict[int, int]
) -> "tuple[int | Box, ...]":
    items = [
        Box(item.title, _folded(item.items, key, same))
        if isinstance(item, Box)
        else item
        for item in items
    ]
    keys, found, at = [key(item) for item in items], [], 0
    while at < len(items):
        period, times = _longest(keys, at)
        block = tuple(items[at : at + period])
        found += [Box(f"×{times}", block)] if times > 1 else block
        for turn in range(1, times):
            start = at + turn * period
            again = _numbers(items[start : start + period])
            same |= zip(again, _numbers(block), strict=True)
        at += period * times
    # A number inside a folded block may have been folded before.
    for number, first in same.items():
        same[number] = same[first]
    return tuple(found)


def _longest(keys: Sequence[int], at: int) -> tuple[int, int]:
    """Length of the block that repeats from `at`, and how often; `(1, 1)` if none."""
    best, covered = (1, 1), LEAST - 1
    for period in range(1, (len(keys) - at) // 2 + 1):
        end = at + period
        while end < len(keys) and keys[end] == keys[end - period]:
            end += 1
        times = (end - at) // period
        if times > 1 and period * times > covered:
            best, covered = (period, times), period * times
    return best


def _numbers(items: "Sequence[int | Box]") -> Iterator[int]:
    for item in items:
        if isinstance(item, Box):
            yield from item.numbers
        else:
            yield item
