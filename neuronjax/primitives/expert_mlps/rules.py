"""The rules that all calls of a decode step's experts share: one row each."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.expert_mlps.operands import Operands
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.expert_mlps.arguments import (
    ALL,
    arguments,
    quantized,
    tiled,
)
from neuronjax.primitives.expert_mlps.facts import (
    ARGUMENTS,
    BOTH,
    EMITTER,
    FLAGS,
    LIMITS,
    PUBLIC,
    given,
    is_float_dtype,
    kind_of,
    operands_of,
    scaling_of,
    shape_of,
)
from neuronjax.primitives.hints import only_hints
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
    members,
)
from neuronjax.primitives.tile import MemrefTile

_AXES = dict(zip(Operands._fields, (2, 4, 3, 2, 2, 2, 3, 2, 3, 2, 3), strict=True))
_MX_AXES = dict(gate_up_w=5, down_w=4, gate_up_b=5, gate_up_scale=5, down_scale=4)
_NEEDED = ("hidden", "gate_up_w", "down_w")
_FLOAT_WORDS = "bfloat16, float16, float32 or float64"


def row(rule: str, message: str, violated=None, functions=BOTH, **kwargs) -> None:
    """Enters a row; its stage is the first unless named."""
    kwargs.setdefault("stage", 1)
    text = "{function}: " + message
    contracts.add(Contract(f"expert_mlps.{rule}", functions, text, violated, **kwargs))


def _not_array(c: SimpleNamespace) -> str:
    for key, x in operands_of(c).items():
        if x is None and key not in _NEEDED:
            continue
        if key == "rank" and isinstance(x, int | np.integer):
            continue
        if not (hasattr(x, "dtype") and hasattr(x, "shape")):
            got = "None" if x is None else type(x).__name__
            return f"{ARGUMENTS[c.function][key]} must be an array, got {got}"
    return ""


def _odd_setting(c: SimpleNamespace) -> str:
    """The first setting that is no flag, number or dtype known while tracing."""
    names, own = ARGUMENTS[c.function], given(c)
    for key in FLAGS:
        value = getattr(own, key)
        if not is_flag(value):
            return f"{names[key]} must be True or False, got {described(value)}"
    for key in LIMITS:
        value = getattr(own, key)
        if not is_number(value, None):
            return f"{key} must be a number or None, got {described(value)}"
    if own.out_dtype is not None and not is_float_dtype(own.out_dtype):
        return f"{names['out_dtype']} must be {_FLOAT_WORDS}, got {own.out_dtype}"
    return ""


def _misranked(c: SimpleNamespace) -> str:
    operands, names = operands_of(c), ARGUMENTS[c.function]
    axes = _AXES | (_MX_AXES if kind_of(operands) == "MX" else {})
    if operands["hidden_scale"] is not None:
        axes["hidden"] = 3
    for key, x in operands.items():
        if x is not None and len(shape_of(x)) != axes[key]:
            return f"{names[key]} must have {axes[key]} axes, got {shape_of(x)}"
    return ""


def _odd_dtype(c: SimpleNamespace) -> str:
    """The first operand of a dtype that the call does not take, described."""
    operands, names = operands_of(c), ARGUMENTS[c.function]
    mx, packed = kind_of(operands) == "MX", operands["hidden_scale"] is not None
    for key, x in operands.items():
        if x is None or not hasattr(x, "dtype"):
            continue
        if key in ("index", "rank"):
            taken, words = jnp.issubdtype(x.dtype, jnp.integer), "integers"
        elif key.endswith("_w"):
            dtype = operands["gate_up_w"].dtype
            taken = x.dtype == dtype if kind_of(operands) != "NONE" else _floats(x)
            words = f"{_FLOAT_WORDS}, or both float8_e4m3, float8_e4m3fn, uint16 or "
            words += "uint32"
        elif key.endswith("_scale"):
            words = "uint8" if mx or key == "hidden_scale" else "float32"
            taken = x.dtype == words
        elif key == "hidden" and packed:
            taken, words = x.dtype == "uint32", "uint32 with a scale"
        else:
            taken, words = _floats(x), _FLOAT_WORDS
        if not taken:
            return f"{names[key]} must be {words}, got {x.dtype}"
    return ""


def _floats(x: Any) -> bool:
    return x.dtype in FLOATS


_TILED = Operands._fields[:5] + Operands._fields[6:10]
contracts.add(
    contracts.all_or_none_tiles(
        EMITTER,
        _TILED,
        lambda function: (
            tiled()(function) | dict(affinities=np.zeros((4, 3), np.float32))
        ),
    )
)
contracts.add(only_hints(EMITTER, arguments()))
row(
    "tensors",
    "tiles go to neuronjax.emit.expert_mlps_kernel",
    lambda c: any(isinstance(x, MemrefTile) for x in operands_of(c).values()),
    functions=(PUBLIC,),
    example=tiled(),
    stage=-1,
)
row(
    "arrays",
    "{not_array}",
    told("not_array", _not_array),
    example=arguments(down_w=None),
    stage=-1,
)
row(
    "settings",
    "{odd_setting}",
    told("odd_setting", _odd_setting),
    example=arguments(all_experts=1),
    stage=-1,
)
row(
    "axes",
    "{misranked}",
    told("misranked", _misranked),
    example=arguments(hidden=(1, 4, 8)),
    stage=0,
)
row(
    "dtypes",
    "{odd_dtype}",
    told("odd_dtype", _odd_dtype),
    example=arguments(index=np.zeros((4, 2), np.float32)),
    stage=0,
)
row(
    "activation",
    f"{{arg.activation}} must be one of {members(ActFnType)}, got {{own.activation}}",
    lambda c: c.activation_kind is None,
    example=arguments(activation="ReLU"),
)
row(
    "scaling",
    "{arg.scaling} must be NO_SCALE or POST_SCALE, got {own.scaling}",
    lambda c: (
        scaling_of(c)
        not in (ExpertAffinityScaleMode.NO_SCALE, ExpertAffinityScaleMode.POST_SCALE)
    ),
    example=arguments(scaling="PRE_SCALE"),
)
row(
    "empty",
    "no axis but that of the tokens may have size 0, got H = {H}, I = {I}, "
    "E_L = {E_L}, E = {E} and K = {K}",
    lambda c: 0 in (c.H, c.I, c.E_L, c.E, c.K),
    example=arguments(index=np.zeros((4, 0), int)),
)
row(
    "shapes",
    "{unlike}",
    lambda c: c.unlike,
    example=arguments(down_w=(3, 5, 8)),
)
row(
    "tile_axis",
    "tiles must have {off_axis}",
    lambda c: c.off_axis,
    functions=(EMITTER,),
    example=lambda function: (
        tiled()(function)
        | dict(affinities=MemrefTile.from_tensor(jnp.zeros((4, 3)), 1))
    ),
)


def _needs_index(c: SimpleNamespace) -> bool:
    return (not c.own.all_experts or c.own.mask) and c.own.index is None


row(
    "index",
    "{arg.index} says which experts a token goes to: it is needed unless "
    "{arg.all_experts}, and with {arg.mask}",
    _needs_index,
    example=arguments(index=None),
)
row(
    "affinities",
    "POST_SCALE needs {arg.affinities}",
    lambda c: c.is_scaled and c.own.affinities is None,
    example=arguments(affinities=None),
)
row(
    "rank_needed",
    "{arg.rank} says which columns of {arg.affinities} belong to the local experts: "
    "POST_SCALE with {arg.all_experts} needs it",
    lambda c: c.own.all_experts and c.is_scaled and c.own.rank is None,
    example=arguments(all_experts=True),
)
row(
    "experts",
    "without {arg.rank} the experts of {arg.gate_up_w} are all there are: "
    "{arg.affinities} must have {E_L} columns, got {E}",
    lambda c: not c.own.all_experts and c.own.rank is None and c.E != c.E_L,
    example=arguments(affinities=(4, 6)),
    stage=2,
)
row(
    "rank_value",
    "the local experts of {arg.rank}, {E_L} from {E_L} * {rank_value} on, must lie in "
    "[0, {E}), the columns of {arg.affinities}",
    lambda c: (
        c.rank_value is not None
        and c.own.affinities is not None
        and not 0 <= c.rank_value * c.E_L <= c.E - c.E_L
    ),
    example=arguments(**(ALL | dict(rank=np.full((1, 1), 2, np.int32)))),
    stage=2,
)
row(
    "mask",
    "{arg.mask} masks affinities, and NO_SCALE reads none: with {arg.all_experts} it "
    "sums every local expert, named or not",
    lambda c: c.own.all_experts and c.own.mask and not c.is_scaled,
    example=arguments(**(ALL | dict(mask=True, scaling="NO_SCALE"))),
)


def _crossed(c: SimpleNamespace) -> bool:
    limits = [getattr(c.own, key) for key in LIMITS]
    return is_crossed(*limits[:2]) or is_crossed(*limits[2:])


row(
    "clamps",
    "a clamp's upper limit must be at least its lower one, and neither NaN, got "
    "{own.gate_clamp_lower_limit} to {own.gate_clamp_upper_limit} for the gate and "
    "{own.up_clamp_lower_limit} to {own.up_clamp_upper_limit} for up",
    _crossed,
    example=arguments(up_clamp_upper_limit=-1.0, up_clamp_lower_limit=1.0),
)


row(
    "dynamic",
    "{arg.dynamic} skips tokens of affinity 0 in blocks: it needs {arg.all_experts} "
    "and a block_size, a positive integer, got {own.block_size!r}",
    lambda c: c.own.dynamic and not (c.own.all_experts and is_count(c.own.block_size)),
    example=arguments(**(ALL | dict(dynamic=True))),
)
row(
    "block_size",
    "block_size is for {arg.dynamic}, got {own.block_size!r}",
    lambda c: not c.own.dynamic and c.own.block_size is not None,
    example=arguments(block_size=8),
)
row(
    "eager",
    "expert_affinities_eager is read by no path: an expert's affinity is that of "
    "expert_affinities",
    lambda c: c.expert_affinities_eager is not None,
    functions=(PUBLIC,),
    example=arguments(expert_affinities_eager=(4, 2)),
)
row(
    "static_scales",
    "static quantization is taken by no path: gate_up_input_scale and "
    "down_input_scale must be None",
    lambda c: c.gate_up_input_scale is not None or c.down_input_scale is not None,
    functions=(PUBLIC,),
    example=quantized(down_input_scale=(1, 1)),
)
