"""Cases of MX quantization, products and projections."""

import jax.numpy as jnp

import neuronjax
from tests.adapters import adapter


@adapter("quantize_to_mx")
def quantize_to_mx(inputs, options):
    kind = options["out_x4_dtype"]
    packed, scale = neuronjax.quantize_to_mx(inputs["data"], kind)
    return {
        "packed": packed,
        "scale": scale,
        "unpacked": neuronjax.unpack_mx(packed, kind),
        "dequantized": neuronjax.dequantize_mx(packed, scale, kind),
    }


@adapter("quantize_mx_golden")
def quantize_mx_golden(inputs, options):
    src = inputs["src_hbm"].astype(jnp.float32)
    data, scale = neuronjax.quantize_mx(src, options["out_x4_dtype"])
    return {"out_data_hbm": data, "out_scale_hbm": scale}


@adapter("mx_matmul")
def mx_matmul(inputs, options):
    return {"out": neuronjax.mx_matmul(**inputs, **options)}


@adapter("gate_up_proj_mx")
def gate_up_proj_mx(inputs, options):
    return {"out": neuronjax.gate_up_proj_mx(**{"bias": None, **inputs}, **options)}


@adapter("down_proj_mx")
def down_proj_mx(inputs, options):
    return {"out": neuronjax.down_proj_mx(**{"bias": None, **inputs}, **options)}


@adapter("mxfp_load_performance_wrapper")
def mxfp_load_performance_wrapper(inputs, options):
    data, scale = neuronjax.mxfp_load_performance_wrapper(inputs["tensor"])
    return {"out_data": data, "out_scale_hbm": scale}
