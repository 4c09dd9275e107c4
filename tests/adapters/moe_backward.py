"""Cases of `blockwise_mm_bwd`."""

import neuronjax
from tests.adapters import adapter, take
from tests.adapters.moe import moe_cte, skip_mode

_SETTINGS = (
    "block_size",
    "is_tensor_update_accumulating",
    "activation_type",
    "bias",
    "shard_option",
    "affinity_option",
    "kernel_type_option",
    "block_tile_size",
)
_NAMES = (
    "hidden_states_grad",
    "expert_affinities_masked_grad",
    "gate_up_proj_weight_grad",
    "down_proj_weight_grad",
    "gate_and_up_proj_bias_grad",
    "down_proj_bias_grad",
)
_BIASES = ("gate_and_up_proj_bias", "down_proj_bias")
_OF_BACKWARD = (
    "gate_up_proj_act_checkpoint_T",
    "down_proj_act_checkpoint",
    "output_hidden_states_grad",
)
_CLAMPS = dict(
    gate_clamp_upper_limit="non_linear_clamp_upper_limit",
    gate_clamp_lower_limit="non_linear_clamp_lower_limit",
    up_clamp_upper_limit="linear_clamp_upper_limit",
    up_clamp_lower_limit="linear_clamp_lower_limit",
)


def _forward(inputs, options, limits):
    """The forward of the same operands: the cases hold its output too."""
    given = {k: x for k, x in inputs.items() if k not in _OF_BACKWARD}
    settings = take(
        options,
        block_size="block_size",
        skip_dma="skip_dma",
        activation_function="activation_type",
        is_tensor_update_accumulating="is_tensor_update_accumulating",
    )
    settings |= take(limits, **_CLAMPS)
    settings["variant"] = "SHARD_ON_INTERMEDIATE"
    return moe_cte(given, settings)["output"]


@adapter("blockwise_mm_bwd")
def blockwise_mm_bwd(inputs, options):
    limits = {k: x for k, x in options.get("clamp_limits", {}).items() if x is not None}
    call = {k: x for k, x in inputs.items() if k not in _BIASES}
    call |= take(options, **{name: name for name in _SETTINGS})
    grads = neuronjax.blockwise_mm_bwd(
        **call,
        skip_dma=skip_mode(options),
        clamp_limits=neuronjax.ClampLimits(**limits),
    )
    found = dict(zip(_NAMES, grads, strict=False))
    return found | dict(forward_output=_forward(inputs, options, limits))
