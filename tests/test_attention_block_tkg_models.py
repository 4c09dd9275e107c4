"""The decode block as models call it: their options, scaled down; and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests.attention_block_case import call, operands, reference, sizes
from tests.macro_case import error

BLOCKED = dict(slots=16, visible=16, block=4)
PRE = dict(rmsnorm_X_enabled=True, rmsnorm_QK_pre_rope_enabled=True)
ROW = dict(quantization_type_qkv="ROW", quantization_type_out="ROW")
STATIC = dict(quantization_type_qkv="STATIC", quantization_type_out="STATIC")
FP8 = dict(fp8=True, softmax_scale=0.125 * 2.3 / 240)
NO_BIAS = ("bias_qkv", "bias_out", "sink")
NO_GAINS = tuple(f"rmsnorm_QK_post_rope_W_{kind}" for kind in "QK")
# Spec section 7: sizes, options, absent operands.
MODELS = {
    "GPT-OSS-120B": (
        sizes(batch=3, seq=1, heads=1, width=8, hidden=256, **BLOCKED),
        dict(rmsnorm_X_enabled=True, X_hidden_dim_actual=240, transposed_out=True),
        (),
    ),
    "GPT-OSS-120B, older": (
        sizes(batch=4, seq=1, heads=8, width=8, hidden=24, slots=12, visible=11),
        dict(rmsnorm_X_enabled=True, X_hidden_dim_actual=20),
        (),
    ),
    "Llama3-70B": (
        sizes(batch=2, seq=1, heads=1, width=8, hidden=32, **BLOCKED),
        dict(rmsnorm_X_enabled=True) | STATIC | FP8,
        NO_BIAS,
    ),
    "Llama3-70B, speculative": (
        sizes(batch=4, seq=5, heads=1, width=8, hidden=32, slots=24, visible=16),
        dict(rmsnorm_X_enabled=True, K_cache_transposed=True, head_axis=True),
        NO_BIAS,
    ),
    "Llama3.1-405B": (
        sizes(batch=8, seq=7, heads=2, width=8, hidden=32, slots=20, visible=20),
        dict(rmsnorm_X_enabled=True),
        NO_BIAS,
    ),
    "Qwen3-235B": (
        sizes(batch=2, seq=1, heads=1, width=8, hidden=16, **BLOCKED),
        PRE,
        NO_BIAS,
    ),
    "Qwen3-32B": (
        sizes(batch=2, seq=1, heads=1, width=8, hidden=20, **BLOCKED),
        dict(rmsnorm_QK_pre_rope_enabled=True) | ROW | FP8,
        NO_BIAS,
    ),
    "Gemma3-27B": (
        sizes(batch=5, seq=1, heads=4, width=8, hidden=21, slots=40, visible=36),
        PRE | ROW | FP8,
        NO_BIAS,
    ),
    "DeepSeek-V3.1": (
        sizes(batch=1, seq=1, heads=2, width=8, hidden=28, slots=18, visible=16),
        dict(rmsnorm_X_enabled=True, rope_contiguous_layout=False) | STATIC,
        NO_BIAS,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_their_equations(name):
    n, options, without = MODELS[name]
    arrays = operands(n, options, without=without)
    outs = jax.jit(lambda arrays: call(arrays, options))(arrays)
    # A float32 value on the edge between two fp8 codes may round the other way.
    codes = options.get("fp8") or "STATIC" in options.values()
    for out, exact in zip(outs, reference(arrays, options), strict=True):
        assert out.shape == exact.shape
        assert error(out, exact) <= (2**-4 if codes else 1e-5)


def test_a_batch_of_2048_runs():
    n = sizes(batch=2048, seq=1, heads=1, width=4, hidden=6, slots=8, visible=8)
    arrays = operands(n, {})
    outs = jax.jit(lambda arrays: call(arrays, {}))(arrays)
    for out, exact in zip(outs, reference(arrays, {}), strict=True):
        assert error(out, exact) <= 1e-5


def test_dividing_scales_must_be_positive():
    """An input scale of 0 would give NaN."""
    arrays = operands(sizes(), STATIC)
    for side in ("qkv", "out"):
        name = f"input_dequant_scale_{side}"
        wrong = arrays | {name: jnp.zeros((1, 1), jnp.float32)}
        with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
            call(wrong, STATIC)


def test_ranks_need_their_axis():
    n = sizes()
    arrays = operands(n, {})
    arrays["attention_mask"] = jnp.ones((7, 1, 4, 2), jnp.int32)
    for key in ("K_cache", "V_cache", "kv_cache_update_idx"):
        arrays[key] = arrays[key][:1]
    for group, words in ((None, "got None"), ("ranks", "got 'ranks' of size None")):
        with pytest.raises(ValueError, match=f"inside its shard_map.* {words}"):
            call(arrays, dict(KVDP=2, KVDP_replica_group=group))
    with pytest.raises(
        ValueError, match="the name of the mesh axis .* \\[\\[0, 1\\]\\]"
    ):
        call(arrays, dict(KVDP=2, KVDP_replica_group=[[0, 1]]))
    with pytest.raises(ValueError, match="devices as KVDP = 1, got 'ranks' of size"):
        call(operands(n, {}), dict(KVDP_replica_group="ranks"))


def test_can_reports_the_chip_s_limits_and_the_call_runs():
    arrays = operands(sizes(), {})
    report = neuronjax.can("attention_block_tkg", **arrays)
    assert report and not report.on_chip
    assert dict(report.nearest) == {"H": 128}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    assert neuronjax.can("attention_block_tkg", **shapes)


def test_the_emitter_is_the_function():
    arrays = operands(sizes(), {})
    for a, b in zip(
        neuronjax.emit.attention_block_tkg_kernel(**arrays, num_stages=2),
        neuronjax.attention_block_tkg(**arrays),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_emitter_takes_no_argument_that_it_does_not_know():
    """A misspelled flag would be a stage left out."""
    arrays = operands(sizes(), {})
    for wrong in ("rmsnorm_X_enable", "softmax_scaling"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
            neuronjax.emit.attention_block_tkg_kernel(**arrays, **{wrong: True})
