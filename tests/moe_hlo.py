"""Where a compiled program's collectives stand: once, or in the body of a loop."""

import collections
import re
from typing import NamedTuple

import jax

KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\(")
_CALLED = re.compile(r"(\w+)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_CALLS = {
    "body",
    "condition",
    "calls",
    "to_apply",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
}


class Collectives(NamedTuple):
    """How often each kind stands in the program, by where it runs."""

    in_loops: dict[str, int]
    once: dict[str, int]


def collectives(fun, *args) -> Collectives:
    """Counts the collectives of `fun(*args)` as compiled."""
    computations = _computations(jax.jit(fun).lower(*args).compile().as_text())
    bodies = {
        name
        for lines in computations.values()
        for key, name in _calls(lines)
        if key == "body"
    }
    looped = _reached(bodies, computations)
    counts = collections.Counter(), collections.Counter()
    for name, lines in computations.items():
        found = (kind for line in lines for kind in _OPERATION.findall(line))
        counts[name not in looped].update(found)
    return Collectives(*map(dict, counts))


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = found.setdefault(head[1], [])
        else:
            lines.append(line)
    return found


def _calls(lines: list[str]) -> list[tuple[str, str]]:
    return [
        (key, name.strip().lstrip("%"))
        for line in lines
        for key, many, one in _CALLED.findall(line)
        if key in _CALLS
        for name in (many or one).split(",")
    ]


def _reached(names: set[str], computations: dict[str, list[str]]) -> set[str]:
    """`names` and whatever they call."""
    seen, left = set(), list(names)
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += [called for _, called in _calls(computations.get(name, []))]
    return seen
