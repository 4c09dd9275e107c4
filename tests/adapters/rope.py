"""Cases of `RoPE` and `rope_hf`."""

import neuronjax
from tests.adapters import adapter


@adapter("RoPE")
def rope(inputs, options):
    layout = {"contiguous_layout": options.get("contiguous_layout", True)}
    return {"x_out": neuronjax.RoPE(**inputs, **layout)}


@adapter("rope_hf")
def rope_hf(inputs, options):
    q, k = neuronjax.rope_hf(**inputs, backward=options.get("backward", False))
    return {"q_out": q, "k_out": k}
