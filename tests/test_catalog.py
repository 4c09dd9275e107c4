"""The catalog of macros, walked: each NAME is emitted, lowered and exported."""

import jax
import numpy as np
import pytest
from jax import export

import neuronjax
from neuronjax import emit
from neuronjax.primitives import registry
from tests.emitter_calls import BACKWARDS, CALLS, OTHERS, TILED

# The vendor's table: emitter -> untiled NAMEs, tiled NAME ("same" for the same one).
VENDOR = {
    "attention_kernel": (
        [
            "AttentionMMSoftmaxMM",
            "AttentionMMSoftmaxMMWithoutSwap",
            "CausalAttentionMMSoftmaxMMWithoutSwap",
            "V2AttentionMMSoftmaxMMWithoutSwap",
            "V2CausalAttentionMMSoftmaxMMWithoutSwap",
        ],
        "TiledNativeKernelAttention",
    ),
    "attention_tkg_fwd_kernel": (["AttentionTkgFwd"], "same"),
    "backwards_attention_kernel": (["BackwardsAttention"], None),
    "mlp_kernel": (["MLP"], "TiledNativeKernelMLP"),
    "qkv_kernel": (["QKV"], "TiledNativeKernelQKV"),
    "rmsnorm_quant_kernel": (["RMSNormQuant"], "TiledNativeKernelRMSNormQuant"),
    "router_topk_kernel": (["RouterTopK"], "same"),
    "expert_mlps_kernel": (["ExpertMLPs"], "same"),
    "row_tiled_mm_kernel": (["RowTiledMM"], "same"),
    "column_tiled_mm_kernel": (["ColumnTiledMM"], "same"),
    "packed_cayman_pe_tp_kernel": (["CaymanPackedPETranspose"], "same"),
    "neuron_reduce_macro_kernel": (["NeuronReduceMacro"], None),
    "bir_kernel": (["BIRKernel"], None),
}
# Those of the second source: NAME -> emitter, by the rule FooBar -> foo_bar_kernel.
EXPERIMENTAL = {
    "BlockwiseMM": "blockwise_mm_kernel",
    "BlockwiseMMBwd": "blockwise_mm_bwd_kernel",
    "CollectiveMatmul": "collective_matmul_kernel",
    "MatmulReduceScatter": "matmul_reduce_scatter_kernel",
    "FineGrainedAllGather": "fine_grained_all_gather_kernel",
    "FineGrainedReduceScatter": "fine_grained_reduce_scatter_kernel",
    "SB2SBAllGather": "sb2sb_all_gather_kernel",
    "AttentionBlockTkg": "attention_block_tkg_kernel",
    "TopKReduce": "top_k_reduce_kernel",
    "Conv1D": "conv1d_kernel",
    "DepthwiseConv1D": "depthwise_conv1d_kernel",
    "CrossEntropyFwd": "cross_entropy_fwd_kernel",
    "CrossEntropyBwd": "cross_entropy_bwd_kernel",
    "CumSum": "cum_sum_kernel",
    "RoPE": "rope_kernel",
    "OutputProjection": "output_projection_kernel",
    "Transpose": "transpose_kernel",
    "FusedLinear": "fused_linear_kernel",
    "Llama3Transformer": "llama3_transformer_kernel",
}
BESPOKE = {
    "AttentionMMSoftmaxMM",
    "AttentionMMSoftmaxMMWithoutSwap",
    "CausalAttentionMMSoftmaxMMWithoutSwap",
    "V2AttentionMMSoftmaxMMWithoutSwap",
    "V2CausalAttentionMMSoftmaxMMWithoutSwap",
    "TiledNativeKernelAttention",
    "BackwardsAttention",
    "MLP",
    "TiledNativeKernelMLP",
    "QKV",
    "TiledNativeKernelQKV",
    "RMSNormQuant",
    "TiledNativeKernelRMSNormQuant",
    "NeuronReduceMacro",
}


