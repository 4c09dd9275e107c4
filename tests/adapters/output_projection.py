"""Cases of `output_projection_cte` and `output_projection_tkg`."""

import neuronjax
from tests.adapters import adapter, take


@adapter("output_projection_cte")
def output_projection_cte(inputs, options):
    named = take(
        options, quantization_type="quantization_type", output_dtype="output_dtype"
    )
    return {"out": neuronjax.output_projection_cte(**inputs, **named)}


@adapter("output_projection_tkg")
def output_projection_tkg(inputs, options):
    named = take(
        options,
        quantization_type="quantization_type",
        TRANSPOSE_OUT="TRANSPOSE_OUT",
        OUT_IN_SB="OUT_IN_SB",
    )
    if named.get("TRANSPOSE_OUT"):
        named |= take(options, lnc="lnc_of_transposed_layout")
    return {"out": neuronjax.output_projection_tkg(**inputs, **named)}
