"""What the rules of block-scaled MLP calls read.

The other rules see the weights and biases that the containers stand for: `[H, I]`,
`[I, H]` and `[1, I]`.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.mx import layout
from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import QuantizationType, member

WEIGHTS = ("gate_w", "up_w", "down_w")
BIASES = ("gate_b", "up_b")
# A single tile of the intermediate axis holds fewer rows than this.
TILE = layout.TILE


def is_mx(call: SimpleNamespace, names: dict[str, str]) -> bool:
    """Whether a call asks for block-scaled weights."""
    kind = getattr(call, names.get("quantization", ""), None)
    return member(QuantizationType, kind) is QuantizationType.MX


def sizes_of(operands: dict[str, Any]) -> tuple[int, int]:
    """`H` and `I` of the containers of `up_w`; zeros when it has not three axes."""
    shape = tuple(getattr(operands["up_w"], "shape", ()))
    return (shape[1] * TILE, shape[2]) if len(shape) == 3 else (0, 0)


def logical_operands(operands: dict[str, Any]) -> dict[str, Any]:
    """The operands with weights and biases as the matrices that they stand for."""
    width, d_ff = sizes_of(operands)
    shapes = dict(gate_w=(width, d_ff), up_w=(width, d_ff), down_w=(d_ff, width))
    shapes |= dict.fromkeys(BIASES, (1, d_ff))
    if not width:
        return operands
    return operands | {
        key: jax.ShapeDtypeStruct(shape, jnp.float32)
        for key, shape in shapes.items()
        if operands[key] is not None
    }


def mx_facts(
    call: SimpleNamespace, operands: dict[str, Any], names: dict[str, str]
) -> dict[str, Any]:
    """The facts of one call; empty words where it is not block-scaled."""
    if not is_mx(call, names):
        words = dict.fromkeys(("mx_unlike", "mx_format", "mx_hidden"), "")
        return words | dict(is_mx=False, mx_d_ff=32, mx_width=TILE)
    named = getattr(call, "weight_dtype", None)
    kind = weight_format(operands["up_w"], named)
    width, d_ff = sizes_of(operands)
    hidden = tuple(getattr(operands["hidden"], "shape", ()))
    return dict(
        is_mx=True,
        mx_format="" if kind else f"got {named}",
        mx_unlike="" if kind is None else "; ".join(_unlike(operands, names, kind)),
        mx_width=hidden[-1] if hidden else 0,
        mx_d_ff=d_ff,
        mx_hidden=_odd_hidden(operands["hidden"]),
    )


def _odd_hidden(hidden: Any) -> str:
    dtype: Any = getattr(hidden, "dtype", None)
    wide = map(jnp.dtype, ("bfloat16", "float16", "float32", "float64"))
    return "" if dtype in tuple(wide) else str(dtype)


def _unlike(operands: dict[str, Any], names: dict[str, str], kind: Any):
    """Every packed operand of another shape or dtype than it must have."""
    width, d_ff = sizes_of(operands)
    tiles, p = layout.tiles(max(d_ff, 1)), layout.partitions(max(d_ff, 1))
    columns = (width // TILE, d_ff)
    both = 1 if operands["gate_w"] is None else 2
    wanted: dict[str, tuple[Any, ...]] = dict.fromkeys(
        ("gate_w", "up_w"), (kind.container, 128, *columns)
    )
    wanted |= dict(down_w=(kind.container, p, tiles, width))
    wanted |= dict.fromkeys(("gate_w_scale", "up_w_scale"), ("uint8", 16, *columns))
    wanted |= dict(gate_up_w_scale=("uint8", both, 16, *columns))
    wanted |= dict(down_w_scale=("uint8", p // 8, tiles, width))
    wanted |= dict.fromkeys(BIASES, (None, p, tiles, 4))
    for key, (dtype, *shape) in wanted.items():
        x = operands[key]
        if x is None or key not in names:
            continue
        held = getattr(x, "dtype", None)
        fits = held is not None and list(x.shape) == shape
        if not fits or dtype not in (None, str(held)):
            got = type(x).__name__ if held is None else f"{held} {x.shape}"
            yield f"{names[key]} {dtype or ''} {tuple(shape)}, got {got}"


def config_of(call: SimpleNamespace) -> dict[str, Any]:
    """What a block-scaled call has in its config beside the rest."""
    kind = weight_format(call.up_w, call.weight_dtype)
    assert kind is not None
    return dict(
        quant_mode="QuantOnly",
        quantization="MX",
        is_fp8_kernel=kind.bits == 8,
        weight_format=kind.name,
    )
