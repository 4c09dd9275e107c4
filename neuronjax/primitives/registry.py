"""The catalog: every macro NAME, its leaf, its lowering twin, its family."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.extend.core import Primitive

    from neuronjax.primitives.macro import MacroFamily


@dataclasses.dataclass(frozen=True)
class Entry:
    """One NAME of the catalog.

    Attributes:
        name: the macro NAME.
        leaf: the module that holds its math.
        twin: `"bespoke"` or `"generic"`: how the vendor's lowering side treats it.
        emitter: the function of `neuronjax.emit` that emits it; empty for backward
            macros, which differentiation emits.
        tiled: True when it takes tiles, False when tensors, None when one NAME takes
            both.
    """

    name: str
    leaf: str
    twin: str
    emitter: str = ""
    tiled: bool | None = False


# The NAME that emits any leaf, which its config names.
FALLBACK = "BIRKernel"


def _rows(leaf: str, twin: str, emitter: str, *names: str, **kind) -> list[Entry]:
    return [Entry(name, leaf, twin, emitter, **kind) for name in names]


_SOURCE = [
    *_rows(
        "attention",
        "bespoke",
        "attention_kernel",
        "AttentionMMSoftmaxMM",
        "AttentionMMSoftmaxMMWithoutSwap",
        "CausalAttentionMMSoftmaxMMWithoutSwap",
        "V2AttentionMMSoftmaxMMWithoutSwap",
        "V2CausalAttentionMMSoftmaxMMWithoutSwap",
    ),
    Entry(
        "TiledNativeKernelAttention", "attention", "bespoke", "attention_kernel", True
    ),
    Entry("AttentionTkgFwd", "attention", "generic", "attention_tkg_fwd_kernel", None),
    Entry("BackwardsAttention", "attention", "bespoke", "backwards_attention_kernel"),
    Entry("AttentionTkgFwdBwd", "attention", "generic"),
    Entry("AttentionBlockTkgBwd", "attention", "generic"),
    Entry("MLP", "mlp", "bespoke", "mlp_kernel"),
    Entry("TiledNativeKernelMLP", "mlp", "bespoke", "mlp_kernel", True),
    Entry("QKV", "qkv", "bespoke", "qkv_kernel"),
    Entry("TiledNativeKernelQKV", "qkv", "bespoke", "qkv_kernel", True),
    Entry("RMSNormQuant", "rmsnorm", "bespoke", "rmsnorm_quant_kernel"),
    Entry(
        "TiledNativeKernelRMSNormQuant",
        "rmsnorm",
        "bespoke",
        "rmsnorm_quant_kernel",
        True,
    ),
    Entry("RouterTopK", "router_topk", "generic", "router_topk_kernel", None),
    Entry("ExpertMLPs", "expert_mlps", "generic", "expert_mlps_kernel", None),
    Entry("RowTiledMM", "hw_ubench", "generic", "row_tiled_mm_kernel", None),
    Entry("ColumnTiledMM", "hw_ubench", "generic", "column_tiled_mm_kernel", None),
    Entry(
        "CaymanPackedPETranspose",
        "hw_ubench",
        "generic",
        "packed_cayman_pe_tp_kernel",
        None,
    ),
    Entry("NeuronReduceMacro", "reduce", "bespoke", "neuron_reduce_macro_kernel"),
    Entry(FALLBACK, "any registered leaf", "generic", "bir_kernel"),
    Entry("BlockwiseMM", "blockwise_mm", "generic", "blockwise_mm_kernel"),
    Entry(
        "CollectiveMatmul", "collective_matmul", "generic", "collective_matmul_kernel"
    ),
    Entry(
        "MatmulReduceScatter",
        "collective_matmul",
        "generic",
        "matmul_reduce_scatter_kernel",
    ),
    Entry(
        "FineGrainedAllGather",
        "collective_matmul",
        "generic",
        "fine_grained_all_gather_kernel",
    ),
    Entry(
        "FineGrainedReduceScatter",
        "collective_matmul",
        "generic",
        "fine_grained_reduce_scatter_kernel",
    ),
    Entry("SB2SBAllGather", "collective_matmul", "generic", "sb2sb_all_gather_kernel"),
    Entry("CollectiveMatmulBwd", "collective_matmul", "generic"),
    Entry("SB2SBAllGatherBwd", "collective_matmul", "generic"),
    Entry("AttentionBlockTkg", "attention", "generic", "attention_block_tkg_kernel"),
    Entry("TopKReduce", "router_topk", "generic", "top_k_reduce_kernel"),
    Entry("Conv1D", "conv", "generic", "conv1d_kernel"),
    Entry("DepthwiseConv1D", "conv", "generic", "depthwise_conv1d_kernel"),
    Entry("CrossEntropyFwd", "cross_entropy", "generic", "cross_entropy_fwd_kernel"),
    Entry("CrossEntropyBwd", "cross_entropy", "generic", "cross_entropy_bwd_kernel"),
    # A NAME of this project, like its backward below: the vendor has no such kernel.
    Entry(
        "LinearCrossEntropy", "cross_entropy", "generic", "linear_cross_entropy_kernel"
    ),
    Entry("CumSum", "cumsum", "generic", "cum_sum_kernel"),
    Entry("RoPE", "RoPE", "generic", "rope_kernel"),
    Entry(
        "OutputProjection",
        "output_projection",
        "generic",
        "output_projection_kernel",
        None,
    ),
    Entry("Transpose", "transpose", "generic", "transpose_kernel", None),
    Entry("FusedLinear", "fused_linear", "generic", "fused_linear_kernel"),
    Entry(
        "Llama3Transformer",
        "llama3_transformer",
        "generic",
        "llama3_transformer_kernel",
    ),
    Entry("MLPBwd", "mlp", "generic"),
    Entry("QKVBwd", "qkv", "generic"),
    Entry("OutputProjectionBwd", "output_projection", "generic"),
    Entry("RoPEBwd", "RoPE", "generic"),
    Entry("NeuronReduceMacroBwd", "reduce", "generic"),
    Entry("FusedLinearBwd", "fused_linear", "generic"),
    Entry("RouterTopKBwd", "router_topk", "generic"),
    Entry("TopKReduceBwd", "router_topk", "generic"),
    Entry("CumSumBwd", "cumsum", "generic"),
    Entry("BlockwiseMMBwd", "blockwise_mm", "generic", "blockwise_mm_bwd_kernel"),
    Entry("Conv1DBwd", "conv", "generic"),
    Entry("DepthwiseConv1DBwd", "conv", "generic"),
    Entry("LinearCrossEntropyBwd", "cross_entropy", "generic"),
    Entry("Llama3TransformerBwd", "llama3_transformer", "generic"),
]

CATALOG = {entry.name: entry for entry in _SOURCE}

ALIASES = {"MLPKernel": "MLP", "RMSNormQuantKernel": "RMSNormQuant"}

# Keyed by kernel_name: the prefix-caching leaf serves these attention NAMEs.
PREFIX_CACHING_NAMES = (
    "AttentionMMSoftmaxMMWithoutSwap",
    "CausalAttentionMMSoftmaxMMWithoutSwap",
    "V2AttentionMMSoftmaxMMWithoutSwap",
    "V2CausalAttentionMMSoftmaxMMWithoutSwap",
)

# The NAMEs that users register, beside the catalog.
USERS: dict[str, Entry] = {}

FAMILIES: dict[str, MacroFamily] = {}
# By primitive: also a user's family whose NAME another one has taken since.
PRIMITIVES: dict[Primitive, MacroFamily] = {}
_BY_NAME: dict[str, MacroFamily] = {}
_VARIANTS: dict[str, MacroFamily] = {}


def declare(family: MacroFamily) -> None:
    """Enters a family under its NAMEs; one outside the catalog is a fault of ours."""
    for name in family.names:
        if name not in CATALOG and name not in USERS:
            raise KeyError(f"{family.family} declares {name}, which the catalog lacks")
        if not family.keyed:
            _BY_NAME[name] = family
    _VARIANTS.update(dict.fromkeys(family.variants, family))
    FAMILIES[family.family] = family
    PRIMITIVES[family.macro_p] = family


def enter(entry: Entry) -> None:
    """Makes room for a user's NAME; its family declares itself afterwards."""
    USERS[entry.name] = entry


