"""Ranks that are an axis of `vmap`: JAX has no collectives of groups over one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from neuronjax.kernels.shard_common import varying
from neuronjax.kernels.shard_common.groups import Members


def is_of_mesh(axis: str) -> bool:
    """Whether a bound axis is that of a mesh, in its `shard_map`."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def is_checked(axis: str) -> bool:
    """Whether it is, and what varies over it is checked, as `shard_map` does."""
    return axis in varying(lax.axis_index(axis))


def own_group(axis: str, members: Members) -> jax.Array:
    """The positions on `axis` of the ranks of this one's group, in their order."""
    groups = np.zeros((lax.axis_size(axis), len(members[0])), np.int32)
    for ranks in members:
        groups[list(ranks)] = ranks
    return jnp.asarray(groups)[lax.axis_index(axis)]
