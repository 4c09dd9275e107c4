"""What a function emits: the table of its macros."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from neuronjax.primitives import registry
from neuronjax.primitives.macro import MacroFamily

if TYPE_CHECKING:
    from neuronjax.tools.draw_graph import MacroGraph


@dataclasses.dataclass(frozen=True)
class MacroRow:
    """Alike macros of a trace.

    Attributes:
        name: the macro NAME.
        leaf: the module that holds its math.
        tiled: whether its operands are tiles.
        count: how often it runs; one inside a scan counts times the scan's length.
        shapes: the operands, such as `"f32[2,64]"`.
        config: the config bag.
        vmapped: how many axes `vmap` added.
        flops: of the matrix products of one, each masked block counted as if it ran.
        bytes: of the operands and outputs of one.
        dtype: the one that most bytes of the operands have.
    """

    name: str
    leaf: str
    tiled: bool
    count: int
    shapes: tuple[str, ...]
    config: tuple[tuple[str, Any], ...]
    vmapped: int
    flops: int
    bytes: int
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The macros of a function, in the order in which they first appear.

    Attributes:
        rows: one for all macros that are alike.
        jaxpr: what was traced; the graph is read from it.
    """

    rows: tuple[MacroRow, ...]
    jaxpr: Jaxpr | None = dataclasses.field(default=None, compare=False, repr=False)

    def count(self, name: str) -> int:
        """How often the macro NAME runs."""
        return sum(row.count for row in self.rows if row.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """The NAMEs, each once."""
        return tuple(dict.fromkeys(row.name for row in self.rows))

    @property
    def flops(self) -> int:
        """Of all matrix products inside macros."""
        return sum(row.count * row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """Of the operands and outputs of all macros."""
        return sum(row.count * row.bytes for row in self.rows)

    @functools.cached_property
    def graph(self) -> MacroGraph:
        """Which macro's results reach which; `graph.save("graph.svg")` draws it.

        Raises:
            ValueError: the table was not made by `neuronjax.trace`.
        """
        from neuronjax.tools.draw_graph import macro_graph  # it reads this module

        return macro_graph(self)

    def to_html(
        self,
        path: str | pathlib.Path | None = None,
        *,
        title: str = "Macros",
        target: str | None = None,
    ) -> str:
        """One HTML page: the table, which can be sorted, the graph, and the roofline.

        The page needs no network and follows the reader's light or dark theme.

        Args:
            path: the file to write, if any.
            title: of the page.
            target: whose roofline: `"gen2"`, `"gen3"` or `"gen4"`; that of
                `neuronjax.target` unless given.

        Returns:
            The page.

        Raises:
            ValueError: there is no such target, or the table was not made by
                `neuronjax.trace`.
        """
        from neuronjax.tools.html import report  # a picture only

        page = report({"": self}, title=title, target=target)
        if path is not None:
            pathlib.Path(path).write_text(page, "utf-8")
        return page

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """How `treescope` shows a table."""
        from neuronjax.tools.treescope_table import render_trace

        return render_trace(self, path, subtree_renderer)

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from neuronjax.tools.tables_that_fit import Macros

        return Macros(self.rows)

    def __str__(self) -> str:
        """The table as text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(self)
        return text.getvalue().rstrip()


def trace(fun: Callable, *args: Any, **kwargs: Any) -> Trace:
    """Traces a function and lists the macros it emits; nothing runs.

    Args:
        fun: any JAX function; trace `jax.grad(f)` to see the backward macros.
        *args: what it is called with; `jax.ShapeDtypeStruct`s will do.
        **kwargs: the same, by name.

    Returns:
        The table: NAME, whether tiled, leaf, count, operand shapes, config, FLOPs,
        bytes. `print` shows it, and `rich.print` as wide as the terminal is.

    Example:
        >>> import jax, neuronjax
        >>> x = jax.ShapeDtypeStruct((64, 1, 2, 8), "float32")
        >>> cos = jax.ShapeDtypeStruct((32, 1, 8), "float32")
        >>> neuronjax.trace(neuronjax.RoPE, x, cos, cos).names
        ('RoPE',)
    """
    jaxpr = jax.make_jaxpr(fun)(*args, **kwargs).jaxpr
    counts: collections.Counter[MacroRow] = collections.Counter()
    for eqn, family, times, mesh in _macros(jaxpr, 1, None):
        counts[row_of(eqn, family, mesh)] += times
    rows = (dataclasses.replace(row, count=n) for row, n in counts.items())
    return Trace(tuple(rows), jaxpr)


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation holds."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


class Manual(NamedTuple):
    """The mesh of a `shard_map`, and the axes that are manual inside it."""

    mesh: Mesh | AbstractMesh
    axes: frozenset[str]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def repeats(eqn: JaxprEqn) -> int:
    """How often what an equation holds runs."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def _macros(
    jaxpr: Jaxpr, times: int, mesh: Manual | None
) -> Iterator[tuple[JaxprEqn, MacroFamily, int, Manual | None]]:
    for eqn in jaxpr.eqns:
        # By identity: JAX has primitives of the same names, such as `reduce`.
        family = registry.PRIMITIVES.get(eqn.primitive)
        if family is not None:
            yield eqn, family, times, mesh
        inside = manual_inside(eqn, mesh)
        for inner in inner_jaxprs(eqn):
            yield from _macros(inner, times * repeats(eqn), inside)


def manual_inside(eqn: JaxprEqn, mesh: Manual | None) -> Manual | None:
    """The manual axes inside an equation, where `mesh` are those around it."""
    if eqn.primitive.name != "shard_map":
        return mesh
    outer = mesh or Manual(eqn.params["mesh"], frozenset())
    return Manual(outer.mesh, outer.axes | frozenset(eqn.params["newly_manual_axes"]))


def row_of(eqn: JaxprEqn, family: MacroFamily, mesh: Manual | None) -> MacroRow:
    """What the table says of a macro, counted 0 times."""
    name, config = eqn.params["name"], eqn.params["config"]
    # A user's backward is gone when its NAME has been registered again without one.
    entry = registry.find(name) or registry.Entry(name, "replaced", "generic")
    avals: list[Any] = [v.aval for v in eqn.invars]
    tiled = dict(config).get("is_tiled", entry.tiled)
    values = [*avals, *(v.aval for v in eqn.outvars)]
    return MacroRow(
        name,
        entry.leaf,
        bool(tiled),
        0,
        tuple(aval.str_short(short_dtypes=True) for aval in avals),
        config,
        len(eqn.params["axes"]),
        _flops(_leaf_jaxpr(family, avals, eqn.params, mesh)),
        sum(math.prod(a.shape) * a.dtype.itemsize for a in values),
        _heaviest(avals),
    )


def _heaviest(avals: list[Any]) -> str:
    """The dtype that most bytes have; the first of equals."""
    sizes = dict.fromkeys((str(aval.dtype) for aval in avals), 0)
    for aval in avals:
        sizes[str(aval.dtype)] += math.prod(aval.shape) * aval.dtype.itemsize
    return max(sizes, key=sizes.__getitem__, default="float32")


def _leaf_jaxpr(
    family: MacroFamily, avals: list[Any], params: Any, mesh: Manual | None
) -> Jaxpr:
    """What a macro computes; inside `shard_map` its leaf may name the mesh's axes."""
    call = family.static_call(**params)
    if mesh is None:
        return call.trace(*avals).jaxpr.jaxpr

    def leaf():
        call(*map(_like, avals))
        return 0

    axes = set(mesh.axes)
    inside = jax.shard_map(
        leaf, mesh=mesh.mesh, in_specs=(), out_specs=P(), axis_names=axes
    )
    return jax.make_jaxpr(inside)().jaxpr


def _like(aval: Any) -> jax.Array:
    """An array of the shape, dtype and varying axes of `aval`."""
    x = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(sorted(aval.mat.varying, key=str))
    return lax.pcast(x, axes, to="varying") if axes else x


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _flops(jaxpr: Jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
            total += 2 * math.prod(lhs[i] for i in contracted) * math.prod(out)
        total += repeats(eqn) * sum(map(_flops, inner_jaxprs(eqn)))
    return total
