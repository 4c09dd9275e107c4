"""The rules that all blockwise expert calls share: one row each."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3, E4M3FN
from neuronjax.primitives.blockwise_mm.arguments import arguments, quantized
from neuronjax.primitives.blockwise_mm.facts import (
    ALL,
    ARGUMENTS,
    BWD,
    CTE,
    EMITTERS,
    FORWARD,
    INTEGERS,
    LIMITS,
    is_mx,
    operands_of,
    optional,
    quantization,
)
from neuronjax.primitives.blockwise_mm.spec import ClampLimits
from neuronjax.primitives.contracts import Contract, add, told
from neuronjax.primitives.kinds import (
    described,
    is_count,
    is_crossed,
    is_flag,
    is_number,
)
from neuronjax.primitives.options import (
    FLOATS,
    ActFnType,
    ExpertAffinityScaleMode,
    QuantizationType,
    members,
)
from neuronjax.primitives.tile import MemrefTile

# The number of axes of each operand, and of block-scaled ones.
_AXES = dict(
    hidden=2,
    affinity=2,
    gate_up_w=4,
    down_w=3,
    token_id=1,
    gate_up_b=3,
    down_b=2,
    gate_up_scale=3,
    down_scale=3,
    conditions=1,
    gate_up=4,
    down=3,
    d_out=2,
    d_gate_up=4,
    d_down=3,
)
_MX_AXES = dict(gate_up_w=5, down_w=4, gate_up_b=5, gate_up_scale=5, down_scale=4)
_WEIGHTS = ("gate_up_w", "down_w")
_SCALES = ("gate_up_scale", "down_scale")


def row(rule: str, message: str, violated=None, functions=ALL, **kwargs) -> None:
    """Enters a row; its stage is the first unless named."""
    kwargs.setdefault("stage", 1)
    text = "{function}: " + message
    add(Contract(f"blockwise_mm.{rule}", functions, text, violated, **kwargs))


def _not_array(c: SimpleNamespace) -> str:
    absent, names = optional(c), ARGUMENTS[c.function]
    for role, x in operands_of(c).items():
        if role not in names or (x is None and role in absent):
            continue
        if isinstance(x, MemrefTile) or not hasattr(x, "dtype"):
            got = "None" if x is None else type(x).__name__
            return f"{names[role]} must be an array, got {got}"
    return ""


def _misranked(c: SimpleNamespace) -> str:
    names, mx = ARGUMENTS[c.function], is_mx(c)
    for role, x in operands_of(c).items():
        if x is None or role not in names or role == "block_expert":
            continue
        axes = (_MX_AXES if mx else {}).get(role, _AXES[role])
        if len(x.shape) != axes:
            return f"{names[role]} must have {axes} axes, got {tuple(x.shape)}"
    return ""


def _odd_dtype(c: SimpleNamespace) -> str:
    """The first operand of a dtype that the call does not take, described."""
    operands, names = operands_of(c), ARGUMENTS[c.function]
    kind = quantization(c, operands)
    row_kind, mx = kind is QuantizationType.ROW, kind is QuantizationType.MX
    for role, x in operands.items():
        if x is None or role not in names:
            continue
        if role in INTEGERS:
            taken, words = jnp.issubdtype(x.dtype, jnp.integer), "integers"
        elif role in _WEIGHTS and mx:
            taken, words = x.dtype in ("uint16", "uint32"), "uint16 or uint32"
        elif role in _WEIGHTS and row_kind:
            taken, words = x.dtype in (E4M3, E4M3FN), "float8_e4m3 or float8_e4m3fn"
        elif role in _SCALES:
            words = "uint8" if mx else "float32"
            taken = x.dtype == words
        else:
            taken = x.dtype in FLOATS
            words = "bfloat16, float16, float32 or float64"
        if not taken:
            return f"{names[role]} must be {words}, got {x.dtype}"
    return ""


def _odd_setting(c: SimpleNamespace) -> str:
    """The first setting that is not a flag, a number or a dtype known while tracing."""
    flags = ("is_tensor_update_accumulating", "accumulate", "skip_token", "bias")
    for name in (*flags, "on_intermediate", "returned"):
        value = getattr(c, name, False)
        if not is_flag(value):
            return f"{name} must be True or False, got {described(value)}"
    for name in LIMITS:
        if not is_number(getattr(c, name, None), None):
            kind = described(getattr(c, name))
            return f"{name} must be a number or None, got {kind}"
    try:
        dtype = c.compute_dtype
        wide = dtype is None or jnp.dtype(dtype) in FLOATS
    except TypeError:
        wide = False
    if not wide:
        return f"compute_dtype must be a floating dtype or None, got {c.compute_dtype}"
    return ""


row(
    "arrays",
    "{not_array}",
    told("not_array", _not_array),
    example=arguments(down_w=None),
    stage=-1,
)
row(
    "rank",
    "{misranked}",
    told("misranked", _misranked),
    example=arguments(hidden=(1, 4, 8)),
    stage=0,
)
row(
    "dtypes",
    "{odd_dtype}",
    told("odd_dtype", _odd_dtype),
    example=arguments(token_id=np.zeros(6, np.float32)),
    stage=0,
)
row(
    "settings",
    "{odd_setting}",
    told("odd_setting", _odd_setting),
    example=arguments(compute_dtype="int8"),
    stage=0,
)
row(
    "block_size",
    "block_size must be a positive integer, known while tracing, got {block_size!r}",
    lambda c: not is_count(c.block_size),
    example=arguments(block_size=0),
    stage=0,
)


def _uneven(c: SimpleNamespace) -> bool:
    vars(c)["slots"] = operands_of(c)["token_id"].shape
    size = c.block_size
    return is_count(size) and bool(c.slots) and c.slots[0] % int(size) != 0


row(
    "slots",
    "the slots, {slots}, must be a multiple of block_size = {block_size}",
    _uneven,
    example=arguments(token_id=(5,)),
    stage=0,
)
row(
    "padding_row",
    "without skip_token the last row of {arg.hidden} is padding: it must have one, got "
    "{operands[hidden].shape}",
    lambda c: c.T < 0,
    example=arguments(hidden=(0, 8), affinity=(0, 1)),
)
row(
    "empty",
    "H, E and I must be positive, got {H}, {E} and {I}",
    lambda c: 0 in (c.H, c.E, c.I),
    example=arguments(gate_up_w=(2, 8, 2, 0), down_w=(2, 0, 8)),
)
row(
    "shapes",
    "{unlike}",
    lambda c: c.unlike,
    example=arguments(affinity=(4, 2)),
)
row(
    "activation",
    f"the activation must be one of {members(ActFnType)}, got {{given.activation!r}}",
    lambda c: c.activation_kind is None,
    functions=(CTE, *EMITTERS, BWD),
    example=lambda function: arguments(
        **{
            CTE: dict(activation_function="ReLU"),
            BWD: dict(activation_type="ReLU"),
        }.get(function, dict(activation="ReLU"))
    )(function),
)
row(
    "scaling",
    f"the scaling mode must be one of {members(ExpertAffinityScaleMode)}, got "
    "{given.scaling!r}",
    lambda c: c.scaling_kind is None,
    functions=(*FORWARD, *EMITTERS),
    example=lambda function: arguments(
        **{
            "scaling"
            if function in EMITTERS
            else "expert_affinities_scaling_mode": "MID_SCALE"
        }
    )(function),
)


def _crossed(c: SimpleNamespace) -> bool:
    return is_crossed(*c.limits[:2]) or is_crossed(*c.limits[2:])


def _crossed_clamps(function: str) -> dict[str, Any]:
    up: dict[str, Any] = dict(up_clamp_upper_limit=-1.0, up_clamp_lower_limit=1.0)
    if function == BWD:
        up = dict(clamp_limits=ClampLimits(-1.0, 1.0))
    return arguments(**up)(function)


row(
    "clamps",
    "a clamp's upper limit must be at least its lower one, and neither NaN, got "
    "{limits[1]} to {limits[0]} for the gate and {limits[3]} to {limits[2]} for up",
    lambda c: c.limits_known and _crossed(c),
    functions=(CTE, *EMITTERS, BWD),
    example=_crossed_clamps,
)
row(
    "scales",
    "quantized weights need both {arg.gate_up_scale} and {arg.down_scale}",
    lambda c: (
        (c.is_row or c.is_mx)
        and any(c.operands[f"{key}_scale"] is None for key in ("gate_up", "down"))
    ),
    functions=(CTE, *EMITTERS),
    example=quantized(down_scale=None),
)
