"""Who exchanges with whom: groups of ranks on one mesh axis."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from neuronjax.kernels.shard_common.casts import uniform

Members = tuple[tuple[int, ...], ...]


class Group(NamedTuple):
    """The ranks that exchange with one another.

    Attributes:
        axis: the mesh axis; `None` for a rank that is alone.
        members: positions on the axis, one tuple a group, all of one length; their
            order is the order of the ranks. `None` is one group of the whole axis.
    """

    axis: str | None = None
    members: Members | None = None


def group_size(group: Group) -> int:
    """How many ranks a group has."""
    if group.members is not None:
        return len(group.members[0])
    return 1 if group.axis is None else lax.axis_size(group.axis)


def own_rank(group: Group) -> jax.Array | int:
    """The place of this device in its group, from 0."""
    if group.axis is None:
        return 0
    here = lax.axis_index(group.axis)
    if group.members is None:
        return here
    places = np.zeros(lax.axis_size(group.axis), np.int32)
    for ranks in group.members:
        places[list(ranks)] = range(len(ranks))
    return jnp.asarray(places)[here]


def consecutive_groups(tp_degree: int, num_groups: int) -> Members:
    """`num_groups` groups of `tp_degree` neighbours: group `g` begins at `g*tp_degree`.

    Example:
        >>> consecutive_groups(2, 2)
        ((0, 1), (2, 3))
    """
    return tuple(
        tuple(range(first, first + tp_degree))
        for first in range(0, tp_degree * num_groups, tp_degree)
    )


def channel_count(tp_degree: int, cores: int, nc_version: int = 3) -> int:
    """How many rings run side by side; one where a rank has not two cores.

    Example:
        >>> [channel_count(tp, 2) for tp in (2, 4, 32, 64)]
        [1, 2, 2, 4]
    """
    if cores != 2:
        return 1
    wide = 2 if nc_version >= 3 else 4
    return {4: 2, 8: 2, 16: 2, 32: wide, 64: 4, 128: 4}.get(tp_degree, 1)


def all_reduce(x: jax.Array, group: Group) -> jax.Array:
    """The sum of `x` over the group.

    Over a whole axis it is one all-reduce, and the result is typed alike on all ranks.
    Over several groups it is a reduce-scatter and an all-gather, which JAX has for
    groups under `shard_map` where it has no all-reduce.
    """
    if group.axis is None:
        return x
    (x,) = uniform(x, over=group.axis)
    if group.members is None or len(group.members) == 1:
        return lax.psum(x, group.axis)
    size, groups = group_size(group), [list(ranks) for ranks in group.members]
    if size == 1 or not x.size:  # XLA scatters nothing that is empty
        return x
    rest = -x.size % size
    flat = jnp.pad(x.ravel(), (0, rest))
    options: dict[str, Any] = dict(axis_index_groups=groups, tiled=True)
    own = lax.psum_scatter(flat, group.axis, scatter_dimension=0, **options)
    return lax.all_gather(own, group.axis, **options)[: x.size].reshape(x.shape)
