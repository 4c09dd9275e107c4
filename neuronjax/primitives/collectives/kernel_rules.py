"""The rules of the emitters: where their cores are, and how a ring shares rows."""

from types import SimpleNamespace

from neuronjax.primitives import contracts
from neuronjax.primitives.collectives.facts import (
    KERNELS,
    RING_KERNELS,
    SCATTERS,
)
from neuronjax.primitives.collectives.rules import arguments, row
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.mesh_axes import is_partition

PATHS = ("sbuf", "hbm")

for _kernel in KERNELS:
    contracts.add(only_hints(_kernel, arguments()))

row(
    "kernel_axis",
    KERNELS,
    "axis must be None or the name of one mesh axis, got {axis!r}",
    lambda c: not isinstance(c.axis, str | None),
    example=arguments(axis=("data", "tensor")),
    stage=0,
)
row(
    "kernel_groups",
    KERNELS,
    "groups must be None or lists of ranks, all of one length, that name each of 0 to "
    "n - 1 once, got {groups}",
    lambda c: c.groups is not None and not is_partition(c.groups),
    example=arguments(groups=((0, 2),)),
    stage=0,
)
row(
    "channels",
    RING_KERNELS,
    "channels must be a positive integer, known while tracing, got {channels!r}",
    lambda c: not is_count(c.channels),
    example=arguments(channels=0),
    stage=0,
)
row(
    "path",
    RING_KERNELS,
    "path must be 'sbuf' or 'hbm', got {path!r}",
    lambda c: c.path not in PATHS,
    example=arguments(path="psum"),
    stage=0,
)
row(
    "unbound",
    KERNELS,
    "axis must be a mesh axis, and the call inside its shard_map, got {axis!r}",
    lambda c: c.found is None,
    example=arguments(axis="tensor"),
)


def _uncovered(c: SimpleNamespace) -> bool:
    return c.groups is not None and c.found not in (None, sum(map(len, c.groups)))


row(
    "cover",
    KERNELS,
    "groups must name each of the {found} ranks of axis once, got {groups}",
    _uncovered,
    example=arguments(groups=((0, 1),)),
)


row(
    "kernel_rows",
    tuple(k for k in RING_KERNELS if k not in SCATTERS),
    "the rows of lhs must be a multiple of channels = {channels}, got {m}",
    lambda c: c.m % c.shares != 0,
    example=arguments(channels=3),
)
row(
    "kernel_scattered_rows",
    tuple(k for k in RING_KERNELS if k in SCATTERS),
    "the rows of lhs must be a multiple of {shares}, ranks times channels, got {m}",
    lambda c: c.m % c.shares != 0,
    example=arguments(channels=3),
)
