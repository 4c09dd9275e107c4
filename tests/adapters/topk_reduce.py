"""Cases of `topk_reduce`: the receive buffer comes as 16-bit words."""

import jax.numpy as jnp
from jax import lax

import neuronjax
from tests.adapters import adapter


@adapter("topk_reduce")
def topk_reduce(inputs, options):
    if "input_bits" in inputs:
        packed = lax.bitcast_convert_type(inputs["input_bits"], jnp.bfloat16)
    else:
        packed = inputs["input"]
    return {"out": neuronjax.topk_reduce(packed, T=options["T"], K=options["K"])}
