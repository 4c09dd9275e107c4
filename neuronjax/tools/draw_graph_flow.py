"""Which macro's results reach which macro, through the operations between them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from neuronjax.primitives import registry
from neuronjax.tools.trace import (
    MacroRow,
    Manual,
    inner_jaxprs,
    manual_inside,
    repeats,
    row_of,
)

INPUTS = 0  # stands for the arguments, where an edge begins
Sources = frozenset[int]
_NONE: Sources = frozenset()


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around macros.

    Attributes:
        path: the equation that holds it, as indices from the outermost jaxpr.
        title: such as `"scan ×30"`.
    """

    path: tuple[int, ...]
    title: str


@dataclasses.dataclass(frozen=True)
class MacroNode:
    """A macro of a graph.

    Attributes:
        number: its place in the order of emission, from 1.
        row: what the table says of it; `count` is how often it runs.
        outputs: the results, such as `"f32[2,64]"`.
        loops: those that it stands in, outermost first.
    """

    number: int
    row: MacroRow
    outputs: tuple[str, ...]
    loops: tuple[Loop, ...]


@dataclasses.dataclass(frozen=True)
class Flow:
    """The macros of a jaxpr and the edges between them.

    An edge that follows from others is left out: where the result of A reaches C, and B
    between them reads A and is read by C, there are A to B and B to C alone.

    Attributes:
        nodes: the macros, in the order of emission.
        edges: pairs of numbers, the second reads what the first wrote; `INPUTS` first
            where it reads arguments alone.
        carried: the same from one turn of a loop to the next.
        results: the numbers of those that reach the results.
    """

    nodes: tuple[MacroNode, ...]
    edges: tuple[tuple[int, int], ...]
    carried: tuple[tuple[int, int], ...]
    results: tuple[int, ...]


