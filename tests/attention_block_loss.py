"""What has a derivative in a call of the decode block, and a number to derive."""

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.dtypes import accumulator, is_differentiable
from tests.attention_block_case import call

CONSTANTS = ("weight_dequant_scale", "input_dequant_scale", "k_scale", "v_scale")


def split(arrays, options=None):
    """The operands that have a derivative, and the rest."""
    quantized = [
        f"W_{side}"
        for side in ("qkv", "out")
        if (options or {}).get(f"quantization_type_{side}", "NONE") != "NONE"
    ]
    live = {
        k: x
        for k, x in arrays.items()
        if is_differentiable(x.dtype)
        and not k.startswith(CONSTANTS)
        and k not in quantized
    }
    return live, {k: x for k, x in arrays.items() if k not in live}


def weighed(outs):
    """A number in which every element of every float output counts."""
    total = 0.0
    for out in outs:
        if is_differentiable(out.dtype):
            wide = out.astype(accumulator(out.dtype))
            weight = np.cos(np.arange(out.size)).reshape(out.shape)
            total = total + (jnp.sin(wide) * weight.astype(wide.dtype)).sum()
    return total


def loss(options, rest):
    return lambda live: weighed(call(live | rest, options))
