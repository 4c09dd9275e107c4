"""The rules of quantized experts of a decode step."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.kernels.mx import layout
from neuronjax.primitives.contracts import Size
from neuronjax.primitives.expert_mlps.arguments import (
    ALL,
    BLOCKS,
    arguments,
    block_scaled,
    quantized,
    tiled,
)
from neuronjax.primitives.expert_mlps.facts import EMITTER
from neuronjax.primitives.expert_mlps.rules import row
from neuronjax.primitives.mx.formats import NAMES

_QUANTIZED_HIDDEN: dict[str, Any] = dict(
    hidden=np.zeros((128, 1, 4), np.uint32),
    hidden_scale=np.zeros((16, 1, 4), np.uint8),
)


def _scales(c: SimpleNamespace) -> list[bool]:
    return [x is not None for x in (c.own.gate_up_scale, c.own.down_scale)]


row(
    "scales",
    "quantized weights need both {arg.gate_up_scale} and {arg.down_scale}",
    lambda c: c.kind != "NONE" and not all(_scales(c)),
    example=quantized(down_scale=None),
)
row(
    "idle_scales",
    "{arg.gate_up_scale} and {arg.down_scale} belong to quantized weights",
    lambda c: c.kind == "NONE" and any(_scales(c)),
    example=arguments(down_scale=(3, 8)),
)
row(
    "mx_width",
    "block-scaled weights take {arg.hidden} with H in multiples of 512, got "
    "{hidden_width}",
    # Named apart: its multiple does not count in the nearest H of other weights.
    size=Size(
        "H (MX)", lambda c: c.hidden_width if c.is_mx else layout.TILE, layout.TILE
    ),
    example=block_scaled(hidden=(4, 384)),
)
row(
    "mx_hidden",
    "{arg.hidden} must be as wide as block-scaled weights are deep, {H}, got "
    "{hidden_width}",
    lambda c: c.is_mx and c.hidden_width != c.H,
    example=block_scaled(hidden=(4, 1024)),
)
row(
    "mx_format",
    f"weight_dtype must be one of {NAMES}, or None for uint16 and uint32 containers, "
    "got {own.weight_dtype}",
    lambda c: c.is_mx and c.mx_format is None,
    example=block_scaled(weight_dtype="float6"),
)
row(
    "mx_container",
    "{arg.gate_up_w} and {arg.down_w} must be in the container of their format",
    lambda c: (
        c.is_mx
        and c.mx_format is not None
        and str(c.own.gate_up_w.dtype) != c.mx_format.container
    ),
    example=block_scaled(weight_dtype="float8_e5m2"),
)
row(
    "weight_dtype",
    "weight_dtype is for block-scaled weights, got {own.weight_dtype}",
    lambda c: not c.is_mx and c.own.weight_dtype is not None,
    example=arguments(weight_dtype="float8_e5m2"),
)
row(
    "mx_tiles",
    "block-scaled weights come as tensors: packed, they lie on partitions as they are",
    lambda c: c.is_mx and c.tiled,
    functions=(EMITTER,),
    example=tiled(**BLOCKS),
)
row(
    "hidden_scale",
    "a quantized {arg.hidden} is for block-scaled weights with {arg.all_experts}",
    lambda c: c.own.hidden_scale is not None and not (c.is_mx and c.own.all_experts),
    example=block_scaled(**_QUANTIZED_HIDDEN),
)
row(
    "hidden_output",
    "a quantized {arg.hidden} leaves the dtype of the result open: give "
    "{arg.out_dtype}",
    lambda c: c.own.hidden_scale is not None and c.own.out_dtype is None,
    example=block_scaled(
        **(_QUANTIZED_HIDDEN | ALL | dict(rank=np.zeros((1, 1), np.int32)))
    ),
)
