"""What the chip's own collectives ask for and the mathematics does not."""

from types import SimpleNamespace

from neuronjax.primitives.collectives.facts import (
    COLUMN_GATHER,
    RINGS,
    TILED_COLUMN_GATHER,
)
from neuronjax.primitives.collectives.rules import arguments, row
from neuronjax.primitives.contracts import Size
from neuronjax.primitives.tile import PARTITIONS


def _cuts_a_tile(c: SimpleNamespace) -> bool:
    return c.rows > PARTITIONS and c.rows % PARTITIONS != 0


def _uneven_tiles(c: SimpleNamespace) -> bool:
    return c.tiles > 1 and c.tiles % c.cores != 0


row(
    "chip_degree",
    RINGS,
    "the chip issues permutes in pairs and takes an even tp_degree, got {tp_degree}",
    size=Size("tp_degree", lambda c: int(c.tp_degree), multiple=2),
    example=arguments(tp_degree=3, lhs=(6, 3)),
    tag="hw",
)
row(
    "chip_direction",
    RINGS,
    "the chip's ring goes one way: bidirectional must be False",
    lambda c: bool(c.bidirectional),
    example=arguments(bidirectional=True),
    tag="hw",
)
row(
    "chip_rows",
    (COLUMN_GATHER,),
    "the chip lays H on its 128 partitions and takes up to 128, got {rows}",
    size=Size("H", lambda c: c.rows, maximum=PARTITIONS),
    example=arguments(inp=(129, 3)),
    tag="hw",
)
row(
    "chip_tiles",
    (TILED_COLUMN_GATHER,),
    "the chip takes up to 128 rows, or a multiple of 128, got {rows}",
    _cuts_a_tile,
    example=arguments(inp=(129, 3)),
    tag="hw",
)
row(
    "chip_cores",
    (TILED_COLUMN_GATHER,),
    "the chip's {cores} cores share whole tiles of 128 rows evenly, got {tiles} tiles",
    _uneven_tiles,
    example=arguments(inp=(384, 3), lnc_axis="lnc"),
    tag="hw",
)
