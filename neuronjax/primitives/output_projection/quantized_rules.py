"""The rules of quantized output projections: which kinds, and their scales."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3FN, is_fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.options import QuantizationType
from neuronjax.primitives.output_projection.rules import (
    ALL,
    DECODE,
    EMITTER,
    PREFILL,
    SCALES,
    given_arguments,
)
from neuronjax.primitives.tile import PARTITIONS

_DIVIDING = ("STATIC", "STATIC_MX")
# Block scales have shapes of their own.
_SCALED = ("ROW", *_DIVIDING)


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage = kwargs.pop("stage", 2)
    rule, text = f"output_projection.{rule}", "{function}: " + message
    contracts.add(Contract(rule, functions, text, *args, stage=stage, **kwargs))


def _is(c: SimpleNamespace, *kinds: str) -> bool:
    return c.quantization in [QuantizationType[kind] for kind in kinds]


def _shapes(c: SimpleNamespace) -> list[Any]:
    return [getattr(scale, "shape", None) for scale in c.scales.values()]


def _odd_shapes(c: SimpleNamespace) -> bool:
    if not _is(c, *_SCALED):
        return False
    columns = (c.H if _is(c, "ROW") else 1, 1)
    return any(
        shape is not None and shape not in ((1, n), (PARTITIONS, n))
        for shape, n in zip(_shapes(c), columns, strict=True)
    )


def _given_shapes(c: SimpleNamespace) -> str:
    given = [shape for shape in _shapes(c) if shape is not None]
    return " and ".join(map(str, given))


def _missing(c: SimpleNamespace) -> bool:
    if _is(c, "MX"):
        return False
    given = [scale is not None for scale in c.scales.values()]
    return given != [_is(c, *_SCALED), _is(c, *_DIVIDING)]


def _other_dtypes(c: SimpleNamespace) -> bool:
    scales = [scale for scale in c.scales.values() if scale is not None]
    dtypes = [getattr(scale, "dtype", None) for scale in scales]
    return not _is(c, "MX") and any(dtype != jnp.float32 for dtype in dtypes)


def _quantized(kind: str, **changes: Any):
    """Arguments of a quantized call that keep the rules but for `changes`."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(
            quantization_type=kind,
            weight=np.zeros((8, 6), E4M3FN),
            weight_scale=np.ones((1, 6 if kind == "ROW" else 1), np.float32),
        )
        if kind != "ROW":
            given["input_scale"] = np.ones((1, 1), np.float32)
        given |= changes
        names: dict[str, str] = dict(
            zip(SCALES[EMITTER], SCALES[function], strict=True)
        )
        given = {names.get(key, key): x for key, x in given.items() if x is not None}
        return given_arguments(**given)(function)

    return build


_row(
    "decode_kind",
    (DECODE, EMITTER),
    "quantization_type must be NONE, STATIC or ROW in decode, got {quantization.name}",
    lambda c: c.form == "DBNS" and _is(c, "MX", "STATIC_MX"),
    example=lambda function: _quantized(
        "STATIC_MX", **({"form": "DBNS"} if function == EMITTER else {})
    )(function),
    stage=1,
)
_row(
    "row_mx",
    ALL,
    "quantization_type ROW_MX is taken by no output projection; ROW is the nearest",
    lambda c: _is(c, "ROW_MX"),
    example=given_arguments(quantization_type="ROW_MX"),
    stage=1,
)
_row(
    "scale_dtype",
    ALL,
    "{scale_names[0]} and {scale_names[1]} must be float32, got {scale_kinds}",
    _other_dtypes,
    example=_quantized("ROW", weight_scale=np.ones((1, 6), jnp.bfloat16)),
    stage=1,
)
_row(
    "scales",
    ALL,
    "{scale_names[0]} must be given exactly for quantization_type STATIC, STATIC_MX "
    "and ROW, {scale_names[1]} exactly for STATIC and STATIC_MX, got "
    "{quantization.name}",
    _missing,
    example=_quantized("ROW", weight_scale=None),
)
_row(
    "scale_shape",
    ALL,
    "{scale_names[0]} must have shape (1, 1) or (128, 1), for ROW (1, H) or (128, H), "
    "H = {H}, and {scale_names[1]} (1, 1) or (128, 1), got {scale_shapes}",
    lambda c: _odd_shapes(c) and told("scale_shapes", _given_shapes)(c),
    example=_quantized("ROW", weight_scale=np.ones((6,), np.float32)),
)
_row(
    "mx_weight",
    (PREFILL, EMITTER),
    "an fp8 weight of STATIC_MX must be float8_e4m3fn, got {weight.dtype}",
    lambda c: (
        _is(c, "STATIC_MX") and is_fp8(c.weight.dtype) and c.weight.dtype != E4M3FN
    ),
    example=_quantized("STATIC_MX", weight=np.zeros((8, 6), jnp.float8_e4m3)),
)
_row(
    "mx_rows",
    (PREFILL, EMITTER),
    "STATIC_MX interleaves fours of rows: N*D must be a multiple of 4, got {N}*{D}",
    lambda c: _is(c, "STATIC_MX") and c.N * c.D % 4,
    example=_quantized(
        "STATIC_MX", attention=(1, 2, 3, 3), weight=np.zeros((6, 6), E4M3FN)
    ),
)
_row(
    "chip_row",
    (PREFILL,),
    "the chip's prefill path has no quantization_type ROW",
    lambda c: _is(c, "ROW"),
    example=_quantized("ROW"),
    tag="hw",
)
_row(
    "chip_mx_weight",
    (PREFILL,),
    "the chip takes a float8_e4m3fn weight for STATIC_MX, got {weight.dtype}",
    lambda c: _is(c, "STATIC_MX") and not is_fp8(c.weight.dtype),
    example=_quantized("STATIC_MX", weight=np.zeros((8, 6), np.float32)),
    tag="hw",
)
_row(
    "chip_static_heads",
    (PREFILL, DECODE),
    "the chip takes an even N or D for STATIC with an fp8 weight, got {N} and {D}",
    lambda c: _is(c, "STATIC") and is_fp8(c.weight.dtype) and c.N % 2 and c.D % 2,
    example=_quantized(
        "STATIC", attention=(1, 1, 3, 3), weight=np.zeros((3, 6), E4M3FN)
    ),
    tag="hw",
)
