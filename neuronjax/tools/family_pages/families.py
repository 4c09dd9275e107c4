"""Which functions, emitters, macros and layers stand on which page."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FamilyPage:
    """What one page is about.

    Attributes:
        slug: its file, without the ending.
        title: its heading.
        functions: public functions, in order.
        emitters: functions of `neuronjax.emit`.
        names: the macros that these emit.
        gradients: the macros that their gradients emit, beside those.
        layers: layers of `neuronjax.nn`.
        guide: the page that explains the family, if there is one.
    """

    slug: str
    title: str
    functions: tuple[str, ...] = ()
    emitters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    guide: str = ""


FAMILY_PAGES = (
    FamilyPage(
        "attention_prefill",
        "Attention, prefill and training",
        functions=(
            "attention_cte",
            "attention_bwd",
            "statistics_from_tiles",
            "statistics_to_tiles",
        ),
        emitters=(
            "attention_kernel",
            "attention_prefix_caching_fwd_kernel",
            "backwards_attention_kernel",
        ),
        names=(
            "AttentionMMSoftmaxMM",
            "AttentionMMSoftmaxMMWithoutSwap",
            "CausalAttentionMMSoftmaxMMWithoutSwap",
            "V2AttentionMMSoftmaxMMWithoutSwap",
            "V2CausalAttentionMMSoftmaxMMWithoutSwap",
            "TiledNativeKernelAttention",
        ),
        gradients=("BackwardsAttention",),
        layers=("Attention", "QuantizedAttention"),
        guide="attention",
    ),
    FamilyPage(
        "attention_decode",
        "Attention, decode",
        functions=(
            "attention_tkg",
            "gen_mask_tkg",
            "gen_mask_tkg_hbm",
            "mask_from_token_order",
            "mask_to_token_order",
        ),
        emitters=("attention_tkg_fwd_kernel",),
        names=("AttentionTkgFwd",),
        gradients=("AttentionTkgFwdBwd",),
        layers=("LayerCache",),
        guide="attention",
    ),
    FamilyPage(
        "attention_block_tkg",
        "The fused decode block",
        functions=("attention_block_tkg",),
        emitters=("attention_block_tkg_kernel",),
        names=("AttentionBlockTkg",),
        gradients=("AttentionBlockTkgBwd",),
        layers=("AttentionBlock",),
        guide="attention",
    ),
    FamilyPage(
        "qkv",
        "Query, key and value projection",
        functions=("qkv", "qkv_cte", "qkv_tkg"),
        emitters=("qkv_kernel", "qkv_fused_add_kernel"),
        names=("QKV", "TiledNativeKernelQKV"),
        gradients=("QKVBwd",),
        layers=("QKV",),
        guide="quantization",
    ),
    FamilyPage(
        "rope",
        "Rotary embedding",
        functions=("RoPE", "rope_hf"),
        emitters=("rope_kernel",),
        names=("RoPE",),
        gradients=("RoPEBwd",),
        layers=("RotaryEmbedding",),
    ),
    FamilyPage(
        "output_projection",
        "Output projection",
        functions=("output_projection_cte", "output_projection_tkg"),
        emitters=("output_projection_kernel",),
        names=("OutputProjection",),
        gradients=("OutputProjectionBwd",),
        layers=("OutputProjection",),
        guide="quantization",
    ),
    FamilyPage(
        "mlp",
        "Feed-forward block",
        functions=("mlp",),
        emitters=(
            "mlp_kernel",
            "mlp_fused_add_kernel",
            "quant_mlp_kernel",
            "quant_mlp_fused_add_kernel",
        ),
        names=("MLP", "TiledNativeKernelMLP"),
        gradients=("MLPBwd",),
        layers=("MLP", "QuantizedMLP", "DecoderLayer"),
        guide="quantization",
    ),
    FamilyPage(
        "reduce",
        "Norms and reductions",
        functions=("rms_norm", "layer_norm", "reduce", "rmsnorm_tkg", "layernorm_tkg"),
        emitters=("neuron_reduce_macro_kernel",),
        names=("NeuronReduceMacro",),
        gradients=("NeuronReduceMacroBwd",),
        layers=("RMSNorm", "LayerNorm"),
        guide="small_families",
    ),
    FamilyPage(
        "rmsnorm_quant",
        "Norm and fp8 rows",
        functions=("rmsnorm_quant", "pack_rows", "unpack_rows"),
        emitters=("rmsnorm_quant_kernel",),
        names=("RMSNormQuant", "TiledNativeKernelRMSNormQuant"),
        layers=("RMSNormQuant",),
        guide="quantization",
    ),
    FamilyPage(
        "fused_linear",
        "Linear layer, norm to residual",
        functions=("fused_linear",),
        emitters=("fused_linear_kernel",),
        names=("FusedLinear",),
        gradients=("FusedLinearBwd",),
        layers=("FusedLinear",),
        guide="small_families",
    ),
    FamilyPage(
        "transpose",
        "Transpose",
        functions=("transpose",),
        emitters=("transpose_kernel",),
        names=("Transpose",),
        guide="small_families",
    ),
    FamilyPage(
        "router_topk",
        "Router",
        functions=("router_topk", "expert_counts", "load_balance_loss"),
        emitters=("router_topk_kernel",),
        names=("RouterTopK",),
        gradients=("RouterTopKBwd",),
        layers=("Router", "SelectionBias"),
        guide="moe",
    ),
    FamilyPage(
        "blockwise_mm",
        "Experts, prefill and training",
        functions=(
            "moe_cte",
            "blockwise_mm_baseline_shard_hidden",
            "blockwise_mm_bwd",
            "route_to_blocks",
            "mask_affinities",
        ),
        emitters=("blockwise_mm_kernel", "blockwise_mm_bwd_kernel"),
        names=("BlockwiseMM",),
        gradients=("BlockwiseMMBwd",),
        layers=("MoE", "MoEDecoderLayer"),
        guide="moe",
    ),
    FamilyPage(
        "expert_mlps",
        "Experts, decode",
        functions=("moe_tkg", "moe_block_tkg"),
        emitters=("expert_mlps_kernel",),
        names=("ExpertMLPs",),
        gradients=("BlockwiseMMBwd",),
        layers=("MoE",),
        guide="moe",
    ),
    FamilyPage(
        "topk_reduce",
        "Rows that experts returned",
        functions=("topk_reduce",),
        emitters=("top_k_reduce_kernel",),
        names=("TopKReduce",),
        gradients=("TopKReduceBwd",),
        guide="moe",
    ),
    FamilyPage(
        "conv",
        "Convolutions",
        functions=("conv1d", "conv1d_plan", "depthwise_conv1d_implicit_gemm"),
        emitters=("conv1d_kernel", "depthwise_conv1d_kernel"),
        names=("Conv1D", "DepthwiseConv1D"),
        gradients=("Conv1DBwd", "DepthwiseConv1DBwd"),
        layers=("Conv1D", "DepthwiseConv1D"),
        guide="convolutions",
    ),
    FamilyPage(
        "cross_entropy",
        "Losses of a large vocabulary",
        functions=(
            "cross_entropy",
            "linear_cross_entropy",
            "cross_entropy_forward",
            "cross_entropy_backward",
        ),
        emitters=(
            "cross_entropy_fwd_kernel",
            "cross_entropy_bwd_kernel",
            "linear_cross_entropy_kernel",
        ),
        names=("CrossEntropyFwd", "LinearCrossEntropy"),
        gradients=("CrossEntropyBwd", "LinearCrossEntropyBwd"),
        layers=("CrossEntropy", "LinearCrossEntropy"),
        guide="losses",
    ),
    FamilyPage(
        "collectives",
        "Rings over ranks",
        functions=(
            "allgather_compute_matmul",
            "matmul_reduce_scatter",
            "fine_grained_allgather",
            "fine_grained_reduce_scatter",
            "allgather_sb2sb",
            "allgather_sb2sb_tiled",
        ),
        emitters=(
            "collective_matmul_kernel",
            "matmul_reduce_scatter_kernel",
            "fine_grained_all_gather_kernel",
            "fine_grained_reduce_scatter_kernel",
            "sb2sb_all_gather_kernel",
        ),
        names=(
            "CollectiveMatmul",
            "MatmulReduceScatter",
            "FineGrainedAllGather",
            "FineGrainedReduceScatter",
            "SB2SBAllGather",
        ),
        gradients=("CollectiveMatmulBwd", "SB2SBAllGatherBwd"),
        layers=("ColumnParallel", "RowParallel"),
        guide="collectives",
    ),
    FamilyPage(
        "cumsum",
        "Running sums",
        functions=("cumsum",),
        emitters=("cum_sum_kernel",),
        names=("CumSum",),
        gradients=("CumSumBwd",),
    ),
    FamilyPage(
        "indices",
        "Top-k and index lists",
        functions=(
            "topk",
            "find_nonzero_indices",
            "find_nonzero_indices_with_count",
            "indexed_flatten",
            "dynamic_elementwise_add",
        ),
    ),
    FamilyPage(
        "mx",
        "Block-scaled (MX) values",
        functions=(
            "quantize_mx",
            "quantize_to_mx",
            "quantize_mx_weight",
            "dequantize_mx",
            "pack_mx",
            "unpack_mx",
            "mx_matmul",
            "gate_up_proj_mx",
            "down_proj_mx",
            "swizzle_hidden",
            "unswizzle_hidden",
            "mxfp_load_performance_wrapper",
        ),
        guide="quantization",
    ),
    FamilyPage(
        "probes",
        "Small products in one pass",
        functions=("probe_plan", "combine_trn2_double_row_matmult_tiles"),
        emitters=(
            "row_tiled_mm_kernel",
            "column_tiled_mm_kernel",
            "packed_cayman_pe_tp_kernel",
        ),
        names=("RowTiledMM", "ColumnTiledMM", "CaymanPackedPETranspose"),
        guide="probes",
    ),
    FamilyPage(
        "llama3_transformer",
        "All layers of a decoder over whole sequences",
        functions=("llama3_transformer",),
        emitters=("llama3_transformer_kernel",),
        names=("Llama3Transformer",),
        gradients=("Llama3TransformerBwd",),
        layers=("DecoderStack",),
        guide="llama3_transformer",
    ),
    FamilyPage(
        "transformer_tkg",
        "All layers of a decode step",
        functions=("transformer_tkg",),
        layers=("DecoderStack",),
        guide="transformer_tkg",
    ),
    FamilyPage(
        "bir_kernel",
        "Any kernel by its NAME",
        functions=("register_kernel",),
        emitters=("bir_kernel",),
        names=("BIRKernel",),
        guide="your_kernel",
    ),
)
