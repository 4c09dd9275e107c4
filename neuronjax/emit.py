"""The emitters, by the compiler's names: each binds one macro node and does no math."""

from neuronjax.primitives.attention.backward import (
    backwards_attention_kernel as backwards_attention_kernel,
)
from neuronjax.primitives.attention.decode import (
    attention_tkg_fwd_kernel as attention_tkg_fwd_kernel,
)
from neuronjax.primitives.attention.prefill import attention_kernel as attention_kernel
from neuronjax.primitives.attention.prefix_caching import (
    attention_prefix_caching_fwd_kernel as attention_prefix_caching_fwd_kernel,
)
from neuronjax.primitives.attention_block_tkg.macro import (
    attention_block_tkg_kernel as attention_block_tkg_kernel,
)
from neuronjax.primitives.bir_kernel import bir_kernel as bir_kernel
from neuronjax.primitives.blockwise_mm import (
    blockwise_mm_bwd_kernel as blockwise_mm_bwd_kernel,
)
from neuronjax.primitives.blockwise_mm import (
    blockwise_mm_kernel as blockwise_mm_kernel,
)
from neuronjax.primitives.collectives.emitters import (
    collective_matmul_kernel as collective_matmul_kernel,
)
from neuronjax.primitives.collectives.emitters import (
    fine_grained_all_gather_kernel as fine_grained_all_gather_kernel,
)
from neuronjax.primitives.collectives.emitters import (
    fine_grained_reduce_scatter_kernel as fine_grained_reduce_scatter_kernel,
)
from neuronjax.primitives.collectives.emitters import (
    matmul_reduce_scatter_kernel as matmul_reduce_scatter_kernel,
)
from neuronjax.primitives.collectives.emitters import (
    sb2sb_all_gather_kernel as sb2sb_all_gather_kernel,
)
from neuronjax.primitives.conv import conv1d_kernel as conv1d_kernel
from neuronjax.primitives.conv import (
    depthwise_conv1d_kernel as depthwise_conv1d_kernel,
)
from neuronjax.primitives.cross_entropy.linear_macro import (
    linear_cross_entropy_kernel as linear_cross_entropy_kernel,
)
from neuronjax.primitives.cross_entropy.macro import (
    cross_entropy_bwd_kernel as cross_entropy_bwd_kernel,
)
from neuronjax.primitives.cross_entropy.macro import (
    cross_entropy_fwd_kernel as cross_entropy_fwd_kernel,
)
from neuronjax.primitives.cumsum import cum_sum_kernel as cum_sum_kernel
from neuronjax.primitives.expert_mlps.emitter import (
    expert_mlps_kernel as expert_mlps_kernel,
)
from neuronjax.primitives.fused_linear import (
    fused_linear_kernel as fused_linear_kernel,
)
from neuronjax.primitives.llama3_transformer import (
    llama3_transformer_kernel as llama3_transformer_kernel,
)
from neuronjax.primitives.mlp import mlp_fused_add_kernel as mlp_fused_add_kernel
from neuronjax.primitives.mlp import mlp_kernel as mlp_kernel
from neuronjax.primitives.mlp import (
    quant_mlp_fused_add_kernel as quant_mlp_fused_add_kernel,
)
from neuronjax.primitives.mlp import quant_mlp_kernel as quant_mlp_kernel
from neuronjax.primitives.output_projection.macro import (
    output_projection_kernel as output_projection_kernel,
)
from neuronjax.primitives.probes import (
    column_tiled_mm_kernel as column_tiled_mm_kernel,
)
from neuronjax.primitives.probes import (
    packed_cayman_pe_tp_kernel as packed_cayman_pe_tp_kernel,
)
from neuronjax.primitives.probes import row_tiled_mm_kernel as row_tiled_mm_kernel
from neuronjax.primitives.qkv.macro import qkv_fused_add_kernel as qkv_fused_add_kernel
from neuronjax.primitives.qkv.macro import qkv_kernel as qkv_kernel
from neuronjax.primitives.reduce import (
    neuron_reduce_macro_kernel as neuron_reduce_macro_kernel,
)
from neuronjax.primitives.rmsnorm_quant.macro import (
    rmsnorm_quant_kernel as rmsnorm_quant_kernel,
)
from neuronjax.primitives.rope import rope_kernel as rope_kernel
from neuronjax.primitives.router_topk.macro import (
    router_topk_kernel as router_topk_kernel,
)
from neuronjax.primitives.topk_reduce import top_k_reduce_kernel as top_k_reduce_kernel
from neuronjax.primitives.transpose import transpose_kernel as transpose_kernel
