"""NAMEs of the collectives, and what kind of exchange each is."""

from typing import NamedTuple

MATMUL, MATMUL_MIRROR = "CollectiveMatmul", "MatmulReduceScatter"
MATMUL_WEIGHT = "CollectiveMatmulBwd"
GATHER, GATHER_MIRROR = "FineGrainedAllGather", "FineGrainedReduceScatter"
COLUMNS, COLUMNS_MIRROR = "SB2SBAllGather", "SB2SBAllGatherBwd"


class Collective(NamedTuple):
    """An exchange as the compiler lists it.

    Attributes:
        collective: its name.
        collective_kind: its number; `None` where the list has none.
        transport: how it is expected to travel. Kinds 0 to 2 may be copied from core to
            core on the chip (`"sb2sb"`), the rest go over the interconnect.
    """

    collective: str
    collective_kind: int | None
    transport: str = "interconnect"


_RING = Collective("PermuteImplicit", 9)
COLLECTIVES = {
    MATMUL: _RING,
    MATMUL_MIRROR: _RING,
    MATMUL_WEIGHT: _RING,
    GATHER: _RING,
    GATHER_MIRROR: _RING,
    # Its buffers lie in SBUF, but a gather as such is not split into on-chip copies.
    COLUMNS: Collective("AllGather", 4),
    COLUMNS_MIRROR: Collective("ReduceScatter", None),
}
