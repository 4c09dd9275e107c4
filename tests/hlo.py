"""What a compiled program says: its collectives, its sizes, and what waits for what.

Device numbers are positions in the mesh, `mesh.devices.ravel()`, whatever the devices'
own numbers are. A loop's body, and a computation that a loop calls, counts once.
"""

import collections
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np

KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()
Groups = frozenset[frozenset[int]]

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_TYPE = re.compile(r"\b(pred|(?:f|bf|s|u|c)\d\w*)\[([\d,]*)\]")
_NOTES = re.compile(r", (?:metadata|backend_config)=\{")
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


class Operation(NamedTuple):
    """One line of a computation."""

    computation: str
    name: str
    kind: str
    types: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The computations that it calls, each with the word for how."""
        return [
            (key, name.strip().lstrip("%"))
            for key, many, one in _CALLED.findall(self.attributes)
            if key in _CALLS
            for name in (many or one).split(",")
        ]


class Collective(NamedTuple):
    """One collective: who exchanges, how much one device puts in, and where it runs."""

    kind: str
    groups: Groups
    bytes: int
    in_loop: bool
    operation: Operation


class Places(NamedTuple):
    """How often each kind stands in the program, by where it runs."""

    in_loops: dict[str, int]
    once: dict[str, int]


class Program:
    """A compiled program, read from its text."""

    def __init__(self, text: str):
        self.text = text
        self.computations = _computations(text)

    def find(self, *kinds: str) -> list[Operation]:
        """The operations of these kinds, as the program lists them."""
        lists = self.computations.values()
        return [op for ops in lists for op in ops.values() if op.kind in kinds]

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Every collective, as the program lists them."""
        bodies = {name for op in self.find("while") for _, name in op.calls}
        looped = self._reached(bodies)
        return [
            Collective(
                op.kind,
                groups_of(op.attributes),
                sum(map(_bytes, self._operand_types(op))),
                op.computation in looped,
                op,
            )
            for op in self.find(*KINDS)
        ]

    def counts(self, groups: Groups | None = None) -> dict[str, int]:
        """How often each kind stands in it; with `groups`, between those devices."""
        kept = (c for c in self.collectives if groups in (None, c.groups))
        return dict(collections.Counter(c.kind for c in kept))

    def places(self) -> Places:
        """The counts in loops and outside of them."""
        counted = collections.Counter(), collections.Counter()
        for c in self.collectives:
            counted[not c.in_loop][c.kind] += 1
        return Places(*map(dict, counted))

    def products(self) -> list[Operation]:
        """Matrix products, each as the operation of the entry that computes it."""
        return [op for op in self.entry.values() if self.holds(op, "dot")]

    def holds(self, op: Operation, kind: str) -> bool:
        """Whether `op` is of a kind, or calls something that is."""
        inside = self._reached({name for _, name in op.calls})
        called = (x for name in inside for x in self.computations[name].values())
        return op.kind == kind or any(x.kind == kind for x in called)

    @property
    def entry(self) -> dict[str, Operation]:
        """The computation that the program starts with: it is listed last."""
        return self.computations[next(reversed(self.computations))]

    def needs(self, op: Operation) -> set[str]:
        """The names of all that `op` waits for, in its computation."""
        own, seen, left = self.computations[op.computation], set(), [op.name]
        while left:
            found = own[left.pop()]
            before = re.search(r"control-predecessors=\{([^}]*)\}", found.attributes)
            earlier = [x.strip(" %") for x in before[1].split(",")] if before else []
            left += [x for x in (*found.operands, *earlier) if x not in seen]
            seen |= {*found.operands, *earlier}
        return seen

    def large(self, elements: int) -> set[tuple[int, ...]]:
        """The shapes with at least so many elements, anywhere in the program."""
        return {shape for _, shape in _types(self.text) if math.prod(shape) >= elements}

    def _operand_types(self, op: Operation) -> list[tuple]:
        own = self.computations[op.computation]
        return [x for name in op.operands for x in own[name].types]

    def _reached(self, names: set[str]) -> set[str]:
        """`names` and whatever they call."""
        seen, left = set(), list(names)
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                ops = self.computations[name].values()
                left += [called for op in ops for _, called in op.calls]
        return seen


