"""Blocks of tokens through their experts: the macros, their functions and rules."""

from neuronjax.primitives.blockwise_mm.emitter import (
    blockwise_mm_kernel as blockwise_mm_kernel,
)
from neuronjax.primitives.blockwise_mm.emitter_bwd import (
    blockwise_mm_bwd_kernel as blockwise_mm_bwd_kernel,
)
from neuronjax.primitives.blockwise_mm.functions import (
    blockwise_mm_baseline_shard_hidden as blockwise_mm_baseline_shard_hidden,
)
from neuronjax.primitives.blockwise_mm.functions import moe_cte as moe_cte
from neuronjax.primitives.blockwise_mm.functions_bwd import (
    blockwise_mm_bwd as blockwise_mm_bwd,
)
