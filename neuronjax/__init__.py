"""NeuronJAX: the Neuron compiler's macro kernels as differentiable JAX primitives."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from neuronjax import emit as emit
from neuronjax.context import lowering as lowering
from neuronjax.context import plain as plain
from neuronjax.context import target as target
from neuronjax.primitives.attention.backward import attention_bwd as attention_bwd
from neuronjax.primitives.attention.decode_config import AttnTKGConfig as AttnTKGConfig
from neuronjax.primitives.attention.decode_tkg import attention_tkg as attention_tkg
from neuronjax.primitives.attention.mask_orders import (
    mask_from_token_order as mask_from_token_order,
)
from neuronjax.primitives.attention.mask_orders import (
    mask_to_token_order as mask_to_token_order,
)
from neuronjax.primitives.attention.mask_rules import MaskOrder as MaskOrder
from neuronjax.primitives.attention.masks import gen_mask_tkg as gen_mask_tkg
from neuronjax.primitives.attention.masks import gen_mask_tkg_hbm as gen_mask_tkg_hbm
from neuronjax.primitives.attention.prefill import attention_cte as attention_cte
from neuronjax.primitives.attention.statistics import (
    statistics_from_tiles as statistics_from_tiles,
)
from neuronjax.primitives.attention.statistics import (
    statistics_to_tiles as statistics_to_tiles,
)
from neuronjax.primitives.attention_block_tkg import (
    attention_block_tkg as attention_block_tkg,
)
from neuronjax.primitives.blockwise_mm import (
    blockwise_mm_baseline_shard_hidden as blockwise_mm_baseline_shard_hidden,
)
from neuronjax.primitives.blockwise_mm import blockwise_mm_bwd as blockwise_mm_bwd
from neuronjax.primitives.blockwise_mm import moe_cte as moe_cte
from neuronjax.primitives.blockwise_mm.spec import ClampLimits as ClampLimits
from neuronjax.primitives.blockwise_mm.spec import MoECTESpec as MoECTESpec
from neuronjax.primitives.blockwise_mm.spec import (
    QuantizationConfig as QuantizationConfig,
)
from neuronjax.primitives.blockwise_mm.spec import (
    ShardOnBlockConfig as ShardOnBlockConfig,
)
from neuronjax.primitives.blockwise_mm.spec import ShardOnIConfig as ShardOnIConfig
from neuronjax.primitives.blockwise_mm.spec import SkipMode as SkipMode
from neuronjax.primitives.collectives import (
    allgather_compute_matmul as allgather_compute_matmul,
)
from neuronjax.primitives.collectives import allgather_sb2sb as allgather_sb2sb
from neuronjax.primitives.collectives import (
    allgather_sb2sb_tiled as allgather_sb2sb_tiled,
)
from neuronjax.primitives.collectives import (
    fine_grained_allgather as fine_grained_allgather,
)
from neuronjax.primitives.collectives import (
    fine_grained_reduce_scatter as fine_grained_reduce_scatter,
)
from neuronjax.primitives.collectives import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from neuronjax.primitives.contracts import can as can
from neuronjax.primitives.conv import conv1d as conv1d
from neuronjax.primitives.conv import conv1d_plan as conv1d_plan
from neuronjax.primitives.conv import (
    depthwise_conv1d_implicit_gemm as depthwise_conv1d_implicit_gemm,
)
from neuronjax.primitives.cross_entropy import cross_entropy as cross_entropy
from neuronjax.primitives.cross_entropy import (
    cross_entropy_backward as cross_entropy_backward,
)
from neuronjax.primitives.cross_entropy import (
    cross_entropy_forward as cross_entropy_forward,
)
from neuronjax.primitives.cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from neuronjax.primitives.cumsum import cumsum as cumsum
from neuronjax.primitives.expert_mlps import moe_tkg as moe_tkg
from neuronjax.primitives.fused_linear import fused_linear as fused_linear
from neuronjax.primitives.indices import (
    dynamic_elementwise_add as dynamic_elementwise_add,
)
from neuronjax.primitives.indices import find_nonzero_indices as find_nonzero_indices
from neuronjax.primitives.indices import (
    find_nonzero_indices_with_count as find_nonzero_indices_with_count,
)
from neuronjax.primitives.indices import indexed_flatten as indexed_flatten
from neuronjax.primitives.llama3_transformer import (
    llama3_transformer as llama3_transformer,
)
from neuronjax.primitives.macro import Example as Example
from neuronjax.primitives.mlp import mlp as mlp
from neuronjax.primitives.moe_block_tkg import moe_block_tkg as moe_block_tkg
from neuronjax.primitives.mx import dequantize_mx as dequantize_mx
from neuronjax.primitives.mx import down_proj_mx as down_proj_mx
from neuronjax.primitives.mx import gate_up_proj_mx as gate_up_proj_mx
from neuronjax.primitives.mx import mx_matmul as mx_matmul
from neuronjax.primitives.mx import (
    mxfp_load_performance_wrapper as mxfp_load_performance_wrapper,
)
from neuronjax.primitives.mx import pack_mx as pack_mx
from neuronjax.primitives.mx import quantize_mx as quantize_mx
from neuronjax.primitives.mx import quantize_mx_weight as quantize_mx_weight
from neuronjax.primitives.mx import quantize_to_mx as quantize_to_mx
from neuronjax.primitives.mx import swizzle_hidden as swizzle_hidden
from neuronjax.primitives.mx import unpack_mx as unpack_mx
from neuronjax.primitives.mx import unswizzle_hidden as unswizzle_hidden
from neuronjax.primitives.norm_tkg import layernorm_tkg as layernorm_tkg
from neuronjax.primitives.norm_tkg import rmsnorm_tkg as rmsnorm_tkg
from neuronjax.primitives.options import ActFnType as ActFnType
from neuronjax.primitives.options import AffinityOption as AffinityOption
from neuronjax.primitives.options import BlockShardStrategy as BlockShardStrategy
from neuronjax.primitives.options import (
    ExpertAffinityScaleMode as ExpertAffinityScaleMode,
)
from neuronjax.primitives.options import KernelTypeOption as KernelTypeOption
from neuronjax.primitives.options import MoECTEImplementation as MoECTEImplementation
from neuronjax.primitives.options import NormType as NormType
from neuronjax.primitives.options import QuantizationType as QuantizationType
from neuronjax.primitives.options import RouterActFnType as RouterActFnType
from neuronjax.primitives.options import ShardOption as ShardOption
from neuronjax.primitives.output_projection import (
    output_projection_cte as output_projection_cte,
)
from neuronjax.primitives.output_projection import (
    output_projection_tkg as output_projection_tkg,
)
from neuronjax.primitives.probes import (
    combine_trn2_double_row_matmult_tiles as combine_trn2_double_row_matmult_tiles,
)
from neuronjax.primitives.probes import probe_plan as probe_plan
from neuronjax.primitives.qkv import qkv as qkv
from neuronjax.primitives.qkv import qkv_cte as qkv_cte
from neuronjax.primitives.qkv import qkv_tkg as qkv_tkg
from neuronjax.primitives.reduce import layer_norm as layer_norm
from neuronjax.primitives.reduce import reduce as reduce
from neuronjax.primitives.reduce import rms_norm as rms_norm
from neuronjax.primitives.registry import resolve_kernel_config as resolve_kernel_config
from neuronjax.primitives.rmsnorm_quant import (
    RmsNormQuantKernelArgs as RmsNormQuantKernelArgs,
)
from neuronjax.primitives.rmsnorm_quant import pack_rows as pack_rows
from neuronjax.primitives.rmsnorm_quant import rmsnorm_quant as rmsnorm_quant
from neuronjax.primitives.rmsnorm_quant import unpack_rows as unpack_rows
from neuronjax.primitives.rope import RoPE as RoPE
from neuronjax.primitives.rope import rope_hf as rope_hf
from neuronjax.primitives.router_topk import expert_counts as expert_counts
from neuronjax.primitives.router_topk import load_balance_loss as load_balance_loss
from neuronjax.primitives.router_topk import router_topk as router_topk
from neuronjax.primitives.routing import mask_affinities as mask_affinities
from neuronjax.primitives.routing import route_to_blocks as route_to_blocks
from neuronjax.primitives.tile import MemrefTile as MemrefTile
from neuronjax.primitives.tile import (
    is_all_io_type_memref_tile as is_all_io_type_memref_tile,
)
from neuronjax.primitives.top_k import topk as topk
from neuronjax.primitives.topk_reduce import topk_reduce as topk_reduce
from neuronjax.primitives.transformer_tkg import transformer_tkg as transformer_tkg
from neuronjax.primitives.transpose import transpose as transpose
from neuronjax.primitives.user_kernel import register_kernel as register_kernel
from neuronjax.tools.diff import diff as diff
from neuronjax.tools.export import ExportedProgram as ExportedProgram
from neuronjax.tools.export import export as export
from neuronjax.tools.gradcheck import gradcheck as gradcheck
from neuronjax.tools.provenance import poison as poison
from neuronjax.tools.trace import trace as trace
from neuronjax.tools.transformations import (
    check_transformations as check_transformations,
)
from neuronjax.tools.verify import verify as verify

if _TYPE_CHECKING:
    from neuronjax.nn.quantization import quantize as quantize

__version__ = "0.1.0"


def __getattr__(name: str):
    """`neuronjax.quantize`, found when asked for: it needs Flax, the rest does not."""
    if name != "quantize":
        raise AttributeError(f"module 'neuronjax' has no attribute {name!r}")
    from neuronjax.nn.quantization import quantize

    return quantize
