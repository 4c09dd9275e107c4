"""The macros `FusedLinear` and `FusedLinearBwd`.

Outputs carry the checkpoint names `fused_linear_out`, `fused_linear_mean`,
`fused_linear_rstd` and `fused_linear_pre_activation`. What the activation met is
returned by a call that is differentiated, for the backward alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.fused_linear import leaf, plain
from neuronjax.kernels.fused_linear.operands import Operands
from neuronjax.primitives.macro import Example, MacroFamily

NAME, BACKWARD = "FusedLinear", "FusedLinearBwd"
FP8 = "FusedLinear (fp8)"


def _outputs(*, norm: str, returned: bool = False, **config: Any) -> tuple[str, ...]:
    stats = dict(none=(), layer=("mean", "rstd")).get(norm, ("rstd",))
    return ("out", *stats, *(("pre_activation",) if returned else ()))


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    """The same call, with what the activation met among its outputs."""
    return config | dict(returned=config["activation"] is not None)


def _gradients(*, given: tuple[str, ...], **config: Any) -> tuple[str, ...]:
    return tuple(f"d_{operand}" for operand in given)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    given = Operands(*operands).live()
    grads = fused_linear_backward(
        *operands, *outs, *cotangents, name=BACKWARD, given=given, **config
    )
    found = dict(zip(given, grads, strict=True))
    return tuple(found.get(key) for key in Operands._fields)


def _leaf_bwd(*args, given, **config):
    return leaf.fused_linear_bwd(*args, **config)


def _plain_bwd(*args, given, **config):
    return plain.fused_linear_plain_bwd(*args, **config)


def _example(name: str, dtype: Any, batch: int) -> Example:
    """All options at once: LayerNorm and SiLU, or with fp8 RMSNorm and GELU."""
    shapes = ((batch, 2, 4), (4, 3), (3,), (3,), (batch, 2, 3), (4,), (4,))
    keys = jax.random.split(jax.random.key(6), 12)
    made = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False)]
    x, w, scale, bias, residual, gamma, beta = (y.astype(dtype) for y in made)
    config: dict[str, Any] = dict(eps=1e-2, is_fp8_kernel=name == FP8)
    split = (0, None, None, None, 0, None)
    if name == FP8:
        config |= dict(norm="rms", activation="GELU")
        w = w.astype(jnp.float8_e4m3)
        operands = (x, w, scale, bias, residual, gamma, None)
        return Example(operands, config, split, (0, 0))
    config |= dict(norm="layer", activation="SiLU")
    operands, split = (x, w, scale, bias, residual, gamma, beta), (*split, None)
    if name == NAME:
        return Example(operands, config, split, (0, 0, 0))
    config |= dict(returned=True)
    outs = plain.fused_linear_plain(*operands, name=NAME, **config)
    more = [
        jax.random.normal(k, o.shape, o.dtype)
        for k, o in zip(keys[7:], outs, strict=False)
    ]
    config |= dict(given=Operands._fields)
    return Example((*operands, *outs, *more), config, (*split, *[0] * 8), split)


fused_linear_backward = MacroFamily(
    "fused_linear_bwd",
    (BACKWARD,),
    _leaf_bwd,
    plain=_plain_bwd,
    outputs=_gradients,
    example=_example,
)
fused_linear_family = MacroFamily(
    "fused_linear",
    (NAME,),
    leaf.fused_linear_fwd,
    plain=plain.fused_linear_plain,
    outputs=_outputs,
    backward=_emit_backward,
    differentiated=_differentiated,
    example=_example,
    variants=(FP8,),
)
