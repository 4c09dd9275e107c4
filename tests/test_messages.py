"""The vendor's messages, to the letter and one whole line each."""

import pytest

import neuronjax
from neuronjax.primitives import contracts
from neuronjax.primitives.registry import FAMILIES

PAIR = "Fused add requires both mlp_out and attn_out to be provided or neither of them"
BACKWARD = "Backwards Attention BIR kernel "
# The row of the table and the emitter that breaks it -> the vendor's words.
ROWS = {
    ("mlp.fused_add_pair", "mlp_fused_add_kernel"): PAIR,
    ("mlp.fused_add_pair", "quant_mlp_fused_add_kernel"): PAIR,
    ("qkv.fused_add", "qkv_fused_add_kernel"): PAIR,
    ("attention.tiled_statistics", "attention_kernel"): (
        "Softmax caching not supported yet for tiled attention_kernel. Pass in tensors "
        "instead of tiles."
    ),
    ("attention.unit_scale", "attention_kernel"): (
        "CausalAttentionMMSoftmaxMMWithoutSwap only supports scale equal to 1.0"
    ),
    ("prefix_caching.scale", "attention_prefix_caching_fwd_kernel"): (
        "CausalAttentionMMSoftmaxMMWithoutSwap only supports scale equal to 1.0"
    ),
    ("prefix_caching.name", "attention_prefix_caching_fwd_kernel"): (
        "Prefix caching is not implemented for this kernel name AttentionMMSoftmaxMM"
    ),
    ("backwards_attention.scale", "backwards_attention_kernel"): (
        f"{BACKWARD}only supports softmax scale = 1.0"
    ),
    ("backwards_attention.dropout", "backwards_attention_kernel"): (
        f"{BACKWARD}does not currently support non zero dropout prob"
    ),
    ("rmsnorm_quant.eps_type", "rmsnorm_quant_kernel"): (
        "Expecting eps input to have type float"
    ),
    ("rmsnorm_quant.dst_dtype", "rmsnorm_quant_kernel"): (
        "dst_dtype must be float32 or bfloat16."
    ),
    ("probes.double_row", "packed_cayman_pe_tp_kernel"): (
        "first F dim of LHS and RHS of the double_row matmult must be 2"
    ),
    ("probes.generation", "packed_cayman_pe_tp_kernel"): (
        "perf_mode=double_row_gen3 is not supported on gen2"
    ),
    ("probes.indices_size", "packed_cayman_pe_tp_kernel"): (
        "Unexpected double row index size"
    ),
    ("probes.lanes", "packed_cayman_pe_tp_kernel"): (
        "moving must have indexing i * 32 + j at partition dimension for src tensor "
        "with more than 32 partitions but got [63, 62, 61, 60, ...]"
    ),
}
# Emitters whose operands are tiles or tensors, but no mix of both.
MIXED = (
    "attention_kernel attention_tkg_fwd_kernel mlp_kernel mlp_fused_add_kernel "
    "quant_mlp_kernel quant_mlp_fused_add_kernel qkv_kernel qkv_fused_add_kernel "
    "rmsnorm_quant_kernel router_topk_kernel expert_mlps_kernel row_tiled_mm_kernel "
    "column_tiled_mm_kernel packed_cayman_pe_tp_kernel output_projection_kernel"
).split()
# Family -> what its lowering twin expects.
GUARDS = {
    "attention": (
        "Expected to get an AttentionMMSoftmaxMM or TiledNativeKernelAttention"
    ),
    "backwards_attention": "Expected to get an BackwardsAttention",
    "mlp": "Expected to get an MLP or TiledNativeKernelMLP",
    "qkv": "Expected to get an QKV or TiledNativeKernelQKV",
    "rmsnorm_quant": (
        "Expected to get an RMSNormQuant or TiledNativeKernelRMSNormQuant"
    ),
    "reduce": "Expected to get an NeuronReduceMacro",
    "router_topk": "Expected to get an RouterTopK",
    "row_tiled_mm": "Must be RowTiledMM",
    "column_tiled_mm": "Must be ColumnTiledMM",
    "packed_cayman_pe_tp": "Must be CaymanPackedPETranspose",
}


def _refused(emitter, row):
    arguments = contracts.CONTRACTS[row].example(emitter)
    with pytest.raises(ValueError) as refusal:
        getattr(neuronjax.emit, emitter)(**arguments)
    return str(refusal.value).splitlines()


@pytest.mark.parametrize(("row", "emitter"), ROWS)
def test_a_refusal_is_in_the_vendors_words(row, emitter):
    assert ROWS[row, emitter] in _refused(emitter, row)


@pytest.mark.parametrize("emitter", MIXED)
def test_a_mix_of_tiles_and_tensors_names_its_emitter(emitter):
    (row,) = [
        row.id
        for row in contracts.rows_of(emitter)
        if row.id.endswith(".mix") and row.literal
    ]
    assert _refused(emitter, row) == [
        f"Inputs/outputs to {emitter} must be all tensors or all tiles, not a mix of "
        "both"
    ]


@pytest.mark.parametrize("family", GUARDS)
def test_a_foreign_name_is_refused_with_what_was_expected(family):
    with pytest.raises(ValueError) as refusal:
        FAMILIES[family](name="RoPE")
    assert str(refusal.value) == f"{GUARDS[family]} but got RoPE"


def test_no_literal_message_is_without_a_test():
    literal = {row.id for row in contracts.CONTRACTS.values() if row.literal}
    tested = {row for row, _ in ROWS}
    tested |= {row for row in literal if row.endswith(".mix")}
    assert literal - tested == {"attention.chip_dropout"}  # what `can` reports
