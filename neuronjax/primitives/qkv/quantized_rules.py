"""The rules of quantized QKV calls: scales, and the caches of quantized heads."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import is_fp8, largest
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.kinds import is_flag, is_on
from neuronjax.primitives.options import QKVOutputLayout, QuantizationType
from neuronjax.primitives.qkv.facts import (
    ALL,
    CACHING,
    EMITTERS,
    PUBLIC,
    all_given,
    arguments,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")
_KV_OPTIONS = ("kv_dtype", "fp8_max", "fp8_min", "use_block_kv", "block_size")
_MX = (QuantizationType.MX, QuantizationType.STATIC_MX)


def kv_limits(fp8_min: float | None, fp8_max: float | None) -> tuple[float, float]:
    """The clip of quantized keys and values, +-240 unless named."""
    low = -240.0 if fp8_min is None else fp8_min
    return float(low), float(240.0 if fp8_max is None else fp8_max)


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage = kwargs.pop("stage", 2)
    text = "{function}: " + message
    contracts.add(
        Contract(f"qkv.{rule}", functions, text, *args, stage=stage, **kwargs)
    )


def _is(c: SimpleNamespace, name: str) -> bool:
    return c.quantization is QuantizationType[name]


def _repeats(shape: Any, columns: int) -> bool:
    """Whether a scale is one row, or one row repeated on all partitions."""
    return shape in ((1, columns), (PARTITIONS, columns))


def _given(c: SimpleNamespace, *names: str) -> list[bool]:
    return [bool(getattr(c, name, None) is not None) for name in names]


def _asks_for_caches(c: SimpleNamespace) -> bool:
    options = [getattr(c, name, None) for name in _KV_OPTIONS]
    asked = [x is not None and (is_on(x) or not is_flag(x)) for x in options]
    return any(asked) or any(_given(c, *_CACHES, "slots"))


def _blocked(c: SimpleNamespace) -> bool:
    return bool(getattr(c, "use_block_kv", c.slots is not None))


def _cache_shape_is_wrong(c: SimpleNamespace) -> bool:
    if not all(_given(c, *_CACHES)) or not all_given(c):
        return False
    k, v, width = c.shape.k_cache, c.shape.v_cache, c.num_kv_heads * c.d_head
    if k != v or len(k or ()) != 3 or k[2] != width:
        return True
    if _blocked(c):
        return getattr(c, "block_size", None) not in (None, k[1])
    # A symbolic size is left to run time.
    sizes = (k[1], c.S)
    return k[0] != c.B or (all(isinstance(n, int) for n in sizes) and k[1] < c.S)


def _limits_are_wrong(c: SimpleNamespace) -> bool:
    try:
        low, high = kv_limits(c.fp8_min, c.fp8_max)
    except (TypeError, ValueError):
        return True
    dtype = getattr(c.k_cache, "dtype", None)
    top = largest(dtype) if dtype is not None and is_fp8(dtype) else math.inf
    return not -top <= low < high <= top


def _quantized(kind: str, **changes: Any):
    """Arguments of a quantized call that keep the rules but for `changes`."""
    scales: dict[str, Any] = dict(
        w_scale=np.ones((1, 16 if kind == "ROW" else 3), np.float32)
    )
    if kind == "STATIC":
        counts = dict(d_head=4, num_q_heads=2, num_kv_heads=1)
        scales |= dict(in_scale=np.ones((1, 1), np.float32), **counts)
    weight = np.zeros((8, 16), jnp.float8_e4m3)
    given: dict[str, Any] = dict(quantization_type=kind, w=weight, **scales) | changes
    return arguments(**given)


def _caching(blocks: bool = False, **changes: Any):
    """Arguments of a call with caches that keep the rules but for `changes`."""

    def build(function: str) -> dict[str, Any]:
        public = function not in EMITTERS
        cache = np.zeros((1, 4, 4), jnp.float8_e4m3)
        scales = dict.fromkeys(("k_scale", "v_scale"), np.ones((1, 1), np.float32))
        given: dict[str, Any] = dict(k_cache=cache, v_cache=cache, **scales)
        given |= dict(d_head=4, num_q_heads=2, num_kv_heads=1)
        if blocks:
            given |= dict(slots=np.array([[0, 1]], jnp.int32))
            given |= dict(use_block_kv=True, block_size=4) if public else {}
        return arguments(**given | changes)(function)

    return build


_row(
    "kind",
    ("qkv_tkg",),
    "quantization_type must be NONE, STATIC or ROW in decode, got {quantization.name}",
    lambda c: c.quantization in _MX,
    example=arguments(quantization_type="STATIC_MX"),
    stage=1,
)
_row(
    "row_mx",
    ALL,
    "quantization_type ROW_MX is taken by no path of QKV; ROW is the nearest that is",
    lambda c: _is(c, "ROW_MX"),
    example=arguments(quantization_type="ROW_MX"),
    stage=1,
)
_row(
    "scale_dtype",
    ALL,
    "scales must be float32, got {scale_dtypes}",
    lambda c: c.scale_dtypes,
    example=_quantized("ROW", w_scale=np.ones((1, 16), jnp.bfloat16)),
    stage=1,
)
_row(
    "scales",
    ALL,
    "{arg.w_scale} must be given exactly for quantization_type STATIC and ROW, "
    "{arg.in_scale} exactly for STATIC, got {quantization.name}",
    lambda c: (
        c.quantization not in _MX
        and _given(c, "w_scale", "in_scale") != [not _is(c, "NONE"), _is(c, "STATIC")]
    ),
    example=arguments(quantization_type="ROW"),
)
_row(
    "row_scale",
    ALL,
    "{arg.w_scale} of ROW must have shape (1, I) or (128, I), I = {I}, got "
    "{shape.w_scale}",
    lambda c: (
        _is(c, "ROW") and c.w_scale is not None and not _repeats(c.shape.w_scale, c.I)
    ),
    example=_quantized("ROW", w_scale=np.ones((16,), np.float32)),
)
_row(
    "static_scale",
    ALL,
    "STATIC takes {arg.w_scale} of shape (1, 3) or (128, 3), for query, key and value "
    "columns, and {arg.in_scale} of shape (1, 1) or (128, 1), got {shape.w_scale} and "
    "{shape.in_scale}",
    lambda c: (
        _is(c, "STATIC")
        and all(_given(c, "w_scale", "in_scale"))
        and not (_repeats(c.shape.w_scale, 3) and _repeats(c.shape.in_scale, 1))
    ),
    example=_quantized("STATIC", w_scale=np.ones((1, 16), np.float32)),
)
_row(
    "static_heads",
    ALL,
    "STATIC needs d_head, num_q_heads and num_kv_heads, got {d_head}, {num_q_heads} "
    "and {num_kv_heads}",
    lambda c: _is(c, "STATIC") and not all_given(c),
    example=_quantized("STATIC", d_head=None),
)
_row(
    "static_input",
    PUBLIC,
    "{arg.x} must be unquantized for STATIC, which divides it by {arg.in_scale}, got "
    "dtype {x.dtype}",
    lambda c: _is(c, "STATIC") and is_fp8(c.x.dtype),
    example=lambda function: _quantized(
        "STATIC", x=np.zeros((1, 2, 8), jnp.float8_e4m3)
    )(function),
)
_row(
    "chip_static_weight",
    ("qkv", "qkv_cte"),
    "the chip's prefill path takes fp8 weights for STATIC, got {w.dtype}",
    lambda c: c.prefill and _is(c, "STATIC") and not is_fp8(c.w.dtype),
    example=_quantized("STATIC", x=(1, 200, 8), w=np.zeros((8, 16), np.float32)),
    tag="hw",
    stage=3,
)
_row(
    "caches",
    CACHING,
    "k_cache, v_cache, k_scale and v_scale must be given together, and with them only "
    "kv_dtype, fp8_max, fp8_min, and the block options",
    lambda c: _asks_for_caches(c) and not all(_given(c, *_CACHES)),
    example=arguments(fp8_max=240.0),
)
_row(
    "cache_heads",
    CACHING,
    "caches need {arg.layout} BSD, d_head, num_q_heads and num_kv_heads, got {d_head}, "
    "{num_q_heads} and {num_kv_heads}",
    lambda c: (
        _asks_for_caches(c)
        and (c.layout is not QKVOutputLayout.BSD or not all_given(c))
    ),
    example=_caching(layout="NBSd"),
)
_row(
    "cache_blocks",
    ("qkv", "qkv_cte"),
    "use_block_kv, slot_mapping and block_size must be given together",
    lambda c: (
        len({bool(c.use_block_kv), c.slots is not None, c.block_size is not None}) > 1
    ),
    example=_caching(block_size=4),
)
_row(
    "cache_shape",
    CACHING,
    "k_cache and v_cache must have shape (B, max_seq >= S, num_kv_heads*d_head), B = "
    "{B}, S = {S}, or in blocks (num_blocks, block_size, num_kv_heads*d_head), got "
    "{shape.k_cache} and {shape.v_cache}",
    _cache_shape_is_wrong,
    example=_caching(k_cache=np.zeros((1, 1, 4), jnp.float8_e4m3)),
)
_row(
    "cache_dtype",
    CACHING,
    "k_cache and v_cache must be of the fp8 dtype that kv_dtype names, got "
    "{cache_dtypes}",
    lambda c: c.cache_dtypes,
    example=_caching(kv_dtype="float8_e4m3fn"),
)
_row(
    "cache_limits",
    CACHING,
    "fp8_min and fp8_max must be Python numbers, fp8_min < fp8_max, that the caches' "
    "dtype can hold, got {fp8_min} and {fp8_max}",
    _limits_are_wrong,
    example=_caching(fp8_max=448.0),
)
_row(
    "cache_scale_shape",
    CACHING,
    "k_scale and v_scale must have shape (1, 1) or (128, 1), got {shape.k_scale} and "
    "{shape.v_scale}",
    lambda c: any(
        shape is not None and not _repeats(shape, 1)
        for shape in (c.shape.k_scale, c.shape.v_scale)
    ),
    example=_caching(k_scale=np.ones((4,), np.float32)),
)
_row(
    "slots",
    CACHING,
    "slot_mapping must be integers of shape (B, S) = ({B}, {S}), got {slots_given}",
    lambda c: (
        c.slots is not None
        and (
            c.shape.slots != (c.B, c.S)
            or not jnp.issubdtype(c.slots.dtype, jnp.integer)
        )
    ),
    example=_caching(blocks=True, slots=np.zeros((2,), jnp.int32)),
)
_row(
    "cache_tiles",
    EMITTERS,
    "caches lie in HBM: a call that writes them takes tensors, not tiles",
    lambda c: c.tiled and c.k_cache is not None,
    example=lambda function: {
        name: MemrefTile.from_tensor(x, 2 if name == "hidden" else 0)
        if isinstance(x, jax.Array | np.ndarray)
        else x
        for name, x in _caching()(function).items()
    },
)
