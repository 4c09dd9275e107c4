"""The macros `Conv1D`, `DepthwiseConv1D` and their backwards.

Outputs carry the checkpoint names `conv1d_out`, `conv1d_pre_activation` and
`depthwise_conv1d_out`. What an activation met is returned by a call that is
differentiated, for the backward alone, in the dtype of the input.
"""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.conv import conv1d, depthwise, plain
from neuronjax.primitives.conv.divided import typed
from neuronjax.primitives.macro import Example, MacroFamily

CONV1D, CONV1D_BWD = "Conv1D", "Conv1DBwd"
DEPTHWISE, DEPTHWISE_BWD = "DepthwiseConv1D", "DepthwiseConv1DBwd"
STACKED = "Conv1D (stacked)"


def _outputs(*, returned: bool = False, **config: Any) -> tuple[str, ...]:
    return ("out", "pre_activation") if returned else ("out",)


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    """The same call, with what the activation met among its outputs."""
    return config | dict(returned=config["activation"] is not None)


def _gradients(*, has_bias: bool, **config: Any) -> tuple[str, ...]:
    return ("d_x", "d_filters", "d_bias") if has_bias else ("d_x", "d_filters")


def _emit_backward(operands, outs, cotangents, *, name, returned, **config):
    x, filters, bias = operands
    d_y, d_z = cotangents if returned else (*cotangents, None)
    d_y = jnp.zeros_like(outs[0]) if d_y is None else d_y
    grads = conv1d_backward(
        *(x, filters, bias, outs[1] if returned else None, d_y, d_z),
        name=CONV1D_BWD,
        has_bias=bias is not None,
        **config,
    )
    return grads if bias is not None else (*grads, None)


def _emit_depthwise_backward(operands, outs, cotangents, *, name, **config):
    return depthwise_backward(*operands, *cotangents, name=DEPTHWISE_BWD, **config)


def _plain_backward(*operands, name, has_bias, form, cores, **config):
    return plain.conv1d_plain_bwd(*operands, name=name, **config)


def _drawn(seed: int, dtype: Any, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def _example(name: str, dtype: Any, batch: int) -> Example:
    """Seven positions, one zero before and two behind, three taps, every second."""
    config = dict(stride=2, padding=(1, 2), dilation=2, activation="SiLU")
    config |= dict(form="stacked", cores=2) if name == STACKED else {}
    config = dict(form="fast", cores=1) | config
    shapes = (batch, 3, 7), (3, 3, 4), (4,), (batch, 4, 3), (batch, 4, 3)
    x, filters, bias, z, d_y = _drawn(5, dtype, *shapes)
    if name != CONV1D_BWD:
        return Example((x, filters, bias), config, (0, None, None), (0,))
    operands = x, filters, bias, z, d_y, None
    split = 0, None, None, 0, 0
    return Example(operands, config | dict(has_bias=True), split, (0, None, None))


def _depthwise_example(name: str, dtype: Any, batch: int) -> Example:
    config = dict(stride=2, padding=(1, 2))
    shapes = (batch, 3, 1, 6), (3, 1, 1, 4), (batch, 3, 1, 3)
    x, filters, d_out = _drawn(6, dtype, *shapes)
    if name == DEPTHWISE:
        return Example((x, filters), config, (0, None), (0,))
    return Example((x, filters, d_out), config, (0, None, 0), (0, None))


conv1d_backward = MacroFamily(
    "conv1d_bwd",
    (CONV1D_BWD,),
    conv1d.conv1d_bwd,
    plain=_plain_backward,
    outputs=_gradients,
    example=_example,
)
conv1d_family = MacroFamily(
    "conv1d",
    (CONV1D,),
    typed(conv1d.conv1d_fwd),
    plain=plain.conv1d_plain,
    outputs=_outputs,
    backward=_emit_backward,
    differentiated=_differentiated,
    example=_example,
    variants=(STACKED,),
)
depthwise_backward = MacroFamily(
    "depthwise_conv1d_bwd",
    (DEPTHWISE_BWD,),
    depthwise.depthwise_bwd,
    plain=plain.depthwise_plain_bwd,
    outputs=("d_x", "d_filters"),
    example=_depthwise_example,
)
depthwise_family = MacroFamily(
    "depthwise_conv1d",
    (DEPTHWISE,),
    depthwise.depthwise_fwd,
    plain=plain.depthwise_plain,
    outputs=("out",),
    backward=_emit_depthwise_backward,
    example=_depthwise_example,
)
