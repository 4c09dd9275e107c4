"""Meshes named for what their axes split."""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from neuronjax.primitives.mesh_axes import LNC


def make_mesh(*, explicit: bool = False, lnc: int = 1, **sizes: int) -> Mesh:
    """A mesh over the first devices.

    Args:
        explicit: type the axes Explicit (shardings are part of array types) instead of
            Auto (XLA chooses).
        lnc: cores of a logical core: 1, or 2 for a last axis `"lnc"`.
        **sizes: axis name -> size, such as `data=2, tensor=4`. Names say what an axis
            splits: `data`, `tensor`, `expert`.

    Raises:
        ValueError: a size is not positive, `lnc` is neither 1 nor 2, or the machine has
            fewer devices. `jax.config.update("jax_num_cpu_devices", n)`, before any
            array, makes `n` devices of one CPU.

    Example:
        >>> dict(make_mesh(data=1).shape)
        {'data': 1}
    """
    if lnc not in (1, LNC):
        raise ValueError(f"make_mesh: lnc must be 1 or {LNC}, got {lnc}")
    axes = dict(sizes) if lnc == 1 else {**sizes, "lnc": lnc}
    bad = {name: size for name, size in axes.items() if size < 1}
    if bad or not axes:
        raise ValueError(f"make_mesh: sizes must be positive, got {bad or 'none'}")
    count, devices = math.prod(axes.values()), jax.devices()
    if count > len(devices):
        raise ValueError(
            f"make_mesh: sizes {axes} need {count} devices, got {len(devices)}"
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(kind,) * len(axes),
        devices=devices[:count],
    )


def require_axes(function: str, mesh: Mesh, **axes: str | None) -> None:
    """Refuses an axis that `mesh` lacks; `None` asks for none."""
    for argument, axis in axes.items():
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(
                f"{function}: {argument} must be an axis of the mesh, one of "
                f"{mesh.axis_names}, got {axis!r}"
            )


def laid(mesh: Mesh, arrays: Any, specs: Any) -> Any:
    """`arrays` as `specs` say, on an explicit mesh: its shard_map takes no others.

    On other meshes shard_map lays them itself. `specs` has the structure of `arrays`,
    in which a leaf may be None, or is one for all.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return arrays
    leaves, tree = jax.tree.flatten(arrays, is_leaf=lambda x: x is None)
    whole = isinstance(specs, PartitionSpec)
    each = [specs] * len(leaves) if whole else tree.flatten_up_to(specs)
    return tree.unflatten(
        None if x is None else jax.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(leaves, each, strict=True)
    )
