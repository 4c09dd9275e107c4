"""The macros `Llama3Transformer` and `Llama3TransformerBwd`.

Outputs carry the checkpoint names `llama3_transformer_out`, `_k` and `_v` where they
are asked for, and in a call that is differentiated `llama3_transformer_layer_inputs`:
all that the backward reads beside the operands.
"""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.llama3_transformer.operands import Operands, output_names
from neuronjax.kernels.llama3_transformer.plain import (
    llama3_transformer_plain,
    llama3_transformer_plain_bwd,
)
from neuronjax.kernels.llama3_transformer.stack import (
    llama3_transformer_bwd,
    llama3_transformer_fwd,
)
from neuronjax.primitives.llama3_transformer.example import operand_shapes
from neuronjax.primitives.macro import Example, MacroFamily

NAME, BACKWARD = "Llama3Transformer", "Llama3TransformerBwd"
_GRADIENTS = tuple(f"d_{key}" for key in Operands._fields)


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    """The same call, with the input of each layer among its outputs."""
    return config | dict(stored=True)


def _emit_backward(operands, outs, cotangents, *, name, output_kv, stored, **config):
    d_out, *d_kept = cotangents
    d_out = jnp.zeros_like(outs[0]) if d_out is None else d_out
    d_kept = d_kept if output_kv else [None, None, *d_kept]
    args = (*operands, outs[-1], d_out, *d_kept)
    return llama3_transformer_backward(*args, name=BACKWARD, **config)


def _static_leaf(*operands, **config):
    return llama3_transformer_fwd(*operands, **config, static=True)


def _static_backward(*operands, **config):
    return llama3_transformer_bwd(*operands, **config, static=True)


# The axis of each operand that a batch splits; weights every device holds whole.
_SPLIT = (0, *[None] * 7, 1, 1)


def _example(name: str, dtype: Any, batch: int) -> Example:
    """Two layers of heads of 2."""
    shapes = operand_shapes(batch, layers=2, d_model=3, head_dim=2, d_ff=2)
    keys = jax.random.split(jax.random.key(2), len(shapes))
    o = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
    # Weights of half that size: two layers would magnify what bfloat16 rounds.
    o[1:6] = [w * jnp.asarray(0.5, dtype) for w in o[1:6]]
    config: dict[str, Any] = dict(eps=0.1, order="group", axis=None)
    forward = config | dict(output_kv=True)
    if name == NAME:
        return Example(tuple(o), forward, _SPLIT, (0, 1, 1))
    outs = llama3_transformer_plain(*o, name=NAME, stored=True, **forward)
    cotangents = [jnp.cos(3 * out + 1) for out in outs]
    split = (*_SPLIT, 1, 0, 1, 1, 1)
    return Example((*o, outs[-1], *cotangents), config, split, _SPLIT)


llama3_transformer_backward = MacroFamily(
    "llama3_transformer_bwd",
    (BACKWARD,),
    llama3_transformer_bwd,
    plain=llama3_transformer_plain_bwd,
    outputs=_GRADIENTS,
    static=_static_backward,
    axis="axis",
    example=_example,
)
llama3_transformer_family = MacroFamily(
    "llama3_transformer",
    (NAME,),
    llama3_transformer_fwd,
    plain=llama3_transformer_plain,
    outputs=output_names,
    backward=_emit_backward,
    static=_static_leaf,
    differentiated=_differentiated,
    axis="axis",
    example=_example,
)
