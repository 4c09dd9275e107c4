"""Whether a mesh may divide an array."""

import math

import jax
from jax.sharding import AxisType


def is_divided(x: jax.Array) -> bool:
    """Whether `x` lies on a mesh of several devices, or one is set.

    Inside of `shard_map`, whose axes are manual, the mesh has divided it already. An
    automatic mesh that only `in_shardings` of a jit names is not seen.
    """
    for mesh in (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()):
        axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
        if math.prod(size for kind, size in axes if kind != AxisType.Manual) > 1:
            return True
    return False


def shards(x: jax.Array, axis: int) -> int:
    """Into how many parts an explicit mesh divides an axis of `x`; 1 on any other."""
    sharding = jax.typeof(x).sharding
    names = sharding.spec[axis] if len(sharding.spec) == x.ndim else None
    names = (names,) if isinstance(names, str) else tuple(names or ())
    return math.prod(sharding.mesh.shape[name] for name in names)
