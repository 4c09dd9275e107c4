"""Arguments of blockwise expert calls that keep the rules: the rules' examples."""

from collections.abc import Callable
from typing import Any

import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.blockwise_mm.facts import (
    ARGUMENTS,
    BWD,
    CTE,
    INTEGERS,
    KERNEL_BWD,
)
from neuronjax.primitives.blockwise_mm.spec import QuantizationConfig

_SCALES = ("gate_up_scale", "down_scale")
_SHAPES: dict[str, Any] = dict(
    hidden=(4, 8),
    affinity=(8, 1),
    gate_up_w=(2, 8, 2, 6),
    down_w=(2, 6, 8),
    token_id=np.asarray([0, 2, 1, 3, 3, 3], np.int32),
    block_expert=np.asarray([0, 1, 1], np.int32),
)
_STORED: dict[str, Any] = dict(gate_up=(3, 2, 6, 2), down=(3, 2, 8), d_out=(4, 8))
_MX: dict[str, Any] = dict(
    hidden=(4, 512),
    affinity=(4, 1),
    gate_up_w=np.zeros((1, 128, 2, 1, 32), np.uint16),
    down_w=np.zeros((1, 8, 1, 512), np.uint16),
    block_expert=np.zeros(3, np.int32),
    gate_up_scale=np.zeros((1, 16, 2, 1, 32), np.uint8),
    down_scale=np.zeros((1, 1, 1, 512), np.uint8),
)
Build = Callable[[str], dict[str, Any]]


def arguments(**changes: Any) -> Build:
    """Arguments that keep the rules but for `changes`, by role or by name.

    A tuple is a shape of zeros; None leaves an operand out.
    """

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(_SHAPES, block_size=2)
        if function == CTE:
            given |= dict(spec="shard_on_i")
        if function in (BWD, KERNEL_BWD):
            given |= _STORED
        return _named(function, given | changes)

    return build


def quantized(**changes: Any) -> Build:
    """The same with weights of fp8 and their scales."""
    fp8 = dict(
        gate_up_w=np.zeros((2, 8, 2, 6), E4M3),
        down_w=np.zeros((2, 6, 8), E4M3),
        gate_up_scale=(2, 1, 12),
        down_scale=(2, 1, 8),
    )

    def build(function: str) -> dict[str, Any]:
        kind = {} if function == CTE else dict(quantization="ROW")
        return arguments(**(fp8 | kind | changes))(function)

    return build


def block_scaled(**changes: Any) -> Build:
    """The same with block-scaled weights."""

    def build(function: str) -> dict[str, Any]:
        kind: dict[str, Any] = dict(quantization="MX")
        if function == CTE:
            kind = dict(spec="shard_on_i_mx")
        if function == KERNEL_BWD:
            kind |= dict(gate_up=(3, 2, 32, 2), down=(3, 2, 512), d_out=(4, 512))
        return arguments(**(_MX | kind | changes))(function)

    return build


def _named(function: str, given: dict[str, Any]) -> dict[str, Any]:
    arrays = {key: _array(key, x) for key, x in given.items()}
    if function == CTE and not {*_SCALES, "weight_dtype"}.isdisjoint(arrays):
        gate_up, down = (arrays.pop(key, None) for key in _SCALES)
        config = QuantizationConfig(gate_up, down, arrays.pop("weight_dtype", None))
        arrays.setdefault("quantization_config", config)
    names = ARGUMENTS[function]
    return {names.get(key, key): x for key, x in arrays.items()}


def _array(key: str, x: Any) -> Any:
    kind = np.int32 if key in INTEGERS else np.float32
    is_shape = type(x) is tuple and all(isinstance(size, int) for size in x)
    return np.zeros(x, kind) if is_shape else x
