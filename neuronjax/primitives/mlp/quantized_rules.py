"""The rules of quantized MLP calls: one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.contracts import Contract, add
from neuronjax.primitives.mlp.facts import QUANTIZED, arguments
from neuronjax.primitives.options import NormType, QuantizationType
from neuronjax.primitives.tile import PARTITIONS

_CALLS = ("mlp", *QUANTIZED)
_PADDED = 512
_KINDS = (QuantizationType.ROW, QuantizationType.STATIC, QuantizationType.MX)


def _row(rule: str, message: str, violated, example, functions=_CALLS, **more) -> None:
    more.setdefault("stage", 1)
    text = "{function}: " + message
    add(Contract(f"mlp.{rule}", functions, text, violated, example=example, **more))


def quantized(
    kind: str = "ROW", tiles: bool = False, **changes: Any
) -> Callable[[str], dict[str, Any]]:
    """Arguments of a quantized call that keep the rules but for `changes`."""

    def build(function: str) -> dict[str, Any]:
        is_row, first = kind == "ROW", PARTITIONS if function == "mlp" else 1
        d_model, d_ff = (512, 512) if kind == "STATIC_MX" else (8, 6)
        columns, rows = (d_ff, d_model) if is_row else (1, 1)
        given: dict[str, Any] = dict(quantization=kind, down_w_scale=(first, rows))
        if function == "mlp":
            scales = dict.fromkeys(("gate_w_scale", "up_w_scale"), (first, columns))
        else:
            scales = dict(gate_up_w_scale=(2, columns))
        if not is_row:
            scales |= dict.fromkeys(("gate_up_in_scale", "down_in_scale"), (first, 1))
        if kind == "STATIC_MX":
            given |= dict(gate_w=(d_model, d_ff), up_w=(d_model, d_ff))
            given |= dict(hidden=(1, 97, d_model), down_w=(d_ff, d_model))
        return arguments(tiles, **(given | scales | changes))(function)

    return build


def _codes(*shape: int) -> Any:
    return np.zeros(shape, E4M3)


_row(
    "row_mx",
    "quantization_type ROW_MX is taken by no path; ROW and MX are two types",
    lambda c: c.quantization is QuantizationType.ROW_MX,
    arguments(quantization="ROW_MX"),
    functions=("mlp",),
)
_row(
    "quant_type",
    "quant_type must be ROW, STATIC or MX, got {quant_type}",
    lambda c: c.quantization not in _KINDS,
    lambda function: arguments()(function) | dict(quant_type="NONE"),
    functions=QUANTIZED,
)
_row(
    "narrow",
    "{quantization.name} takes weights of float8_e4m3 or float8_e4m3fn and "
    "{arg.hidden} of a float dtype or float8_e4m3, got {narrow}",
    lambda c: c.scaled and c.narrow,
    quantized(up_w=np.zeros((8, 6), jnp.int8)),
)
_row(
    "scales",
    "{quantization.name} needs {missing_scales}",
    lambda c: c.scaled and c.missing_scales,
    quantized(down_w_scale=None),
)
_row(
    "idle_scales",
    "{idle_scales} has no use with these weights",
    lambda c: c.idle_scales,
    lambda function: (
        arguments(gate_w_scale=(PARTITIONS, 6))(function)
        if function == "mlp"
        else quantized(down_in_scale=(1, 1))(function)
    ),
)
_row(
    "scale_shapes",
    "scales must be float32 of the shapes that belong to {quantization.name}: "
    "{unlike_scales}",
    lambda c: c.unlike_scales,
    quantized(down_w_scale=(1, 7)),
    stage=2,
)


def _is_bound(value: Any) -> bool:
    try:
        return float(value) >= 0  # a NaN is none
    except (TypeError, ValueError):
        return False


def _negative(c: SimpleNamespace) -> bool:
    return not _is_bound(c.quant_clipping_bound)


_row(
    "clipping_bound",
    "quant_clipping_bound must be a Python number of at least 0, got "
    "{quant_clipping_bound}",
    _negative,
    quantized(quant_clipping_bound=-1.0),
)
_row(
    "clipping",
    "quant_clipping_bound clips in front of ROW's scales alone, not with {kind_name}",
    lambda c: not _negative(c) and c.quant_clipping_bound and not c.is_row,
    quantized("STATIC", quant_clipping_bound=1.0),
    stage=2,
)
_row(
    "activation_bound",
    "activation_clipping_bound must be a Python number of at least 0, got "
    "{activation_clipping_bound}",
    lambda c: not _is_bound(c.activation_clipping_bound),
    quantized(activation_clipping_bound=-1.0),
    functions=QUANTIZED,
)
_row(
    "activation_clipping",
    "activation_clipping_bound clips what ROW's weights meet in decode, not in prefill "
    "and not with {kind_name}",
    lambda c: (
        _is_bound(c.activation_clipping_bound)
        and c.activation_clipping_bound
        and (c.prefill or not c.is_row)
    ),
    quantized(activation_clipping_bound=1.0, force_cte_mode=True),
    functions=QUANTIZED,
    stage=2,
)
_row(
    "both_modes",
    "force_cte_mode and force_tkg_mode exclude each other",
    lambda c: c.force_cte_mode and c.force_tkg_mode,
    quantized(force_cte_mode=True, force_tkg_mode=True),
    functions=QUANTIZED,
)
_row(
    "rows_known",
    "decode and prefill differ for quantized weights, and the rows of {arg.hidden} "
    "are not known: force_cte_mode=True takes prefill",
    lambda c: c.scaled and c.prefill is None,
    lambda function: quantized(hidden=_symbolic())(function),
    stage=2,
)


def _symbolic() -> Any:
    (rows,) = export.symbolic_shape("b")
    return jax.ShapeDtypeStruct((rows, 1, 8), jnp.float32)


_row(
    "packed",
    "{arg.hidden} of float8_e4m3 must be packed for ROW, [.., H + 4]: a row's codes "
    "and the four bytes of its scale, H the rows of {arg.up_w}; decode (B * S <= 96, "
    "no force_cte_mode) takes no float8_e4m3; got {shape.hidden} and {shape.up_w}",
    lambda c: c.packed and c.ranked and c.width != c.shape.up_w[0],
    quantized(hidden=_codes(1, 97, 8)),
)
_row(
    "fp8_decode",
    "decode (B * S <= 96, no force_cte_mode) quantizes no activation: {arg.hidden} "
    "must have a float dtype, got float8_e4m3",
    lambda c: c.scaled and c.fp8_rows and c.prefill is False,
    quantized("STATIC", hidden=_codes(1, 2, 8)),
    stage=2,
)
_row(
    "fp8_norm",
    "a quantized {arg.hidden} takes no norm and no addition in front",
    lambda c: (
        c.scaled
        and c.fp8_rows
        and (c.norm_kind is not NormType.NO_NORM or c.addend is not None)
    ),
    quantized("STATIC", hidden=_codes(1, 97, 8), norm="RMS_NORM_SKIP_GAMMA"),
    stage=2,
)
_row(
    "fp8_output",
    "a quantized {arg.hidden} leaves the dtype of the result open: give {result_dtype}",
    lambda c: c.scaled and c.fp8_rows and c.out is None,
    quantized("STATIC", hidden=_codes(1, 97, 8)),
    stage=2,
)
_row(
    "packed_tiles",
    "packed rows of {arg.hidden} come as tensors: the scale has no partition",
    lambda c: c.packed and c.tiled,
    quantized(tiles=True, hidden=_codes(1, 97, 12)),
    stage=2,
)
_row(
    "static_mx_decode",
    "STATIC_MX is a prefill layout (B * S > 96, or force_cte_mode)",
    lambda c: c.quantization is QuantizationType.STATIC_MX and c.prefill is False,
    quantized("STATIC_MX", hidden=(1, 2, 512)),
    functions=("mlp",),
    stage=2,
)
_row(
    "static_mx_sizes",
    "STATIC_MX takes H and I in multiples of 512, got {shape.up_w}",
    lambda c: (
        c.quantization is QuantizationType.STATIC_MX
        and any(size % _PADDED for size in c.shape.up_w)
    ),
    quantized("STATIC_MX", gate_w=(512, 6), up_w=(512, 6), down_w=(6, 512)),
    functions=("mlp",),
    stage=2,
)
_row(
    "public_tiles",
    "quantized tiles go to neuronjax.emit.quant_mlp_kernel",
    lambda c: c.scaled and c.tiled,
    quantized(tiles=True),
    functions=("mlp",),
    stage=2,
)