def program(fun: Any, *args: Any) -> Program:
    """`fun(*args)` as compiled."""
    return Program(_compiled(fun, args).as_text())


def collectives(fun: Any, *args: Any) -> dict[str, int]:
    """How often each collective stands in `fun(*args)` as compiled."""
    return program(fun, *args).counts()


def temporaries(fun: Any, *args: Any) -> int:
    """Bytes of the temporary buffers of `fun(*args)`, on one device."""
    return _compiled(fun, args).memory_analysis().temp_size_in_bytes


def along(mesh: jax.sharding.Mesh, *axes: str) -> Groups:
    """The devices that exchange when a collective runs over these axes of a mesh."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    where = [mesh.axis_names.index(axis) for axis in axes]
    last = np.moveaxis(places, where, range(-len(where), 0))
    size = math.prod(mesh.shape[axis] for axis in axes)
    return _frozen(last.reshape(-1, size))


def groups_of(attributes: str) -> Groups:
    """Which devices exchange with each other, in any of the four ways to write it."""
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        return _connected(_lists(pairs[1]))
    if lists := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return _frozen(_lists(lists[1]))
    iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(iota, attributes):
        shape, sizes, order = (_numbers(x or "") for x in found.groups())
        places = np.arange(math.prod(sizes)).reshape(sizes)
        return _frozen(places.transpose(order or None).reshape(shape))
    if named := re.search(r"replica_groups=mesh\[([^]]+)\] \{([^}:]*)\}", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", named[2])]
        places = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        last = np.moveaxis(places, axes, range(-len(axes), 0))
        return _frozen(last.reshape(-1, math.prod(places.shape[i] for i in axes)))
    raise ValueError(f"groups of devices that this cannot read: {attributes}")


def _compiled(fun: Any, args: tuple) -> Any:
    call = fun if hasattr(fun, "lower") else jax.jit(fun)
    return call.lower(*args).compile()


def _frozen(groups: Any) -> Groups:
    return frozenset(frozenset(map(int, group)) for group in groups)


def _connected(pairs: list[tuple[int, ...]]) -> Groups:
    """The devices that are connected by permutes, over however many hops."""
    groups: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set(pair).union(*(groups.get(i, ()) for i in pair))
        groups |= dict.fromkeys(joined, joined)
    return _frozen(groups.values())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def _lists(text: str) -> list[tuple[int, ...]]:
    return [_numbers(x) for x in re.findall(r"\{([\d,]+)\}", text)]


def _types(text: str) -> list[tuple[str, tuple[int, ...]]]:
    found = _TYPE.findall(text)
    return [(name, _numbers(shape)) for name, shape in found]


def _bytes(type_: tuple[str, tuple[int, ...]]) -> int:
    name, shape = type_
    bits = 8 if name == "pred" or "8" in name[:2] else int(re.findall(r"\d+", name)[0])
    return math.prod(shape) * bits // 8


def _computations(text: str) -> dict[str, dict[str, Operation]]:
    found: dict[str, dict[str, Operation]] = {}
    last, entry = "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            last = head[2]
            entry = last if head[1] else entry
            found[last] = {}
        elif last and (name := _NAME.match(line)):
            op = _operation(last, name[2], line[name.end() :])
            found[last][op.name] = op
    return found | {entry: found.pop(entry)} if entry else found


def _operation(computation: str, name: str, text: str) -> Operation:
    """`type kind(operands), attributes`; a type may be a tuple in brackets."""
    end = _closed(text) if text[0] == "(" else text.index(" ")
    types, rest = _types(text[:end]), text[end:].lstrip()
    kind, _, _ = rest.partition("(")
    inner = rest[len(kind) :]
    stop = _closed(inner)
    operands = tuple(re.findall(r"%([\w.\-]+)", inner[:stop]))
    attributes = _NOTES.split(inner[stop:])[0]
    kind = kind.removesuffix("-start")
    return Operation(computation, name, kind, tuple(types), operands, attributes)


def _closed(text: str) -> int:
    """Where the bracket that `text` opens with is closed."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"a bracket stays open: {text[:80]}")
