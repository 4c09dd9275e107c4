"""Cases of `moe_cte` and `blockwise_mm_baseline_shard_hidden`."""

import jax.numpy as jnp
import numpy as np

import neuronjax
from tests.adapters import adapter, comparison, take, within

_IMPLEMENTATIONS = {
    "SHARD_ON_BLOCK": "shard_on_block",
    "SHARD_ON_INTERMEDIATE": "shard_on_i",
    "SHARD_ON_INTERMEDIATE_HW": "shard_on_i_hybrid",
    "SHARD_ON_INTERMEDIATE_DROPPING": "shard_on_i_dropping",
    "SHARD_ON_BLOCK_MX": "shard_on_block_mx",
    "SHARD_ON_INTERMEDIATE_MX": "shard_on_i_mx",
    "SHARD_ON_INTERMEDIATE_MX_HW": "shard_on_i_mx_hybrid",
}
_SETTINGS = (
    "block_size",
    "activation_function",
    "expert_affinities_scaling_mode",
    "is_tensor_update_accumulating",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
)
_SCALES = ("gate_up_proj_scale", "down_proj_scale")
_STORED = ("gate_up_activations_T", "down_activations")


def skip_mode(options):
    """The record of a case's skip flags."""
    return neuronjax.SkipMode(**options.get("skip_dma", {}))


def _fp8(x):
    """The fp8 array of these values, which are stored wide."""
    if x.dtype.itemsize < 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    narrow = x.astype(jnp.float8_e4m3)
    if jnp.array_equal(narrow.astype(x.dtype), x):
        return narrow
    return x.astype(jnp.float8_e4m3fn)


def _spec(inputs, options):
    kind = _IMPLEMENTATIONS[options["variant"]]
    if "block" in kind:
        return neuronjax.MoECTESpec(kind)
    # The reference ignores the flag; `moe_cte` refuses it where that would differ.
    on_i = options.get("expert_affinity_multiply_on_I", False)
    mode = options.get("expert_affinities_scaling_mode", "POST_SCALE")
    on_i = on_i and mode == "POST_SCALE" and "down_proj_bias" not in inputs
    config = neuronjax.ShardOnIConfig(
        checkpoint_activation=options.get("checkpoint_activation", False),
        expert_affinity_multiply_on_I=on_i,
    )
    return neuronjax.MoECTESpec(kind, shard_on_I=config)


@adapter("moe_cte")
def moe_cte(inputs, options):
    call = {**inputs, **take(options, **{name: name for name in _SETTINGS})}
    spec = _spec(inputs, options)
    if spec.implementation == "shard_on_i_dropping":
        call["block_to_expert"] = None  # not read there
    scales = {name: call.pop(name) for name in _SCALES if name in call}
    if scales:
        call |= {k: _fp8(call[k]) for k in ("gate_up_proj_weight", "down_proj_weight")}
        call["quantization_config"] = neuronjax.QuantizationConfig(**scales)
    got = neuronjax.moe_cte(**call, spec=spec, skip_dma=skip_mode(options))
    out, *stored = got if isinstance(got, tuple) else (got,)
    if options["variant"] == "SHARD_ON_BLOCK" and options.get("top_k", 1) > 1:
        out = jnp.stack([out, jnp.zeros_like(out)], 1)  # the second core's is empty
    both = dict(output=out, output_no_bf16_rounding=out)
    return both | dict(zip(_STORED, stored, strict=False))


@adapter("blockwise_mm_baseline_shard_hidden")
def shard_hidden(inputs, options):
    names = ("block_size", *_SETTINGS[2:4])
    call = {**inputs, **take(options, **{name: name for name in names})}
    if options.get("checkpoint"):
        d_ff = inputs["gate_up_proj_weight"].shape[3]
        slots, size = inputs["token_position_to_id"].size, options["block_size"]
        dtype, width = inputs["hidden_states"].dtype, inputs["hidden_states"].shape[1]
        blocks = slots // size
        call[_STORED[0]] = jnp.zeros((blocks, 2, d_ff, size), dtype)
        call[_STORED[1]] = jnp.zeros((blocks, size, width), dtype)
    got = neuronjax.blockwise_mm_baseline_shard_hidden(
        **call, skip_dma=skip_mode(options)
    )
    found = got if isinstance(got, tuple) else (got,)
    return dict(zip(("output", *_STORED), found, strict=False))


@comparison("moe_cte")
@comparison("blockwise_mm_baseline_shard_hidden")
def compare(name, got, wanted, case):
    """Outputs by their rows of tokens: the reference leaves anything in padding."""
    tolerance = case["tolerance"]
    case = dict(
        case, tolerance=tolerance | tolerance.get("per_output", {}).get(name, {})
    )
    got, wanted = np.asarray(got[name]), wanted[name]
    if name.startswith("output"):
        rows = tolerance.get("valid_output_rows", len(wanted))
        assert got.shape == wanted.shape
        got, wanted = got[:rows], wanted[:rows]
    within(name, got, wanted, case)
