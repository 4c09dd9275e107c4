"""Cases of `moe_tkg` and `moe_block_tkg`."""

import jax.numpy as jnp

import neuronjax
from tests.adapters import adapter

SETTINGS = (
    "is_all_expert",
    "rank_id",
    "mask_unselected_experts",
    "expert_affinities_scaling_mode",
    "activation_fn",
    "output_dtype",
    "is_all_expert_dynamic",
    "block_size",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
)
_WEIGHTS = ("expert_gate_up_weights", "expert_down_weights")


def _fp8(x):
    """The fp8 array of these values, which are stored wide."""
    narrow = x.astype(jnp.float8_e4m3)
    if jnp.array_equal(narrow.astype(x.dtype), x):
        return narrow
    return x.astype(jnp.float8_e4m3fn)


def _quantized(call, options):
    """The weights as their codes."""
    kind = options.get("quantization", "NONE")
    if kind.startswith("FP8"):
        return call | {key: _fp8(call[key]) for key in _WEIGHTS}
    if kind.startswith("MX"):
        return call | dict(weight_dtype=kind.removeprefix("MX").strip() or None)
    return call


@adapter("moe_tkg")
def moe_tkg(inputs, options):
    call = {**inputs, **{key: options[key] for key in SETTINGS if key in options}}
    call.pop("expert_affinities_eager", None)  # not read by the reference either
    if call["expert_affinities"].shape[1] == call["expert_down_weights"].shape[0]:
        call["rank_id"] = 0  # the reference takes the affinities of the local experts
    if "hidden_input_scale" in call:
        call.setdefault("output_dtype", "float32")
    scaled = call.get("expert_affinities_scaling_mode") == "POST_SCALE"
    if call.get("is_all_expert") and not scaled:
        call.pop("mask_unselected_experts", None)  # masks what NO_SCALE does not read
    return {"out": neuronjax.moe_tkg(**_quantized(call, options))}


_BLOCK_SETTINGS = (
    "eps",
    "top_k",
    "router_act_fn",
    "router_pre_norm",
    "norm_topk_prob",
    "expert_affinities_scaling_mode",
    "hidden_act_fn",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
    "router_mm_dtype",
    "hidden_actual",
    "skip_router_logits",
    "is_all_expert",
    "rank_id",
)


@adapter("moe_block_tkg")
def moe_block_tkg(inputs, options):
    settings = {key: options[key] for key in _BLOCK_SETTINGS if key in options}
    call = {**inputs, **settings}
    if not call.get("router_pre_norm", True):  # no effect there; the router refuses
        call.pop("norm_topk_prob", None)
    out, *rest = neuronjax.moe_block_tkg(**_quantized(call, options))
    return {"out": out, **dict(zip(("router_logits",), rest, strict=False))}
