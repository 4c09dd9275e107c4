"""One NAME as the transformation table sees it: a function of flat arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.kernels.dtypes import accumulator, is_differentiable
from neuronjax.primitives import registry

NAMES = registry.examples()


class MacroCase:
    """The example of one NAME, as the macro and as its plain reference.

    Where cores cooperate in the leaf, both run under `shard_map` over `ranks` devices.
    """

    def __init__(self, label, dtype="float32", batch=2, ranks=2, kind=AxisType.Auto):
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
            self.mesh = jax.make_mesh(
                (ranks,), (self.axis,), (kind,), devices=jax.devices()[:ranks]
            )
            self.flat = [self._placed(x, i) for i, x in enumerate(self.flat)]
        assert len(self.split) == len(self.flat)
        self.floats = [i for i, x in enumerate(self.flat) if is_float(x)]

    def macro(self, *flat):
        return self._on_ranks(self.family)(*flat)

    def plain(self, *flat):
        return self._on_ranks(self.family.plain)(*flat)

    def _on_ranks(self, fun):
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

    def _placed(self, x, i):
        """`x` on all devices of the mesh, whole; divided if the mesh is Explicit."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        spec = self.specs(self.split)[i] if explicit else P()
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def specs(self, axes):
        """How the mesh axis divides arrays along `axes`."""
        return [P() if axis is None else P(*[None] * axis, self.axis) for axis in axes]

    def reference(self, *flat):
        """The plain reference, compiled: one program instead of one an operation."""
        return jax.jit(self.plain)(*flat)

    def both(self, fun, *flat):
        """Outputs and gradients in one program."""
        return jax.jit(lambda *flat: self._both(fun, flat))(*flat)

    def _both(self, fun, flat):
        if self.family.no_derivative is not None:
            return tuple(fun(*flat)), ()
        live = [flat[i] for i in self.floats]
        gradient = jax.grad(loss(self.of_floats(fun, flat)), tuple(range(len(live))))
        return tuple(fun(*flat)), gradient(*live)

    @property
    def wanted(self):
        """What the plain reference gives for the example: outputs and gradients."""
        return _wanted(self.label, self.dtype, self.batch, self.ranks)

    def of_floats(self, fun, flat=None):
        """`fun` as a function of its float operands alone."""
        flat = self.flat if flat is None else flat

        def call(*floats):
            operands = list(flat)
            for i, x in zip(self.floats, floats, strict=True):
                operands[i] = x
            return fun(*operands)

        return call

    @property
    def live(self):
        return [self.flat[i] for i in self.floats]

    def equations(self, fun, *args):
        """How many equations of this NAME `fun` traces to."""
        return neuronjax.trace(fun, *args).count(self.name)


@functools.cache
def _wanted(label, dtype, batch, ranks):
    case = MacroCase(label, dtype, batch, ranks)
    return case.both(case.plain, *case.flat)


def is_float(x):
    """Whether `x` takes part in differentiation: integers and fp8 values do not."""
    return is_differentiable(x.dtype)


def loss(fun):
    """A scalar in which every finite float output has a weight of its own."""

    def scalar(*args):
        total = 0.0
        for out in fun(*args):
            if is_float(out):
                wide = out.astype(accumulator(out.dtype))
                weight = np.cos(np.arange(out.size)).reshape(out.shape)
                seen = jnp.where(jnp.isfinite(wide), wide, 0)
                total = total + jnp.sum(jnp.sin(seen) * weight.astype(wide.dtype))
        return total

    return scalar


def grads(fun, n):
    return jax.jit(jax.grad(loss(fun), tuple(range(n))))


def error(got, wanted):
    """The largest difference, relative to the largest wanted value."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    difference = np.abs(np.where(same, 0, got) - np.where(same, 0, wanted))
    finite = np.abs(wanted[np.isfinite(wanted)])
    return difference.max(initial=0) / max(finite.max(initial=0), 1e-3)


def assert_close(got, wanted, tolerance=2e-5):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if is_float(b):
            assert error(a, b) <= tolerance
        elif jnp.issubdtype(b.dtype, jnp.inexact):  # fp8: one step of the larger ones
            assert error(a, b) <= 2**-3
        else:
            np.testing.assert_array_equal(a, b)
