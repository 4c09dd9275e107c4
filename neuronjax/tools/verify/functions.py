"""The NAMEs that each public function emits."""

import difflib

import jax
import jax.numpy as jnp

import neuronjax.emit  # noqa: F401  registers every family
from neuronjax.primitives import registry

_ATTENTION = (
    "AttentionMMSoftmaxMM",
    "AttentionMMSoftmaxMMWithoutSwap",
    "CausalAttentionMMSoftmaxMMWithoutSwap",
)
FUNCTIONS = {
    "attention_cte": _ATTENTION,
    "attention_bwd": ("BackwardsAttention",),
    "attention_tkg": ("AttentionTkgFwd",),
    "attention_block_tkg": ("AttentionBlockTkg",),
    "blockwise_mm_bwd": ("BlockwiseMMBwd",),
    "blockwise_mm_baseline_shard_hidden": ("BlockwiseMM",),
    "moe_cte": ("BlockwiseMM",),
    "moe_tkg": ("ExpertMLPs",),
    "allgather_compute_matmul": ("CollectiveMatmul",),
    "allgather_sb2sb": ("SB2SBAllGather",),
    "allgather_sb2sb_tiled": ("SB2SBAllGather",),
    "fine_grained_allgather": ("FineGrainedAllGather",),
    "fine_grained_reduce_scatter": ("FineGrainedReduceScatter",),
    "matmul_reduce_scatter": ("MatmulReduceScatter",),
    "conv1d": ("Conv1D",),
    "depthwise_conv1d_implicit_gemm": ("DepthwiseConv1D",),
    "cross_entropy": ("CrossEntropyFwd",),
    "cross_entropy_forward": ("CrossEntropyFwd",),
    "cross_entropy_backward": ("CrossEntropyBwd",),
    "linear_cross_entropy": ("LinearCrossEntropy",),
    "cumsum": ("CumSum",),
    "mlp": ("MLP", "TiledNativeKernelMLP"),
    "output_projection_cte": ("OutputProjection",),
    "output_projection_tkg": ("OutputProjection",),
    "qkv": ("QKV", "TiledNativeKernelQKV"),
    "qkv_cte": ("QKV",),
    "qkv_tkg": ("QKV",),
    "layer_norm": ("NeuronReduceMacro",),
    "rms_norm": ("NeuronReduceMacro",),
    "rmsnorm_quant": ("RMSNormQuant", "TiledNativeKernelRMSNormQuant"),
    "RoPE": ("RoPE",),
    "rope_hf": ("RoPE",),
    "router_topk": ("RouterTopK",),
    "topk_reduce": ("TopKReduce",),
    "reduce": ("NeuronReduceMacro",),
    "fused_linear": ("FusedLinear",),
    "transpose": ("Transpose",),
    "llama3_transformer": ("Llama3Transformer",),
}


def every_label() -> list[str]:
    """Every example: those of the catalog, and of kernels that users registered."""
    return [*registry.examples(), *filter(_has_example, sorted(registry.USERS))]


def _has_example(name: str) -> bool:
    try:
        family = registry.resolve_family(name)
        jax.eval_shape(lambda: family.example(name, jnp.dtype("float32"), 2).operands)
    except Exception as error:  # any other is told when it is checked
        return "has no example" not in str(error)
    return True


def labels_of(op: str, asked: str = "verify: OP") -> list[str]:
    """The examples of a NAME, of a variant's label, or of a public function's NAMEs.

    Args:
        op: any of these.
        asked: the command and its argument, for the error.

    Raises:
        ValueError: it is none of these; the message lists near matches.
    """
    known = [*registry.examples(), *sorted(registry.USERS)]
    if op in known and " " in op:
        return [op]
    names = [registry.ALIASES.get(op, op)]
    if op not in known and op not in registry.ALIASES:
        names = list(FUNCTIONS.get(op, ()))
    found = [label for label in known if label.split(" ")[0] in names]
    if not found:
        spelled = {_letters(name): name for name in (*known, *FUNCTIONS)}
        near = difflib.get_close_matches(_letters(op), spelled, n=3, cutoff=0.5)
        told = ", ".join(spelled[each] for each in near)
        hint = f"; near matches: {told}" if told else ""
        raise ValueError(
            f"{asked} must be a macro NAME or a function that emits one, "
            f"got {op!r}{hint}"
        )
    return found


def _letters(name: str) -> str:
    """The name without case and underscores: RMSNorm comes near rms_norm."""
    return name.lower().replace("_", "")
