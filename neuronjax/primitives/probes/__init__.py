"""The matmul probes: several small products in one pass of the array."""

from neuronjax.primitives.probes.packed import (
    combine_trn2_double_row_matmult_tiles as combine_trn2_double_row_matmult_tiles,
)
from neuronjax.primitives.probes.packed import (
    packed_cayman_pe_tp_kernel as packed_cayman_pe_tp_kernel,
)
from neuronjax.primitives.probes.plan import probe_plan as probe_plan
from neuronjax.primitives.probes.tiled import (
    column_tiled_mm_kernel as column_tiled_mm_kernel,
)
from neuronjax.primitives.probes.tiled import row_tiled_mm_kernel as row_tiled_mm_kernel
