"""What the rules of a decode step's experts read, whatever a function calls them.

`ARGUMENTS` translates operands and settings, so that each rule is written once.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.expert_mlps.operands import TILE_AXES, Operands
from neuronjax.kernels.mx import layout
from neuronjax.kernels.quantization.fp8 import E4M3, E4M3FN
from neuronjax.primitives.known import known
from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import (
    FLOATS,
    ActFnType,
    ExpertAffinityScaleMode,
    member,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

PUBLIC, EMITTER = "moe_tkg", "expert_mlps_kernel"
BOTH = (PUBLIC, EMITTER)
LIMITS = (
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
)
_SETTINGS = ("all_experts", "mask", "scaling", "activation", "out_dtype", "dynamic")
_OWN = (*Operands._fields, *_SETTINGS, "block_size", "weight_dtype", *LIMITS)
ARGUMENTS: dict[str, dict[str, str]] = {
    EMITTER: {key: key for key in _OWN},
    PUBLIC: {key: key for key in _OWN}
    | dict(
        hidden="hidden_input",
        gate_up_w="expert_gate_up_weights",
        down_w="expert_down_weights",
        affinities="expert_affinities",
        index="expert_index",
        rank="rank_id",
        gate_up_b="expert_gate_up_bias",
        down_b="expert_down_bias",
        gate_up_scale="expert_gate_up_weights_scale",
        down_scale="expert_down_weights_scale",
        hidden_scale="hidden_input_scale",
        all_experts="is_all_expert",
        mask="mask_unselected_experts",
        scaling="expert_affinities_scaling_mode",
        activation="activation_fn",
        out_dtype="output_dtype",
        dynamic="is_all_expert_dynamic",
    ),
}
FLAGS = ("all_experts", "mask", "dynamic")
PACKED = ("uint16", "uint32")


def given(call: SimpleNamespace) -> SimpleNamespace:
    """The call's operands and settings under this family's own names."""
    names = ARGUMENTS[call.function]
    return SimpleNamespace(**{key: getattr(call, name) for key, name in names.items()})


def operands_of(call: SimpleNamespace) -> dict[str, Any]:
    """The operands, by their own names."""
    found = given(call)
    return {key: getattr(found, key) for key in Operands._fields}


def kind_of(operands: dict[str, Any]) -> str:
    """How the weights are quantized: their dtype says it."""
    dtype = getattr(operands["gate_up_w"], "dtype", None)
    if dtype is None or str(dtype) in PACKED:
        return "MX" if dtype is not None else "NONE"
    return "ROW" if dtype in (E4M3, E4M3FN) else "NONE"


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an operand; that of a number is `[1, 1]`."""
    if isinstance(x, int | np.integer):
        return (1, 1)
    return tuple(getattr(x, "shape", ()))


