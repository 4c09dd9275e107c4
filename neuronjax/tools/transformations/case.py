"""One NAME as the transformation table sees it: a function of flat arrays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from neuronjax.primitives import registry
from neuronjax.primitives.bag import Bag, bag_of
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.tools.trace import trace
from neuronjax.tools.transformations.compare import is_float, loss


class MacroCase:
    """The example of one NAME, as the macro and as its plain reference.

    Where cores cooperate in the leaf, both run under `shard_map` over `ranks` devices.

    Args:
        label: a NAME, or the label of a variant.
        dtype: of the example's floats.
        batch: what the example makes its batch axes of.
        ranks: devices of the mesh, where cores cooperate in the leaf.
        kind: the type of that mesh's axis.
    """

    def __init__(
        self,
        label: str,
        dtype: str = "float32",
        batch: int = 2,
        ranks: int = 2,
        kind: AxisType = AxisType.Auto,
    ):
        self.label, self.name = label, label.split(" ")[0]
        self.dtype, self.batch = dtype, batch
        self.family = registry.family_of(label)
        example = _example(self.family, label, dtype, batch)
        self.flat, self.tree = jax.tree.flatten(example.operands)
        self.config = dict(example.config)
        self.split, self.out_split = example.split, example.out_split
        self.grows = example.grows or example.split
        self.axis, self.ranks, over = example.axis, ranks, None
        if self.axis is not None:
            self.mesh = mesh_of(ranks, kind, self.axis)
            self.flat = [self._placed(x, i) for i, x in enumerate(self.flat)]
            specs = self.specs(self.split), self.specs(self.out_split)
            over = self.mesh, *map(tuple, specs)
        assert len(self.split) == len(self.flat)
        self.floats = [i for i, x in enumerate(self.flat) if is_float(x)]
        params = self.name, bag_of(self.config), self.tree, over
        # The macro is a new function, which a context may change: it is traced again.
        self.macro = _flat(self.family, *params)
        self.plain = _shared_flat(self.family.plain, *params)

    def _placed(self, x: Any, i: int) -> jax.Array:
        """`x` on all devices of the mesh, whole; divided if the mesh is Explicit."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        spec = self.specs(self.split)[i] if explicit else P()
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def specs(self, axes: Sequence[int | None]) -> list[P]:
        """How the mesh axis divides arrays along `axes`."""
        assert self.axis is not None
        return [spec_of(axis, self.axis) for axis in axes]

    def reference(self, *flat: Any) -> tuple:
        """The plain reference, compiled: one program instead of one an operation."""
        return jax.jit(self.plain)(*flat)

    def both(self, fun: Callable, *flat: Any) -> tuple:
        """Outputs and gradients in one program."""
        derivative = self.family.no_derivative is None
        return jax.jit(_both(fun, tuple(self.floats) if derivative else ()))(*flat)

    @property
    def wanted(self) -> tuple:
        """What the plain reference gives for the example: outputs and gradients."""
        return _wanted(self.family, self.label, self.dtype, self.batch, self.ranks)

    def of_floats(self, fun: Callable) -> Callable:
        """`fun` as a function of its float operands alone."""
        return _of_floats(fun, self.floats, self.flat)

    @property
    def live(self) -> list[jax.Array]:
        """The operands that have a derivative."""
        return [self.flat[i] for i in self.floats]

    def equations(self, fun: Callable, *args: Any) -> int:
        """How many equations of this NAME `fun` traces to."""
        return trace(fun, *args).count(self.name)


def mesh_of(devices: int, kind: AxisType = AxisType.Auto, axis: str = "data") -> Any:
    """A mesh of one axis over the first `devices`."""
    return jax.make_mesh((devices,), (axis,), (kind,), devices=jax.devices()[:devices])


def spec_of(axis: int | None, mesh_axis: str = "data") -> P:
    """How a mesh axis divides an array along `axis`."""
    return P() if axis is None else P(*[None] * axis, mesh_axis)


def _flat(fun: Callable, name: str, config: Bag, tree: Any, over: Any) -> Callable:
    """`fun` of flat operands, under `shard_map` `over` a mesh and its specs."""

    def call(*flat):
        operands = jax.tree.unflatten(tree, flat)
        return tuple(fun(*operands, name=name, **dict(config)))

    if over is None:
        return call
    mesh, in_specs, out_specs = over
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _of_floats(fun: Callable, floats: Sequence[int], flat: Sequence[Any]) -> Callable:
    def call(*live):
        operands = list(flat)
        for i, x in zip(floats, live, strict=True):
            operands[i] = x
        return fun(*operands)

    return call


# One function for equal arguments is one compiled program for all cells of a NAME.
_shared_flat = functools.lru_cache(maxsize=32)(_flat)


@functools.lru_cache(maxsize=32)
def _both(fun: Callable, floats: tuple[int, ...]) -> Callable:
    """Outputs of `fun`, and gradients of its loss for the operands `floats`."""

    def both(*flat):
        if not floats:
            return tuple(fun(*flat)), ()
        live = [flat[i] for i in floats]
        gradient = jax.grad(
            loss(_of_floats(fun, floats, flat)), tuple(range(len(live)))
        )
        return tuple(fun(*flat)), gradient(*live)

    return both


@functools.lru_cache(maxsize=64)
def _example(family: MacroFamily, label: str, dtype: str, batch: int) -> Example:
    """The example, its operands drawn by one program; those of a user are given."""
    make = functools.partial(family.example, label, jnp.dtype(dtype), batch)
    if label not in registry.examples():
        return make()
    found: list[Example] = []

    def operands():
        found.append(make())
        return found[-1].operands

    drawn = jax.jit(operands)()
    return dataclasses.replace(found[-1], operands=drawn)


@functools.lru_cache(maxsize=64)
def _wanted(family: MacroFamily, label: str, dtype: str, batch: int, ranks: int):
    """Keyed by the family too: a user's NAME may be registered again."""
    case = MacroCase(label, dtype, batch, ranks)
    return case.both(case.plain, *case.flat)
