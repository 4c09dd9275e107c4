"""What the rules of quantized MLP calls read.

The public function takes one scale a weight, `[128, n]` with equal rows; the emitters
take those of gate and up as two rows.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from neuronjax.kernels.quantization.fp8 import E4M3, E4M3FN, SCALE_BYTES, is_fp8
from neuronjax.primitives.options import QuantizationType, member
from neuronjax.primitives.tile import PARTITIONS

# The decode path takes at most this many rows.
DECODE_ROWS = 96
SCALED = (
    QuantizationType.ROW,
    QuantizationType.STATIC,
    QuantizationType.STATIC_MX,
)
WEIGHTS = ("gate_w", "up_w", "down_w")
IN_SCALES = ("gate_up_in_scale", "down_in_scale")


def forced(call: SimpleNamespace) -> tuple[bool, bool]:
    """Whether a call asks for prefill, and whether it asks for decode."""
    return bool(getattr(call, "force_cte_mode", False)), bool(
        getattr(call, "force_tkg_mode", False)
    )


def takes_prefill(
    hidden: tuple[Any, ...], force: bool, forbid: bool = False
) -> bool | None:
    """Whether the prefill path is taken; None when the rows are not known."""
    rows = math.prod(hidden[:-1])
    if force or forbid:
        return force
    if not isinstance(rows, int):
        return None
    return rows > DECODE_ROWS


def quantized_facts(
    call: SimpleNamespace, operands: dict[str, Any], names: dict[str, str]
) -> SimpleNamespace:
    """The facts of one call; an unquantized one has a width alone."""
    kind = member(QuantizationType, getattr(call, names.get("quantization", ""), None))
    hidden = tuple(getattr(operands["hidden"], "shape", ()))
    dtype: Any = getattr(operands["hidden"], "dtype", None)
    fp8_rows = dtype is not None and is_fp8(dtype)
    packed = fp8_rows and kind is QuantizationType.ROW
    facts = SimpleNamespace(
        quantization=kind,
        kind_of_weights=None if kind in (None, QuantizationType.NONE) else kind,
        kind_name="none" if kind is None else kind.name,
        is_row=kind is QuantizationType.ROW,
        scaled=kind in SCALED,
        fp8_rows=fp8_rows,
        packed=packed,
        width=hidden[-1] - SCALE_BYTES * packed if hidden else 0,
        prefill=takes_prefill(hidden, *forced(call)),
        public=call.function == "mlp",
        result_dtype=names.get("out_dtype", names.get("mlp_out")),
    )
    facts.narrow = _narrow(operands, names)
    facts.missing_scales = _missing_scales(facts, operands, names, call)
    facts.idle_scales = _idle_scales(facts, operands, names)
    facts.unlike_scales = _unlike_scales(facts, operands, names, call)
    return facts


def _narrow(operands: dict[str, Any], names: dict[str, str]) -> str:
    """Every weight and `hidden` of a dtype that quantized calls do not take."""
    found, wide = [], ("bfloat16", "float16", "float32", "float64")
    for key in ("hidden", *WEIGHTS):
        dtype: Any = getattr(operands[key], "dtype", None)
        floats = tuple(map(jnp.dtype, wide)) if key == "hidden" else ()
        taken = (E4M3, *floats) if key == "hidden" else (E4M3, E4M3FN)
        if operands[key] is not None and dtype not in taken:
            found.append(f"{names[key]} of dtype {dtype}")
    return ", ".join(found)


def _needed(facts: SimpleNamespace, skip: bool) -> tuple[str, ...]:
    if not facts.scaled:
        return ()
    gate = () if skip else ("gate_w_scale",)
    weights = (*gate, "up_w_scale") if facts.public else ("gate_up_w_scale",)
    ins = () if facts.quantization is QuantizationType.ROW else IN_SCALES
    return (*weights, "down_w_scale", *ins)


def _missing_scales(facts, operands, names, call) -> str:
    skip = bool(getattr(call, names["skip_gate"]))
    lacking = [key for key in _needed(facts, skip) if operands[key] is None]
    return ", ".join(names[key] for key in lacking)


def _idle_scales(facts, operands, names) -> str:
    """The scales that nothing reads."""
    if facts.quantization is QuantizationType.MX:
        return ""
    read = _needed(facts, skip=False)
    given = [key for key in operands if key.endswith("_scale")]
    idle = [key for key in given if key not in read and operands[key] is not None]
    return ", ".join(names[key] for key in idle)


def _unlike_scales(facts, operands, names, call) -> str:
    """Every scale of another shape or dtype than it must have, described."""
    up = tuple(getattr(operands["up_w"], "shape", ()))
    if not facts.scaled or len(up) != 2:
        return ""
    is_row = facts.quantization is QuantizationType.ROW
    columns, rows = (up[1], facts.width) if is_row else (1, 1)
    first = PARTITIONS if facts.public else 1
    both = 1 if getattr(call, names["skip_gate"]) else 2
    wanted = dict(
        gate_up_w_scale=(both, columns),
        gate_w_scale=(first, columns),
        up_w_scale=(first, columns),
        down_w_scale=(first, rows),
        gate_up_in_scale=(first, 1),
        down_in_scale=(first, 1),
    )
    found = []
    for key, shape in wanted.items():
        x = operands[key]
        if x is not None and _held(x) != (shape, jnp.float32):
            found.append(f"{names[key]} {shape}, got {_described(x)}")
    return "; ".join(found)


def _held(x: Any) -> tuple[Any, Any]:
    return getattr(x, "shape", None), getattr(x, "dtype", None)


def _described(x: Any) -> str:
    """The shape and dtype of an operand, or the type of what has none."""
    shape, dtype = _held(x)
    return type(x).__name__ if dtype is None else f"{shape} of dtype {dtype}"