def test_the_catalog_is_the_vendors_and_ours():
    for emitter, (untiled, tiled) in VENDOR.items():
        for name in untiled:
            entry = registry.CATALOG[name]
            assert (entry.emitter, entry.tiled) == (
                emitter,
                None if tiled == "same" else False,
            )
        if tiled not in ("same", None):
            entry = registry.CATALOG[tiled]
            assert (entry.emitter, entry.tiled) == (emitter, True)
    for name, emitter in EXPERIMENTAL.items():
        assert registry.CATALOG[name].emitter == emitter
    found = {name for name, e in registry.CATALOG.items() if e.twin == "bespoke"}
    assert found == BESPOKE
    assert registry.ALIASES == {
        "MLPKernel": "MLP",
        "RMSNormQuantKernel": "RMSNormQuant",
    }


def test_no_name_is_missing():
    assert set(registry.CATALOG) == {*CALLS, *BACKWARDS}
    both = {name for name, entry in registry.CATALOG.items() if entry.tiled is None}
    assert set(TILED) == both
    emitters = {entry.emitter for entry in registry.CATALOG.values()} - {""}
    public = {name for name in dir(emit) if name.endswith("_kernel")}
    assert public == emitters | set(OTHERS)


def test_operations_inside_leaves_are_no_names():
    for name in ("MatMulMX", "QuantizeMX"):
        assert name not in registry.CATALOG and name not in registry.FAMILIES
        with pytest.raises(ValueError, match="must be a macro NAME of the catalog"):
            neuronjax.resolve_kernel_config(name)


@pytest.mark.parametrize("name", CALLS)
def test_the_emitter_emits_the_name(name):
    call, entry = CALLS[name], registry.CATALOG[name]
    assert call.emitter == entry.emitter
    (row,) = neuronjax.trace(call.fun, *call.arrays).rows
    assert (row.name, row.count, row.leaf) == (name, 1, entry.leaf)
    assert row.tiled == bool(entry.tiled)
    registry.resolve_family(name)


@pytest.mark.parametrize("name", TILED)
def test_the_emitter_emits_the_same_name_for_tiles(name):
    call = TILED[name]
    assert call.emitter == registry.CATALOG[name].emitter
    (row,) = neuronjax.trace(call.fun, *call.arrays).rows
    assert (row.name, row.count, row.tiled) == (name, 1, True)
    assert dict(row.config)["is_tiled"] is True


@pytest.mark.parametrize("emitter", OTHERS)
def test_another_emitter_emits_the_name_too(emitter):
    name, call = OTHERS[emitter]
    (row,) = neuronjax.trace(call.fun, *call.arrays).rows
    assert (row.name, row.count) == (name, 1)


@pytest.mark.parametrize("name", BACKWARDS)
def test_differentiation_emits_the_backward(name):
    call = CALLS[BACKWARDS[name]]
    found = neuronjax.trace(call.gradient, *call.arrays)
    forward, *others = found.names
    assert forward == BACKWARDS[name] and found.count(name) == 1
    # The gradient of an all-gathered operand is a product that is scattered.
    assert set(others) <= {name, "MatmulReduceScatter"}


def _programs(name):
    if name in CALLS:
        yield CALLS[name].fun, CALLS[name].arrays
    if name in TILED:
        yield TILED[name].fun, TILED[name].arrays
    if name in BACKWARDS:
        call = CALLS[BACKWARDS[name]]
        yield call.gradient, call.arrays


@pytest.mark.parametrize("name", registry.CATALOG)
def test_the_name_is_lowered_and_stands_in_the_exported_module(name):
    """Inline as a function of that NAME, on the composite route as `neuron.<NAME>`."""
    programs = list(_programs(name))
    assert programs
    for fun, arrays in programs:
        inline = jax.jit(lambda *a, fun=fun: fun(*a)).lower(*arrays).as_text()
        assert f"@{name}" in inline
        with neuronjax.lowering("composite"):
            saved = export.export(jax.jit(lambda *a, fun=fun: fun(*a)))(*arrays)
        module = export.deserialize(saved.serialize()).mlir_module()
        assert f'stablehlo.composite "neuron.{name}"' in module


def test_exported_programs_take_and_return_tiles():
    call = TILED["OutputProjection"]
    fun = jax.jit(emit.output_projection_kernel)
    tiles = call.operands["attention"], call.operands["weight"]
    saved = export.deserialize(export.export(fun)(*tiles).serialize())
    wanted, got = fun(*tiles), saved.call(*tiles)
    assert (got.axis, got.buffer) == (wanted.axis, wanted.buffer)
    np.testing.assert_array_equal(got.data, wanted.data)
