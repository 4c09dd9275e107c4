"""The rules of calls of `fused_linear`: what they read, and one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import FP8
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import described, is_number
from neuronjax.primitives.known import is_epsilon
from neuronjax.primitives.options import (
    FLOATS,
    ActFnType,
    NormType,
    member,
    members,
    odd_dtype,
)
from neuronjax.primitives.tile import MemrefTile

PUBLIC, EMITTER = "fused_linear", "fused_linear_kernel"
OPERANDS = ("x", "w", "w_scale", "bias", "residual", "gamma", "beta")
_BOTH = (PUBLIC, EMITTER)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call."""
    given = {name: getattr(call, name) for name in OPERANDS}
    given = {name: x for name, x in given.items() if x is not None}
    shapes: dict[str, tuple] = {name: tuple(np.shape(x)) for name, x in given.items()}
    ranked = len(shapes["x"]) >= 1 and len(shapes["w"]) == 2
    d_in, d_out = shapes["w"] if ranked else (0, 0)
    floats = {name: x for name, x in given.items() if name != "w"}
    if is_number(call.w_scale):
        floats.pop("w_scale")
    return dict(
        tile=any(isinstance(x, MemrefTile) for x in given.values()),
        shapes=shapes,
        x_shape=shapes["x"],
        w_shape=shapes["w"],
        ranked=ranked,
        d_in=d_in,
        d_out=d_out,
        width=(0, *shapes["x"])[-1],
        unlike=_unlike(shapes, d_in, d_out) if ranked else "",
        odd_dtype=odd_dtype(floats),
        w_dtype=getattr(call.w, "dtype", None),
        norm=member(NormType, call.norm_type),
        norm_shown=described(call.norm_type),
        activation_shown=described(call.activation_fn),
        eps_shown=described(call.eps),
    )


def _unlike(shapes: dict[str, tuple], d_in: Any, d_out: Any) -> str:
    """The operands beside `x` and `w` whose shapes do not fit, described."""
    batch = shapes["x"][:-1]
    wanted: dict[str, tuple] = dict(
        w_scale=("[] or [d_out]", (), (d_out,)),
        bias=("[d_out]", (d_out,)),
        residual=("[*batch, d_out]", (*batch, d_out)),
        gamma=("[d_in]", (d_in,)),
        beta=("[d_in]", (d_in,)),
    )
    return "; ".join(
        f"{name} must have shape {words} = {fitting[-1]}, got {shapes[name]}"
        for name, (words, *fitting) in wanted.items()
        if name in shapes and shapes[name] not in fitting
    )


def _is_norm_fed(call: SimpleNamespace) -> bool:
    """Whether the norm has the gain and offset that it takes."""
    gain, offset = call.gamma is not None, call.beta is not None
    if call.norm is NormType.LAYER_NORM:
        return True
    return gain == (call.norm is NormType.RMS_NORM) and not offset


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(x=(2, 3), w=(3, 4)) | changes
        for name in OPERANDS:
            if isinstance(given.get(name), tuple):
                given[name] = np.zeros(given[name], np.float32)
        return given

    return build


def _tiled(function: str) -> dict[str, Any]:
    return _arguments(x=MemrefTile.from_tensor(jnp.zeros((2, 3)), 1))(function)


def _row(rule: str, message: str, *args: Any, **kwargs: Any) -> None:
    text = "{function}: " + message
    contracts.add(Contract(f"fused_linear.{rule}", _BOTH, text, *args, **kwargs))


def _no_array(call: SimpleNamespace) -> str:
    """The first operand that must be an array and is none, described."""
    for name in ("x", "w"):
        if not hasattr(getattr(call, name), "dtype"):
            return f"{name} of type {type(getattr(call, name)).__name__}"
    return ""


contracts.add(only_hints(EMITTER, _arguments()))
_row(
    "arrays",
    "x and w must be arrays, got {no_array}",
    told("no_array", _no_array),
    example=_arguments(w=None),
    stage=0,
)
_row(
    "tensor",
    "FusedLinear has no tiled form: its operands must be tensors",
    lambda c: c.tile,
    example=_tiled,
)
_row(
    "rank",
    "x must have shape [*batch, d_in] and w [d_in, d_out], got {x_shape} and {w_shape}",
    lambda c: not c.tile and not c.ranked,
    example=_arguments(w=(3,)),
)
_row(
    "sizes",
    "d_in and d_out of w must be at least 1, got {w_shape}",
    lambda c: c.ranked and 0 in c.w_shape,
    example=_arguments(x=(2, 0), w=(0, 4)),
)
_row(
    "inner",
    "w must have d_in = {width} rows, as x has columns, got {w_shape}",
    lambda c: c.ranked and not c.tile and c.width != c.d_in,
    example=_arguments(w=(2, 4)),
)
_row(
    "shapes",
    "{unlike}",
    lambda c: not c.tile and c.unlike,
    example=_arguments(bias=(1, 4)),
)
_row(
    "dtype",
    "operands beside w must be bfloat16, float16, float32 or float64, got {odd_dtype}",
    lambda c: c.odd_dtype,
    example=_arguments(x=np.zeros((2, 3), np.int32)),
)
_row(
    "weight_dtype",
    "w must be bfloat16, float16, float32, float64 or fp8, got {w_dtype}",
    lambda c: c.w_dtype not in (*FLOATS, *FP8),
    example=_arguments(w=np.zeros((3, 4), np.int8)),
)
_row(
    "norm",
    f"norm_type must be one of {members(NormType)}, got {{norm_shown}}",
    lambda c: c.norm is None,
    example=_arguments(norm_type="GROUP_NORM"),
)
_row(
    "norm_operands",
    "gamma must be given for RMS_NORM, may be for LAYER_NORM, beta for LAYER_NORM "
    "alone, and neither for other norms, got {norm_shown}",
    lambda c: c.norm is not None and not _is_norm_fed(c),
    example=_arguments(norm_type="RMS_NORM"),
)
_row(
    "activation",
    f"activation_fn must be None or one of {members(ActFnType)}, got "
    "{activation_shown}",
    lambda c: c.activation_fn is not None and not member(ActFnType, c.activation_fn),
    example=_arguments(activation_fn="ReLU"),
)
_row(
    "eps",
    "eps must be a number that is known while tracing, finite and not negative, got "
    "{eps_shown}",
    lambda c: not is_number(c.eps) or not is_epsilon(c.eps),
    example=_arguments(eps=-1.0),
)
