"""The rules of the gathers along columns: who gathers with whom, and in what order."""

from types import SimpleNamespace

from neuronjax.primitives.collectives.facts import SB2SB
from neuronjax.primitives.collectives.rules import arguments, row
from neuronjax.primitives.mesh_axes import is_partition


def _wrong_size(c: SimpleNamespace) -> bool:
    return c.sizes != [int(c.tp_degree)]


row(
    "replica_groups",
    SB2SB,
    "replica_groups must be lists of ranks, all of one length, that name each of 0 to "
    "n - 1 once, got {replica_groups}",
    lambda c: not is_partition(c.replica_groups),
    example=arguments(replica_groups=[[0, 0]]),
    stage=0,
)
row(
    "group_size",
    SB2SB,
    "each list of replica_groups must have tp_degree = {tp_degree} ranks, got {sizes}",
    _wrong_size,
    example=arguments(replica_groups=[[0, 1]]),
)
