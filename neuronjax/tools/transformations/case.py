"""One NAME as the transformation table sees it: a function of flat arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from neuronjax.primitives import registry
from neuronjax.primitives.macro import MacroFamily
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
        example = self.family.example(label, jnp.dtype(dtype), batch)
        self.flat, self.tree = jax.tree.flatten(example.operands)
        self.config = dict(example.config)
        self.split, self.out_split = example.split, example.out_split
        self.grows = example.grows or example.split
        self.axis, self.ranks = example.axis, ranks
        if self.axis is not None:
            self.mesh = mesh_of(ranks, kind, self.axis)
            self.flat = [self._placed(x, i) for i, x in enumerate(self.flat)]
        assert len(self.split) == len(self.flat)
        self.floats = [i for i, x in enumerate(self.flat) if is_float(x)]

    def macro(self, *flat: Any) -> tuple:
        """Emits the macro."""
        return self._on_ranks(self.family)(*flat)

    def plain(self, *flat: Any) -> tuple:
        """Runs the plain reference."""
        return self._on_ranks(self.family.plain)(*flat)

    def _on_ranks(self, fun: Callable) -> Callable:
        def call(*flat):
            operands = jax.tree.unflatten(self.tree, flat)
            return tuple(fun(*operands, name=self.name, **self.config))

        if self.axis is None:
            return call
        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=tuple(self.specs(self.split)),
            out_specs=tuple(self.specs(self.out_split)),
        )

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
        return jax.jit(lambda *flat: self._both(fun, flat))(*flat)

    def _both(self, fun: Callable, flat: tuple) -> tuple:
        if self.family.no_derivative is not None or not self.floats:
            return tuple(fun(*flat)), ()
        live = [flat[i] for i in self.floats]
        gradient = jax.grad(loss(self.of_floats(fun, flat)), tuple(range(len(live))))
        return tuple(fun(*flat)), gradient(*live)

    @property
    def wanted(self) -> tuple:
        """What the plain reference gives for the example: outputs and gradients."""
        return _wanted(self.family, self.label, self.dtype, self.batch, self.ranks)

    def of_floats(self, fun: Callable, flat: Sequence[Any] | None = None) -> Callable:
        """`fun` as a function of its float operands alone."""
        flat = self.flat if flat is None else flat

        def call(*floats):
            operands = list(flat)
            for i, x in zip(self.floats, floats, strict=True):
                operands[i] = x
            return fun(*operands)

        return call

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


@functools.cache
def _wanted(family: MacroFamily, label: str, dtype: str, batch: int, ranks: int):
    """Keyed by the family too: a user's NAME may be registered again."""
    case = MacroCase(label, dtype, batch, ranks)
    return case.both(case.plain, *case.flat)
