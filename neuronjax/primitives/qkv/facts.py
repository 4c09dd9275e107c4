"""What the rules of QKV read, from the public functions and the emitters alike.

The functions call their arguments differently: `ARGUMENTS` translates, so that each
rule is written once.
"""

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.primitives.options import (
    NormType,
    QKVOutputLayout,
    member,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_CTE = dict(
    x="input",
    w="fused_qkv_weights",
    gamma="gamma_norm_weights",
    beta="layer_norm_bias",
    bias="bias",
    mlp_prev="mlp_prev",
    attn_prev="attention_prev",
    cos="cos_cache",
    sin="sin_cache",
    flag="fused_residual_add",
    norm="fused_norm_type",
    layout="output_layout",
    quantization="quantization_type",
    eps="norm_eps",
)
_TKG = dict(
    x="hidden",
    w="qkv_w",
    gamma="norm_w",
    beta="norm_bias",
    bias="qkv_bias",
    mlp_prev="mlp_prev",
    attn_prev="attn_prev",
    flag="fused_add",
    norm="norm_type",
    layout="output_layout",
    quantization="quantization_type",
    eps="eps",
)
_EMITTER = dict(
    x="hidden",
    w="qkv_w",
    gamma="norm_w",
    beta="norm_bias",
    bias="qkv_bias",
    cos="cos_cache",
    sin="sin_cache",
    norm="norm_type",
    layout="output_layout",
    eps="eps",
)
ARGUMENTS = {
    "qkv": _CTE,
    "qkv_cte": _CTE,
    "qkv_tkg": _TKG,
    "qkv_kernel": _EMITTER,
    "qkv_fused_add_kernel": dict(_EMITTER, mlp_prev="mlp_out", attn_prev="attn_out"),
}
ALL = tuple(ARGUMENTS)
PUBLIC = ("qkv", "qkv_cte", "qkv_tkg")
ROTATING = ("qkv", "qkv_cte", "qkv_kernel", "qkv_fused_add_kernel")
EMITTERS = ("qkv_kernel", "qkv_fused_add_kernel")
# The operands of the macro, and the axis that a tile of each lays on the partitions.
OPERANDS = "x w gamma beta bias mlp_prev attn_prev cos sin".split()
TILE_AXES: dict[str, int] = dict(
    zip(OPERANDS, (2, 0, 1, 1, 1, 2, 2, 2, 2), strict=True)
)
COUNTS = ("hidden_actual", "d_head", "num_q_heads", "num_kv_heads")
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
# The prefill path takes what is longer or larger than these.
DECODE_SEQ, DECODE_TOKENS = 96, 128
# Above these token counts the decode kernel splits rows over the two cores.
SPLIT_TOKENS = {NormType.RMS_NORM: 18, NormType.LAYER_NORM: 10}


def is_prefill(fused_rope: bool, batch: Any, seq: Any) -> bool:
    """The dispatch rule of `qkv`; a symbolic size takes the prefill path."""
    if fused_rope or not (isinstance(batch, int) and isinstance(seq, int)):
        return True
    return seq > DECODE_SEQ or batch * seq > DECODE_TOKENS


def facts(function: str) -> Callable[[SimpleNamespace], dict[str, Any]]:
    """What the rows read, from the arguments of `function`."""
    names = ARGUMENTS[function]

    def read(call: SimpleNamespace) -> dict[str, Any]:
        operands = {
            key: getattr(call, names[key]) if key in names else None for key in OPERANDS
        }
        shape: dict[str, Any] = {
            key: getattr(x, "shape", None) for key, x in operands.items()
        }
        ranked = [len(shape[key] or ()) for key in ("x", "w")] == [3, 2]
        batch, seq, width = shape["x"] if ranked else (0, 0, 0)
        rope = operands["cos"] is not None
        found: dict[str, Any] = dict(
            arg=SimpleNamespace(**dict(zip(OPERANDS, OPERANDS, strict=True)) | names),
            shape=SimpleNamespace(**shape),
            ranked=ranked,
            B=batch,
            S=seq,
            H=width,
            I=shape["w"][1] if ranked else 0,
            rope=getattr(call, "fused_rope", rope),
            flag=getattr(call, names.get("flag", ""), None),
            layout=member(QKVOutputLayout, call.output_layout),
            norm=member(NormType, getattr(call, names["norm"])),
            tiled=any(isinstance(x, MemrefTile) for x in operands.values()),
            floats=_narrow_or_integer(operands, names),
            traced=_traced(call, names["eps"]),
            off_axis=_off_axis(operands, names),
        )
        found["prefill"] = function == "qkv_cte" or (
            function != "qkv_tkg" and is_prefill(found["rope"], batch, seq)
        )
        return operands | found

    return read


def _narrow_or_integer(operands: dict[str, Any], names: dict[str, str]) -> str:
    """The first operand of a dtype that is not built, described; empty if none is."""
    for key, x in operands.items():
        dtype = getattr(x, "dtype", None)
        if x is not None and dtype not in _DTYPES:
            return f"{names[key]} of dtype {dtype}"
    return ""


def _traced(call: SimpleNamespace, eps: str) -> str:
    """The first setting that is no Python number, described; empty if none is."""
    readers: dict[str, Any] = {eps: float} | dict.fromkeys(COUNTS, operator.index)
    for key, reader in readers.items():
        value: Any = getattr(call, key)
        try:
            if value is not None or key == eps:
                reader(value)
        except (TypeError, ValueError):
            return f"{key} of type {type(value).__name__}"
    return ""


def _off_axis(operands: dict[str, Any], names: dict[str, str]) -> str:
    """The first tile that lies on another axis than its operand's, described."""
    for key, x in operands.items():
        if isinstance(x, MemrefTile) and x.axis != TILE_AXES[key]:
            return f"{names[key]} axis = {TILE_AXES[key]}, got {x.axis}"
    return ""


def arguments(tiles: bool = False, **changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape of zeros."""

    def build(function: str) -> dict[str, Any]:
        names = ARGUMENTS[function]
        given = dict(x=(1, 2, 8), w=(8, 16), norm="NO_NORM") | changes
        arrays = {k: jnp.zeros(v) if type(v) is tuple else v for k, v in given.items()}
        if tiles:
            arrays |= {
                key: MemrefTile.from_tensor(x, TILE_AXES[key])
                for key, x in arrays.items()
                if isinstance(x, jax.Array)
            }
        return {names.get(key, key): x for key, x in arrays.items() if x is not None}

    return build


def shapes(function: str, x: tuple[int, ...], w: tuple[int, ...]) -> dict[str, Any]:
    """Arguments too large to make: shapes alone."""
    hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, w))
    return arguments(x=hidden, w=weight)(function)


def both(a: Any, b: Any) -> bool:
    """Whether both are given."""
    return a is not None and b is not None


def counts(c: SimpleNamespace) -> tuple[int | None, ...]:
    """The head dimension and the head counts."""
    return c.d_head, c.num_q_heads, c.num_kv_heads


def all_given(c: SimpleNamespace) -> bool:
    """Whether the call says how the columns split into heads."""
    return None not in counts(c)


def nbsd(c: SimpleNamespace, limited: bool) -> int:
    """The head dimension where the layout limits it, else one that keeps any rule."""
    limited = limited and c.layout is QKVOutputLayout.NBSd
    return c.d_head if limited else PARTITIONS


def chunked(size: int, limited: bool) -> int:
    """The size where a tile must split it, else one that keeps any rule."""
    return size if limited and size > PARTITIONS else PARTITIONS
