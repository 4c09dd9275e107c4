"""MLP: the public function, the macro, and the rules of its calls."""

from neuronjax.primitives.mlp.emitters import (
    mlp_fused_add_kernel as mlp_fused_add_kernel,
)
from neuronjax.primitives.mlp.emitters import mlp_kernel as mlp_kernel
from neuronjax.primitives.mlp.entry import mlp as mlp
from neuronjax.primitives.mlp.quantized import (
    quant_mlp_fused_add_kernel as quant_mlp_fused_add_kernel,
)
from neuronjax.primitives.mlp.quantized import quant_mlp_kernel as quant_mlp_kernel
