"""What the rules of block-scaled output projections read."""

from types import SimpleNamespace
from typing import Any

from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import QuantizationType

BLOCK = 32


def mx_facts(
    call: SimpleNamespace, kind: Any, weight_scale: Any, input_scale: Any
) -> dict[str, Any]:
    """The facts of one call; nothing is packed where it is not block-scaled."""
    if kind is not QuantizationType.MX:
        return dict(is_mx=False, mx_packed=(), mx_unlike="", mx_rows=BLOCK)
    attention = _shape(call.attention)
    packed = ("weight",) if input_scale is None else ("weight", "attention")
    rows = attention[1] * attention[2] if len(attention) == 4 else 0
    rows = rows * 4 if "attention" in packed else rows
    found = "; ".join(_unlike(call, rows, weight_scale, input_scale))
    return dict(is_mx=True, mx_packed=packed, mx_unlike=found, mx_rows=rows)


def _shape(x: Any) -> tuple[Any, ...]:
    return tuple(getattr(x, "shape", ()))


def _unlike(call: SimpleNamespace, rows: int, weight_scale: Any, input_scale: Any):
    """Every packed operand of another shape or dtype than it must have."""
    width = (_shape(call.weight) or (0,))[-1]
    kind, blocks = weight_format(call.weight), rows // BLOCK
    container = "uint16 or uint32" if kind is None else kind.container
    yield from _misfit("weight", call.weight, container, (rows // 4, width))
    yield from _misfit("the weight's scale", weight_scale, "uint8", (blocks, width))
    if input_scale is not None and len(_shape(call.attention)) == 4:
        batch, _, _, seq = _shape(call.attention)
        packed = (batch, 1, rows // 4, seq)
        yield from _misfit("attention", call.attention, "uint32", packed)
        yield from _misfit("its scale", input_scale, "uint8", (batch, blocks, seq))


def _misfit(name: str, x: Any, dtype: str, shape: tuple):
    found: Any = getattr(x, "dtype", None)
    if x is None or str(found) != dtype or _shape(x) != shape:
        got = type(x).__name__ if found is None else f"{found} {_shape(x)}"
        yield f"{name} must be {dtype} of shape {shape}, got {got}"
