"""The rules of calls that quantize to MX blocks and back, one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.mx import layout
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.mx.formats import NAMES, format_of
from neuronjax.primitives.tile import PARTITIONS

# The array of each function that takes a matrix of values.
MATRIX = dict(
    quantize_to_mx="data",
    quantize_mx="src",
    pack_mx="values",
    quantize_mx_weight="weight",
    mxfp_load_performance_wrapper="tensor",
)
PACKED = ("dequantize_mx", "unpack_mx")
FORMATTED = ("quantize_to_mx", "quantize_mx", "pack_mx", "quantize_mx_weight", *PACKED)
ORDERS = (layout.HIDDEN, layout.INTERMEDIATE, layout.CONTIGUOUS, layout.INTERLEAVED)
# What `K` of a weight is a multiple of.
_STEPS = dict(hidden=512, intermediate=1, contiguous=32, interleaved=32)


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _named(call: SimpleNamespace) -> Any:
    return getattr(call, "out_x4_dtype", getattr(call, "x4_dtype", None))


def matrix_facts(argument: str) -> Callable[[SimpleNamespace], dict[str, Any]]:
    """What the rules read of a matrix of values."""

    def read(call: SimpleNamespace) -> dict[str, Any]:
        x = getattr(call, argument)
        shape = tuple(getattr(x, "shape", ()))
        p, f = shape if len(shape) == 2 else (0, 0)
        found = dict(argument=argument, shape=shape, ranked=len(shape) == 2, P=p, F=f)
        dtype = getattr(x, "dtype", None)
        return found | dict(
            floats=_is_float(x),
            dtype=dtype,
            named=_named(call),
            kind=format_of(_named(call)),
        )

    return read


load_facts = matrix_facts("tensor")


def weight_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a weight."""
    return matrix_facts("weight")(call) | dict(step=_STEPS.get(str(call.order), 1))


def packed_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of packed codes and their scales."""
    shape, kind = tuple(getattr(call.packed, "shape", ())), format_of(call.x4_dtype)
    scale = getattr(call, "scale", None)
    p, f = shape if len(shape) == 2 else (0, 0)
    return dict(
        argument="packed",
        shape=shape,
        ranked=len(shape) == 2,
        P=p,
        F=f,
        kind=kind,
        named=call.x4_dtype,
        dtype=getattr(call.packed, "dtype", None),
        container="" if kind is None else kind.container,
        scale_shape=tuple(getattr(scale, "shape", ())),
        scale_dtype=getattr(scale, "dtype", None),
    )


def _values(*shape: int, dtype: Any = np.float32, **changes: Any):
    """Arguments that keep the rules, but for the matrix's shape and `changes`."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = {MATRIX[function]: np.zeros(shape or (32, 4), dtype)}
        if function == "quantize_mx_weight":
            given["order"] = "contiguous"
        if function == "mxfp_load_performance_wrapper" and not shape:
            given["tensor"] = np.zeros((128, 512), dtype)
        return given | changes

    return build


def _codes(shape=(8, 2), scale=(1, 2), dtype: Any = np.uint32, **changes: Any):
    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(packed=np.zeros(shape, dtype))
        if function == "dequantize_mx":
            given["scale"] = np.zeros(scale, np.uint8)
        return given | changes

    return build


def _either(function: str) -> dict[str, Any]:
    build = _codes() if function in PACKED else _values()
    name = "out_x4_dtype" if function in MATRIX and function[-2:] == "mx" else ""
    name = "x4_dtype" if function not in ("quantize_to_mx", "quantize_mx") else name
    return build(function) | {name: "float6"}


def _row(rule: str, functions, message: str, violated=None, **kwargs: Any) -> None:
    kwargs.setdefault("stage", 2)
    text = "{function}: " + message
    contracts.add(Contract(f"mx.{rule}", tuple(functions), text, violated, **kwargs))


contracts.add(*only_flags("quantize_mx_weight"))
_row(
    "matrix",
    MATRIX,
    "{argument} must be a matrix of floating dtype, got {shape} of {dtype}",
    lambda c: not (c.ranked and c.floats),
    example=_values(8),
    stage=1,
)
_row(
    "format",
    FORMATTED,
    f"the packed dtype must be one of {NAMES}, got {{named!r}}",
    lambda c: c.kind is None,
    example=_either,
    stage=1,
)
_row(
    "hardware_format",
    ("quantize_mx",),
    "out_x4_dtype must have 8 bits: the chip quantizes to no float4, got "
    "{out_x4_dtype}",
    lambda c: c.kind is not None and c.kind.bits != 8,
    example=_values(out_x4_dtype="float4_e2m1fn_x4"),
)
_row(
    "rows",
    ("quantize_to_mx",),
    "P of data must be a multiple of 8, the rows of a block, got {shape}",
    size=Size("P", lambda c: c.P, multiple=8),
    example=_values(12, 4),
)
_row(
    "quadrants",
    ("quantize_mx",),
    "P of src must be a multiple of 32, whose scales lie together, got {shape}",
    size=Size("P", lambda c: c.P, multiple=32),
    example=_values(8, 4),
)
_row(
    "partitions",
    ("quantize_mx",),
    "the chip takes P up to 128 for src, got {shape}",
    size=Size("P", lambda c: c.P, maximum=PARTITIONS),
    example=_values(160, 4),
    tag="hw",
)
_row(
    "columns",
    ("quantize_to_mx", "quantize_mx", "pack_mx"),
    "F of {argument} must be a multiple of 4, a container's elements, got {shape}",
    size=Size("F", lambda c: c.F, multiple=4),
    example=_values(32, 6),
)
_row(
    "codes",
    PACKED,
    "packed must be a matrix of {container}, got {shape} of {dtype}",
    lambda c: c.kind is not None and not (c.ranked and c.dtype == c.container),
    example=_codes(dtype=np.uint16),
    stage=1,
)
_row(
    "scales",
    ("dequantize_mx",),
    "scale must be uint8 of shape [P/8, F/4], P a multiple of 8, got {scale_shape} of "
    "{scale_dtype} for packed {shape}",
    lambda c: (c.P % 8, c.scale_dtype, c.scale_shape) != (0, np.uint8, (c.P // 8, c.F)),
    example=_codes(scale=(8, 2)),
)
_row(
    "order",
    ("quantize_mx_weight",),
    f"order must be one of {', '.join(ORDERS)}, got {{order}}",
    lambda c: c.order not in ORDERS,
    example=_values(order="natural"),
    stage=1,
)
_row(
    "weight_rows",
    ("quantize_mx_weight",),
    "K of weight must be a positive multiple of {step} for order {order}, got {shape}",
    lambda c: c.P < 1 or c.P % c.step != 0 or c.F < 1,
    example=_values(12, 4),
)
_row(
    "load",
    ("mxfp_load_performance_wrapper",),
    "M of tensor [M, K] must be 128, got {shape}",
    size=Size("M", lambda c: c.P, multiple=PARTITIONS, maximum=PARTITIONS),
    example=_values(64, 512),
)
_row(
    "load_columns",
    ("mxfp_load_performance_wrapper",),
    "K of tensor [M, K] must be a multiple of 512, got {shape}",
    size=Size("K", lambda c: c.F, multiple=512),
    example=_values(128, 256),
)
