"""Cases of `mlp`."""

import neuronjax
from tests.adapters import adapter

SETTINGS = (
    "activation_fn",
    "normalization_type",
    "quantization_type",
    "store_fused_add_result",
    "skip_gate_proj",
    "eps",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
    "use_tkg_down_proj_optimized_layout",
    "force_cte_mode",
    "lnc",
)
GATE_ONLY = (
    "gate_proj_bias_tensor",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
)


@adapter("mlp")
def mlp(inputs, options):
    call = {**inputs, **{key: options[key] for key in SETTINGS if key in options}}
    # The reference ignores what its other options leave without a use; `mlp` refuses.
    if call.get("skip_gate_proj"):
        call = {key: value for key, value in call.items() if key not in GATE_ONLY}
    norm = call.get("normalization_type", "NO_NORM")
    if norm in ("NO_NORM", "RMS_NORM_SKIP_GAMMA"):
        call.pop("normalization_weights_tensor", None)
    if norm != "LAYER_NORM":
        call.pop("normalization_bias_tensor", None)
    if "fused_add_tensor" not in call:
        call.pop("store_fused_add_result", None)
    return dict(zip(("out", "add_out"), neuronjax.mlp(**call), strict=False))
