"""Mesh axes and groups of ranks as a call names them, for several families."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from neuronjax.kernels.shard_common import Group
from neuronjax.primitives.kinds import is_count

# Cores of a logical core that has more than one.
LNC = 2


def bound_size(axis: Any) -> int | None:
    """How many devices a mesh axis has here; None outside its `shard_map`."""
    if not isinstance(axis, str):
        return None
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def is_partition(groups: Any, size: int | None = None) -> bool:
    """Whether lists of ranks, all of one length, name each of `[0, size)` once."""
    groups = groups.tolist() if isinstance(groups, np.ndarray) else groups
    if not isinstance(groups, Sequence) or not groups or isinstance(groups, str):
        return False
    if not all(isinstance(g, Sequence) and len(g) == len(groups[0]) for g in groups):
        return False
    ranks = [rank for group in groups for rank in group]
    if not all(is_count(rank, 0) for rank in ranks):
        return False
    wanted = len(ranks) if size is None else size
    return bool(ranks) and sorted(ranks) == list(range(wanted))


def group_of(axis: str | None, replica_groups: Any) -> Group:
    """Who exchanges with whom on `axis`, of lists that are a partition of it.

    Groups of one rank exchange nothing, and need no axis. One list of all ranks in
    their order is the whole axis.
    """
    members = tuple(tuple(map(int, ranks)) for ranks in replica_groups)
    if len(members[0]) == 1:
        return Group()
    whole = members == (tuple(range(len(members[0]))),)
    return Group(axis, None if whole else members)
