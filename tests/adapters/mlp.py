"""Cases of `mlp`."""

import math

import jax.numpy as jnp
from jax import lax

import neuronjax
from tests.adapters import adapter

SETTINGS = (
    "activation_fn",
    "normalization_type",
    "quantization_type",
    "quant_clipping_bound",
    "output_dtype",
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


WEIGHTS = tuple(f"{which}_proj_weights_tensor" for which in ("gate", "up", "down"))


def _fp8(x):
    """The fp8 array of these values, which are stored wide."""
    narrow = x.astype(jnp.float8_e4m3)
    if jnp.array_equal(narrow.astype(x.dtype), x):
        return narrow
    return x.astype(jnp.float8_e4m3fn)


def _quantized_rows(call):
    """Prefill's `hidden` as codes, where the case has it so."""
    hidden = call["hidden_tensor"]
    decode = math.prod(hidden.shape[:-1]) <= 96 and not call.get("force_cte_mode")
    if hidden.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(hidden, jnp.float8_e4m3)
    elif decode or call["quantization_type"] == "ROW":
        return {}
    else:
        codes = hidden.astype(jnp.float8_e4m3)
        if not jnp.array_equal(codes.astype(hidden.dtype), hidden):
            return {}
    return dict(
        hidden_tensor=codes,
        output_dtype=call.get("output_dtype", "float32"),
        normalization_type="NO_NORM",
    )


@adapter("mlp")
def mlp(inputs, options):
    call = {**inputs, **{key: options[key] for key in SETTINGS if key in options}}
    if call.get("quantization_type", "NONE") not in ("NONE", "MX"):
        call |= {key: _fp8(call[key]) for key in WEIGHTS if key in call}
        call |= _quantized_rows(call)
    if call.get("quantization_type") == "MX":
        call["weight_dtype"] = options.get("weight_dtype")
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
