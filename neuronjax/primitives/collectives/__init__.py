"""Collectives as macros: rings that gather or reduce, with a product or without."""

from neuronjax.primitives.collectives import chip_rules as chip_rules
from neuronjax.primitives.collectives import columns_rules as columns_rules
from neuronjax.primitives.collectives import kernel_rules as kernel_rules
from neuronjax.primitives.collectives.functions import (
    allgather_compute_matmul as allgather_compute_matmul,
)
from neuronjax.primitives.collectives.functions import (
    fine_grained_allgather as fine_grained_allgather,
)
from neuronjax.primitives.collectives.functions import (
    fine_grained_reduce_scatter as fine_grained_reduce_scatter,
)
from neuronjax.primitives.collectives.functions import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from neuronjax.primitives.collectives.sb2sb import allgather_sb2sb as allgather_sb2sb
from neuronjax.primitives.collectives.sb2sb import (
    allgather_sb2sb_tiled as allgather_sb2sb_tiled,
)