def scaling_of(call: SimpleNamespace) -> Any:
    """The scale mode of a call; None for what is none."""
    return member(ExpertAffinityScaleMode, given(call).scaling)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rows read once shapes have the right number of axes."""
    operands, own = operands_of(call), given(call)
    kind, mx = kind_of(operands), kind_of(operands) == "MX"
    scaling = scaling_of(call)
    sizes = sizes_of(operands, mx)
    return sizes | dict(
        arg=SimpleNamespace(**ARGUMENTS[call.function]),
        own=own,
        kind=kind,
        is_mx=mx,
        mx_format=weight_format(operands["gate_up_w"], own.weight_dtype),
        scaling_kind=scaling,
        is_scaled=scaling is ExpertAffinityScaleMode.POST_SCALE,
        activation_kind=member(ActFnType, own.activation),
        tiled=any(isinstance(x, MemrefTile) for x in operands.values()),
        unlike="; ".join(_unlike(operands, ARGUMENTS[call.function], sizes, mx)),
        off_axis=_off_axis(operands, ARGUMENTS[call.function]),
        rank_value=_rank_value(own.rank),
    )


def sizes_of(operands: dict[str, Any], mx: bool) -> dict[str, Any]:
    """`T`, `H`, `I`, the local experts `E_L`, all experts `E`, and `K`."""
    hidden, weight = (shape_of(operands[key]) for key in ("hidden", "gate_up_w"))
    table, index = (shape_of(operands[key]) for key in ("affinities", "index"))
    is_packed = len(hidden) == 3
    tokens = hidden[2] if is_packed else hidden[0]
    width = hidden[0] * hidden[1] * 4 if is_packed else hidden[1]
    if mx and not is_packed:
        width = weight[3] * layout.TILE
    return dict(
        T=tokens,
        H=width,
        hidden_width=hidden[0] * hidden[1] * 4 if is_packed else hidden[1],
        E_L=weight[0],
        E=table[1] if len(table) == 2 else weight[0],
        I=weight[-1],
        K=index[1] if len(index) == 2 else 1,
    )


def _wanted(s: dict[str, Any]) -> dict[str, tuple[str, tuple]]:
    """The shape of each operand, in words and in numbers."""
    t, h, e, i = s["T"], s["H"], s["E_L"], s["I"]
    return dict(
        affinities=("[T, E]", (t, s["E"])),
        index=("[T, K]", (t, s["K"])),
        rank=("[1, 1]", (1, 1)),
        gate_up_w=("[E_L, H, 2, I]", (e, h, 2, i)),
        down_w=("[E_L, I, H]", (e, i, h)),
        gate_up_b=("[E_L, 2, I]", (e, 2, i)),
        down_b=("[E_L, H]", (e, h)),
        gate_up_scale=("[E_L, 2, I]", (e, 2, i)),
        down_scale=("[E_L, H]", (e, h)),
    )


def _wanted_blocks(s: dict[str, Any]) -> dict[str, tuple[str, tuple]]:
    t, h, e, i = s["T"], s["H"], s["E_L"], s["I"]
    p, tiles, columns = layout.partitions(i), layout.tiles(i), h // layout.TILE
    in_tiles = "ceil(I/512)"
    return dict(
        hidden_scale=("[16, H/512, T]", (16, columns, t)),
        gate_up_w=("[E_L, 128, 2, H/512, I]", (e, PARTITIONS, 2, columns, i)),
        down_w=(f"[E_L, Ip, {in_tiles}, H]", (e, p, tiles, h)),
        gate_up_b=(f"[E_L, Ip, 2, {in_tiles}, 4]", (e, p, 2, tiles, 4)),
        gate_up_scale=("[E_L, 16, 2, H/512, I]", (e, 16, 2, columns, i)),
        down_scale=(f"[E_L, Ip/8, {in_tiles}, H]", (e, p // 8, tiles, h)),
    )


def _unlike(operands, names, sizes, mx):
    """Every operand of another shape than it must have, described."""
    if 0 in sizes.values():
        return
    for key, (words, shape) in (
        _wanted(sizes) | (_wanted_blocks(sizes) if mx else {})
    ).items():
        x = operands[key]
        if x is not None and shape_of(x) != shape:
            yield f"{names[key]} must have shape {words} = {shape}, got {shape_of(x)}"


def _off_axis(operands: dict[str, Any], names: dict[str, str]) -> str:
    for key, axis in TILE_AXES.items():
        x = operands[key]
        if isinstance(x, MemrefTile) and x.axis != axis:
            return f"{names[key]} axis = {axis}, got {x.axis}"
    return ""


def _rank_value(rank: Any) -> int | None:
    """The rank where it is known while tracing."""
    held = known(rank)
    return None if held is None or held.size != 1 else int(held.reshape(()))


def is_float_dtype(dtype: Any) -> bool:
    """Whether `dtype` names one of the four floating dtypes."""
    try:
        return jnp.dtype(dtype) in FLOATS
    except TypeError:
        return False
