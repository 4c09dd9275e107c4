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

from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives.options import (
    NormType,
    QKVOutputLayout,
    QKVWeightLayout,
    QuantizationType,
    member,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_SCALES = dict(w_scale="qkv_w_scale", in_scale="qkv_in_scale")
_CACHES = dict(
    k_cache="k_cache",
    v_cache="v_cache",
    k_scale="k_scale",
    v_scale="v_scale",
    slots="slot_mapping",
)
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
    eps="norm_eps",
    **_SCALES,
    **_CACHES,
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
    eps="eps",
    **_SCALES,
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
    **_SCALES,
    **_CACHES,
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
CACHING = ("qkv", "qkv_cte", *EMITTERS)
# The operands of the macro: those of every call, and what quantization appends.
PLAIN = "x w gamma beta bias mlp_prev attn_prev cos sin".split()
OPERANDS = [*PLAIN, *_SCALES, *_CACHES]
# The axis that a tile of each lays on the partitions; caches are no tiles.
TILE_AXES: dict[str, int] = dict(
    zip(OPERANDS, (2, 0, 1, 1, 1, 2, 2, 2, 2, 1, 1), strict=False)
)
COUNTS = ("hidden_actual", "d_head", "num_q_heads", "num_kv_heads")
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
# The prefill path takes what is longer or larger than these.
DECODE_SEQ, DECODE_TOKENS = 96, 128
# Above these token counts the decode kernel splits rows over the two cores.
SPLIT_TOKENS = {NormType.RMS_NORM: 18, NormType.LAYER_NORM: 10}


def is_prefill(fused_rope: bool, batch: Any, seq: Any, caches: bool = False) -> bool:
    """The dispatch rule of `qkv`.

    A symbolic size takes the prefill path, and so do caches: decode writes none.
    """
    symbolic = not (isinstance(batch, int) and isinstance(seq, int))
    if fused_rope or caches or symbolic:
        return True
    return seq > DECODE_SEQ or batch * seq > DECODE_TOKENS


def facts(function: str) -> Callable[[SimpleNamespace], dict[str, Any]]:
    """What the rows read, from the arguments of `function`."""
    names = ARGUMENTS[function]

    def read(call: SimpleNamespace) -> dict[str, Any]:
        operands = {
            key: getattr(call, names[key]) if key in names else None for key in OPERANDS
        }
        found = _sizes(operands) | _options(call, names, operands)
        found |= _odd_operands(call, names, operands)
        found["prefill"] = function == "qkv_cte" or (
            function != "qkv_tkg"
            and is_prefill(
                found["rope"], found["B"], found["S"], operands["k_cache"] is not None
            )
        )
        return operands | found

    return read


def _sizes(operands: dict[str, Any]) -> dict[str, Any]:
    """Shapes, and the sizes that they give where input and weight have their ranks."""
    shape: dict[str, Any] = {
        key: getattr(x, "shape", None) for key, x in operands.items()
    }
    ranked = [len(shape[key] or ()) for key in ("x", "w")] == [3, 2]
    batch, seq, width = shape["x"] if ranked else (0, 0, 0)
    return dict(
        shape=SimpleNamespace(**shape),
        ranked=ranked,
        B=batch,
        S=seq,
        H=width,
        I=shape["w"][1] if ranked else 0,
        tiled=any(isinstance(x, MemrefTile) for x in operands.values()),
    )


def _options(
    call: SimpleNamespace, names: dict[str, str], operands: dict[str, Any]
) -> dict[str, Any]:
    """What a call asks for, whatever its function calls the arguments."""
    rope = operands["cos"] is not None
    order = getattr(call, "weight_layout", QKVWeightLayout.CONTIGUOUS)
    return dict(
        arg=SimpleNamespace(**dict(zip(OPERANDS, OPERANDS, strict=True)) | names),
        rope=getattr(call, "fused_rope", rope),
        flag=getattr(call, names.get("flag", ""), None),
        layout=member(QKVOutputLayout, call.output_layout),
        norm=member(NormType, getattr(call, names["norm"])),
        norm_given=getattr(call, names["norm"]),
        quantization=member(QuantizationType, call.quantization_type),
        weight_order=member(QKVWeightLayout, order),
        eps_given=getattr(call, names["eps"]),
        slots_given=_described(operands["slots"]),
    )


def _odd_operands(
    call: SimpleNamespace, names: dict[str, str], operands: dict[str, Any]
) -> dict[str, Any]:
    """What is wrong with dtypes and axes; empty strings where nothing is."""
    # Block-scaled weights and scales have dtypes of their own.
    is_mx = member(QuantizationType, call.quantization_type) is QuantizationType.MX
    packed = {"w", "w_scale"} if is_mx else set()
    return dict(
        floats=_narrow_or_integer(operands, names, _fp8_operands(call), packed),
        scale_dtypes=_other_scales(operands, names, packed),
        is_mx=is_mx,
        cache_dtypes=_odd_caches(operands, getattr(call, "kv_dtype", None)),
        traced=_traced(call, names["eps"]),
        off_axis=_off_axis(operands, names),
    )


def _fp8_operands(call: SimpleNamespace) -> set[str]:
    """The operands that may hold fp8 values: a weight that has scales, the input."""
    kind = member(QuantizationType, call.quantization_type)
    scaled = kind not in (None, QuantizationType.NONE)
    return {key for key, may in (("x", call.function in PUBLIC), ("w", scaled)) if may}


def _narrow_or_integer(
    operands: dict[str, Any], names: dict[str, str], fp8: set[str], packed: set[str]
) -> str:
    """The first operand of a dtype that is not built, described; empty if none is."""
    for key in PLAIN:
        if key in packed:
            continue
        dtype: Any = getattr(operands[key], "dtype", None)
        if operands[key] is None or dtype in _DTYPES or (key in fp8 and is_fp8(dtype)):
            continue
        return f"{names[key]} of dtype {dtype}"
    return ""


def _other_scales(
    operands: dict[str, Any], names: dict[str, str], packed: set[str]
) -> str:
    """The first scale that is not float32, described; empty if none is."""
    for key in ("w_scale", "in_scale", "k_scale", "v_scale"):
        dtype = getattr(operands[key], "dtype", None)
        if operands[key] is None or key in packed:
            continue
        if dtype != jnp.float32:
            return f"{names[key]} of dtype {dtype}"
    return ""


def _odd_caches(operands: dict[str, Any], kv_dtype: Any) -> str:
    """The dtypes of the caches and their name, unless all are one fp8 dtype."""
    caches = [operands[key] for key in ("k_cache", "v_cache")]
    if None in [getattr(cache, "dtype", None) for cache in caches]:
        return ""
    held = [cache.dtype for cache in caches]
    try:
        wanted = held[0] if kv_dtype is None else jnp.dtype(kv_dtype)
    except TypeError:
        wanted = None
    if held == [wanted] * 2 and is_fp8(held[0]):
        return ""
    return f"{held[0]} and {held[1]} for kv_dtype = {kv_dtype}"


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


def _described(x: Any) -> str:
    """The shape and dtype of an operand, or the type of what has none."""
    if not hasattr(x, "dtype"):
        return type(x).__name__
    return f"{x.shape} of dtype {x.dtype}"


def _off_axis(operands: dict[str, Any], names: dict[str, str]) -> str:
    """The first tile that lies on another axis than its operand's, described."""
    for key, x in operands.items():
        if isinstance(x, MemrefTile) and x.axis != TILE_AXES.get(key, x.axis):
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