def flow_of(jaxpr: Jaxpr) -> Flow:
    """The macros of `jaxpr` and of all that it holds."""
    walk = _Walk()
    given = [frozenset({INPUTS})] * len(jaxpr.invars)
    outs = walk.jaxpr(jaxpr, given, _Place((), (), 1, None))
    # Loops took numbers too.
    new = {old: i for i, old in enumerate([INPUTS, *walk.nodes])}
    nodes = [dataclasses.replace(n, number=new[k]) for k, n in walk.nodes.items()]

    def renumbered(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((new[a], new[b]) for a, b in pairs))

    edges, carried = renumbered(walk.edges), renumbered(walk.carried)
    results = tuple(sorted(new[out] for out in walk.union(outs)))
    return Flow(tuple(nodes), edges, carried, results)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a jaxpr stands."""

    path: tuple[int, ...]
    loops: tuple[Loop, ...]
    times: int
    mesh: Manual | None

    def inside(self, eqn: JaxprEqn, index: int, branch: int = 0) -> "_Place":
        path, loops, kind = (*self.path, index, branch), self.loops, eqn.primitive.name
        if kind == "scan":
            loops = (*loops, Loop(path, f"scan ×{eqn.params['length']}"))
        elif kind == "while" and branch:
            loops = (*loops, Loop(path, "while"))
        mesh = manual_inside(eqn, self.mesh)
        return _Place(path, loops, self.times * repeats(eqn), mesh)


class _Walk:
    """Follows values through jaxprs: of each, the macros that it comes from."""

    def __init__(self) -> None:
        self.nodes: dict[int, MacroNode] = {}
        self.edges: set[tuple[int, int]] = set()
        self.carried: set[tuple[int, int]] = set()
        self._before: dict[int, int] = {INPUTS: 0}  # ancestors, as bits
        self._numbers = itertools.count(1)

    def union(self, values: Iterable[Sources]) -> Sources:
        """All sources, but those that another one of them has read."""
        found = _NONE.union(*values)
        if len(found) < 2:
            return found
        read = functools.reduce(int.__or__, (self._before[n] for n in found))
        return frozenset(n for n in found if not read >> n & 1)

    def jaxpr(self, jaxpr: Jaxpr, given: Sequence[Sources], at: _Place) -> list:
        """The sources of the results, from those of the arguments."""
        values: dict[Any, Sources] = dict(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Sources:
            return _NONE if isinstance(atom, Literal) else values.get(atom, _NONE)

        for index, eqn in enumerate(jaxpr.eqns):
            outs = self._equation(eqn, [read(x) for x in eqn.invars], at, index)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, given: list[Sources], at: _Place, index: int
    ) -> Sequence[Sources]:
        family = registry.PRIMITIVES.get(eqn.primitive)
        if family is not None:
            row = dataclasses.replace(row_of(eqn, family, at.mesh), count=at.times)
            outputs: list[Any] = [v.aval for v in eqn.outvars]
            shapes = tuple(out.str_short(short_dtypes=True) for out in outputs)
            number = self._add(self.union(given))
            self.nodes[number] = MacroNode(number, row, shapes, at.loops)
            return [frozenset({number})] * len(eqn.outvars)
        kind = eqn.primitive.name
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if kind in special:
            return special[kind](eqn, given, at, index)
        return self._call(eqn, given, at, index)

    def _add(self, sources: Sources) -> int:
        number = next(self._numbers)
        self.edges.update((source, number) for source in sources)
        bits = (self._before[source] | 1 << source for source in sources)
        self._before[number] = functools.reduce(int.__or__, bits, 0)
        return number

    def _call(self, eqn, given, at, index) -> Sequence[Sources]:
        """An operation, or a function whose arguments are those of the equation."""
        everything = self.union(given)
        found, inners = [everything], list(inner_jaxprs(eqn))
        for branch, inner in enumerate(inners):
            alike = len(inners) == 1 and len(inner.invars) == len(given)
            handed = given if alike else [everything] * len(inner.invars)
            outs = self.jaxpr(inner, handed, at.inside(eqn, index, branch))
            if alike and len(outs) == len(eqn.outvars):
                return outs
            found += outs
        return [self.union(found)] * len(eqn.outvars)

    def _cond(self, eqn, given, at, index) -> Sequence[Sources]:
        which, *operands = given
        branches = [
            self.jaxpr(closed.jaxpr, operands, at.inside(eqn, index, branch))
            for branch, closed in enumerate(eqn.params["branches"])
        ]
        return [self.union([which, *outs]) for outs in zip(*branches, strict=True)]

    def _scan(self, eqn, given, at, index) -> Sequence[Sources]:
        consts, count = _scan_sizes(eqn.params)
        body = functools.partial(
            self.jaxpr, eqn.params["jaxpr"].jaxpr, at=at.inside(eqn, index)
        )
        held, first, xs = _split(given, consts, count)
        return self._loop(lambda carry: body([*held, *carry, *xs]), first)

    def _while(self, eqn, given, at, index) -> Sequence[Sources]:
        params, sizes = eqn.params, (eqn.params["cond_nconsts"],)
        of_cond, of_body, first = _split(given, *sizes, params["body_nconsts"])
        condition = params["cond_jaxpr"].jaxpr
        body = params["body_jaxpr"].jaxpr

        def turn(carry: list[Sources]) -> list[Sources]:
            self.jaxpr(condition, [*of_cond, *carry], at.inside(eqn, index))
            return self.jaxpr(body, [*of_body, *carry], at.inside(eqn, index, 1))

        # A loop that never turns gives what it was given.
        outs = self._loop(turn, first)
        return [self.union(pair) for pair in zip(outs, first, strict=True)]

    def _loop(
        self, turn: Callable[[list[Sources]], list[Sources]], first: Sequence[Sources]
    ) -> list[Sources]:
        """One turn, whose carries also come from the turn before.

        A number stands for what each carry brings from there, until the turn's end
        tells which macros it comes from.
        """
        brought = {next(self._numbers): i for i in range(len(first))}
        self._before |= dict.fromkeys(brought, 0)
        start = min(brought, default=0)
        carry = [x | {n} for x, n in zip(first, brought, strict=True)]
        outs = turn(carry)

        def told(sources: Sources, seen: Sources) -> Sources:
            known = sources - brought.keys()
            for n in (sources & brought.keys()) - seen:
                known |= told(outs[brought[n]], seen | {n})
            return known

        for source, reader in [edge for edge in self.edges if edge[0] in brought]:
            self.edges.remove((source, reader))
            for writer in told(frozenset({source}), _NONE):
                if writer > start:
                    self.carried.add((writer, reader))
        return [self.union([told(out, _NONE)]) for out in outs]


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries a scan has."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(consts), len(carry)


def _split(values: Sequence[Sources], *sizes: int) -> list[Sequence[Sources]]:
    """Cut into parts of these sizes, and the rest."""
    ends = list(itertools.accumulate(sizes, initial=0))
    pairs = zip(ends, [*ends[1:], None], strict=True)
    return [values[start:end] for start, end in pairs]
