"""Collectives from their equations, and many of them in one program.

Operands and results of all ranks stand in front of one another: `[ranks, ...]`.
"""

import collections
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from neuronjax.primitives.collectives import macro, names
from tests.arrays import array
from tests.hlo import Program

DEVICES = (1, 2, 3, 5, 8)
AXIS = "tensor"
ROWS = 4
FAMILIES = {
    names.MATMUL: macro.collective_matmul,
    names.MATMUL_MIRROR: macro.matmul_reduce_scatter,
    names.MATMUL_WEIGHT: macro.collective_matmul_weight,
    names.GATHER: macro.all_gather,
    names.GATHER_MIRROR: macro.reduce_scatter,
    names.COLUMNS: macro.sb2sb_all_gather,
    names.COLUMNS_MIRROR: macro.column_scatter,
}
RINGS = tuple(FAMILIES)[:5]
# The public functions over a ring, each with the macro that it emits.
FUNCTIONS = {
    "allgather_compute_matmul": names.MATMUL,
    "matmul_reduce_scatter": names.MATMUL_MIRROR,
    "fine_grained_allgather": names.GATHER,
    "fine_grained_reduce_scatter": names.GATHER_MIRROR,
}


def equation(name: str, operands: Any, groups: Any = None, xp: Any = np) -> Any:
    """What each rank has in the end, by definition; `groups` of ranks, in order."""
    first, second = operands[0], operands[-1]
    groups = [range(len(first))] if groups is None else groups
    place = {rank: (group, i) for group in groups for i, rank in enumerate(group)}

    def part(total, i, size, axis):
        return xp.split(total, size, axis)[i]

    def one(rank):
        group, i = place[rank]
        size = len(group)
        if name in (names.MATMUL_MIRROR, names.GATHER_MIRROR, names.COLUMNS_MIRROR):
            both = name == names.MATMUL_MIRROR
            total = sum(first[s] @ second[s] if both else first[s] for s in group)
            return part(total, i, size, int(name == names.COLUMNS_MIRROR))
        joined = xp.concatenate([first[s] for s in group], int(name == names.COLUMNS))
        if name == names.MATMUL:
            return joined @ second[rank]
        return joined.T @ second[rank] if name == names.MATMUL_WEIGHT else joined

    return xp.stack([one(rank) for rank in range(len(first))])


class Sizes(NamedTuple):
    """`rows` of a rank; `width` of what travels, `other` of what does not."""

    rows: int = ROWS
    width: int = 3
    other: int = 2


def shapes(name: str, size: int, sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of what one rank of `size` holds."""
    rows, width, other = sizes
    return {
        names.MATMUL: [(rows, width), (width, other)],
        names.MATMUL_MIRROR: [(size * rows, other), (other, width)],
        names.MATMUL_WEIGHT: [(rows, width), (size * rows, other)],
        names.GATHER: [(rows, width)],
        names.GATHER_MIRROR: [(size * rows, width)],
        names.COLUMNS: [(rows, width)],
        names.COLUMNS_MIRROR: [(rows, size * width)],
    }[name]


class Call(NamedTuple):
    """One macro of a program."""

    name: str
    bidirectional: bool = False
    channels: int = 1
    groups: Any = None
    sizes: Sizes = Sizes()
    dtypes: tuple[str, ...] = ("float32",) * 2

    def run(self, *operands: jax.Array, axis: str | None = AXIS) -> jax.Array:
        config: dict[str, Any] = dict(axis=axis, groups=self.groups)
        if self.name in RINGS:
            config |= dict(channels=self.channels, bidirectional=self.bidirectional)
        return FAMILIES[self.name](*operands, name=self.name, **config)[0]

    def wanted(self, operands: Any, xp: Any = np) -> Any:
        """The equation in float64."""
        wide = [xp.asarray(x, dtype="float64") for x in operands]
        return equation(self.name, wide, self.groups, xp)

    def drawn(self, devices: int, whole: bool = True) -> list[jax.Array]:
        """Random operands of every rank: small integers, whose sums are exact."""
        rng = np.random.default_rng((self.sizes.width, devices))
        size = len(self.groups[0]) if self.groups else devices
        drawn = []
        for i, shape in enumerate(shapes(self.name, size, self.sizes)):
            x = rng.standard_normal((devices, *shape))
            drawn.append(array(np.rint(3 * x) if whole else x, self.dtypes[i]))
        return drawn


def ring_mesh(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices]
    )


def on_ranks(mesh: jax.sharding.Mesh, fun: Any) -> Any:
    """`fun` of what one device holds, as a function of what all hold."""

    def local(*stacked):
        own = jax.tree.map(lambda x: x[0], stacked)
        return jax.tree.map(lambda x: x[None], fun(*own))

    spec = P(mesh.axis_names)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)


def all_of(calls: Any, devices: int) -> Any:
    """Every call on its own operands, one after the other in one program."""

    def run(given):
        return [call.run(*own) for call, own in zip(calls, given, strict=True)]

    return on_ranks(ring_mesh(devices), run)


# The directions and channels that are tried on each number of devices.
WAYS = {
    1: [(False, 1), (True, 2)],
    2: [(False, 1), (True, 4)],
    3: [(True, 1), (False, 2)],
    5: [(False, 2), (True, 1)],
    8: [(False, 1), (True, 2)],
}


def calls(devices: int) -> list[Call]:
    """Every macro each way; what travels in each has a width of its own."""
    rings = itertools.product(RINGS, WAYS[devices])
    return [
        Call(name, *way, sizes=Sizes(width=width))
        for width, (name, way) in enumerate(rings, 11)
    ] + [
        Call(names.COLUMNS, sizes=Sizes(width=9)),
        Call(names.COLUMNS_MIRROR, sizes=Sizes(width=2)),
    ]


def permutes(found: Program) -> dict[int, int]:
    """How many permutes of a program move arrays of each width."""
    types = [op.types[0] for op in found.find("collective-permute")]
    return dict(collections.Counter(shape[-1] for _, shape in types))