def withdraw(name: str) -> None:
    """Forgets a user's NAME, for another kernel that takes it."""
    del USERS[name]
    FAMILIES.pop(_BY_NAME.pop(name).family, None)
    fallback().forget()


def is_of(name: str, family: MacroFamily) -> bool:
    """Whether the NAME is a leaf of `family`, and not the fallback itself."""
    return name != FALLBACK and _BY_NAME.get(ALIASES.get(name, name)) is family


def fallback() -> MacroFamily:
    """The family that emits any leaf by its NAME."""
    return _BY_NAME[FALLBACK]


def examples() -> list[str]:
    """The label of every example of the catalog: each NAME, and the variants."""
    return sorted([*(name for name in _BY_NAME if name in CATALOG), *_VARIANTS])


def family_of(label: str) -> MacroFamily:
    """The family of an example: one NAME may have forms in two families."""
    return _VARIANTS[label] if label in _VARIANTS else resolve_family(label)


def resolve_kernel_config(name: str) -> Entry:
    """Finds the entry of a macro NAME.

    Args:
        name: a NAME of the catalog, one of its aliases, or a NAME of `register_kernel`.

    Returns:
        The entry: leaf, lowering twin, emitter.

    Raises:
        ValueError: no such NAME; the message lists near matches.

    Example:
        >>> resolve_kernel_config("MLPKernel").leaf
        'mlp'
    """
    entry = find(name)
    if entry is None:
        raise ValueError(
            f"resolve_kernel_config: name must be a macro NAME of the catalog, "
            f"got {name!r}{near(name)}"
        )
    return entry


def find(name: str) -> Entry | None:
    """The entry of a NAME or alias; `None` if there is none."""
    return CATALOG.get(ALIASES.get(name, name)) or USERS.get(name)


def near(name: str) -> str:
    """The NAMEs that `name` may have meant, for the end of a message."""
    known = [*CATALOG, *ALIASES, *USERS]
    matches = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    return f"; near matches: {', '.join(matches)}" if matches else ""


def resolve_family(name: str) -> MacroFamily:
    """The family that traces the leaf of NAME.

    Raises:
        ValueError: no such NAME.
    """
    return _BY_NAME[resolve_kernel_config(name).name]
