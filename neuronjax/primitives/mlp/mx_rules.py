"""The rules of block-scaled MLP calls: one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.contracts import Contract, Size, add
from neuronjax.primitives.mlp.facts import ARGUMENTS, QUANTIZED
from neuronjax.primitives.mx.formats import NAMES
from neuronjax.primitives.tile import MemrefTile

_CALLS = ("mlp", *QUANTIZED)
_WEIGHTS = ("_w", "weights_tensor")


def _row(rule: str, message: str, violated, example, functions=_CALLS, **more) -> None:
    more.setdefault("stage", 2)
    text = "{function}: " + message
    add(Contract(f"mlp.mx_{rule}", functions, text, violated, example=example, **more))


def block_scaled(d_ff: int = 32, **changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments of a block-scaled call that keep the rules but for `changes`."""

    def build(function: str) -> dict[str, Any]:
        names, p, tiles = ARGUMENTS[function], d_ff // 4 if d_ff < 512 else 128, 1
        tiles = -(-d_ff // 512)
        codes, scales = jnp.uint16, jnp.uint8
        up, scale = np.zeros((128, 1, d_ff), codes), np.zeros((16, 1, d_ff), scales)
        given: dict[str, Any] = dict(
            hidden=np.zeros((1, 2, 512), np.float32),
            gate_w=up,
            up_w=up,
            down_w=np.zeros((p, tiles, 512), codes),
            down_w_scale=np.zeros((p // 8, tiles, 512), scales),
            norm="NO_NORM",
            quantization="MX",
        )
        if function == "mlp":
            given |= dict(gate_w_scale=scale, up_w_scale=scale)
        else:
            given |= dict(gate_up_w_scale=np.stack([scale, scale]))
        given |= changes
        return {names.get(key, key): x for key, x in given.items()}

    return build


def _missing(c: SimpleNamespace) -> bool:
    pair = ("up_w_scale",) if c.skip else ("gate_w_scale", "up_w_scale")
    needed = pair if c.function == "mlp" else ("gate_up_w_scale",)
    return any(getattr(c, key) is None for key in (*needed, "down_w_scale"))


_row(
    "scales",
    "MX needs a uint8 scale for every weight, and none for activations",
    lambda c: (
        c.is_mx
        and (
            _missing(c) or c.gate_up_in_scale is not None or c.down_in_scale is not None
        )
    ),
    block_scaled(down_w_scale=None),
    stage=1,
)
_row(
    "format",
    f"weight_dtype must be one of {NAMES}, or None for uint16 and uint32 containers, "
    "{mx_format}",
    lambda c: c.mx_format,
    block_scaled(weight_dtype="float6"),
    stage=1,
)
_row(
    "weight_dtype",
    "weight_dtype is for MX, got {kind_name}",
    lambda c: not c.is_mx and c.weight_dtype is not None,
    lambda function: (
        block_scaled(weight_dtype="float8_e5m2", quantization="NONE")(function)
        if function == "mlp"
        else block_scaled(weight_dtype="float8_e5m2", quantization="ROW")(function)
    ),
    stage=1,
)
_row(
    "shapes",
    "packed operands must fit {arg.up_w} [128, H/512, I]: {mx_unlike}",
    lambda c: c.mx_unlike,
    block_scaled(down_w=np.zeros((8, 2, 512), jnp.uint16)),
    stage=1,
)
_row(
    "width",
    "MX takes H in multiples of 512 for {arg.hidden}, got {shape.hidden}",
    None,
    block_scaled(hidden=np.zeros((1, 2, 500), np.float32)),
    # Named apart: its multiple does not count in the nearest H of other weights.
    size=Size("H (MX)", lambda c: c.mx_width, multiple=512),
    stage=1,
)
_row(
    "d_ff",
    "MX takes I below 512 in multiples of 32, got {mx_d_ff}",
    None,
    block_scaled(48),
    size=Size(
        "I (MX)", lambda c: min(c.mx_d_ff, 512), multiple=32, minimum=32, maximum=512
    ),
    stage=1,
)
_row(
    "d_ff_tiles",
    "MX takes I from 512 on in multiples of 512, got {mx_d_ff}",
    None,
    block_scaled(544),
    size=Size("I (MX, tiles)", lambda c: max(c.mx_d_ff, 512), multiple=512),
    stage=1,
)
_row(
    "addition",
    "MX takes no fused add",
    lambda c: c.is_mx and (c.addend is not None or c.residual is not None),
    lambda function: (
        block_scaled(addend=np.zeros((1, 2, 512), np.float32))(function)
        if "mlp_out" not in ARGUMENTS[function].values()
        else block_scaled(
            residual=np.zeros((1, 2, 512), np.float32),
            mlp_out=np.zeros((1, 2, 512), np.float32),
        )(function)
    ),
)
_row(
    "hidden",
    "MX takes {arg.hidden} of bfloat16, float16, float32 or float64, got {mx_hidden}",
    lambda c: c.is_mx and c.mx_hidden,
    block_scaled(hidden=np.zeros((1, 2, 512), jnp.float8_e4m3)),
    stage=1,
)
_row(
    "tiles",
    "MX takes tensors: packed weights lie on their partitions as they are",
    lambda c: c.is_mx and c.tiled,
    lambda function: {
        key: MemrefTile.from_tensor(x, 0 if key.endswith(_WEIGHTS) else x.ndim - 1)
        if isinstance(x, jax.Array | np.ndarray)
        else x
        for key, x in block_scaled()(function).items()
    },
    stage=1,
)
_row(
    "layout",
    "use_tkg_down_proj_optimized_layout is for unpacked weights, not for MX",
    lambda c: c.is_mx and c.use_tkg_down_proj_optimized_layout,
    block_scaled(use_tkg_down_proj_optimized_layout=True),
    functions=("mlp",),
    stage=1,
)
_row(
    "chip_decode",
    "the chip takes MX on its decode path only (B * S <= 96, no force_cte_mode)",
    lambda c: c.is_mx and c.prefill is not False,
    block_scaled(hidden=np.zeros((1, 97, 512), np.float32)),
    tag="hw",
    stage=3,
)
_row(
    "chip_tiling",
    "the chip takes MX without column tiling: both use_tkg flags False",
    lambda c: (
        c.is_mx
        and (c.use_tkg_gate_up_proj_column_tiling or c.use_tkg_down_proj_column_tiling)
    ),
    block_scaled(),
    functions=("mlp",),
    tag="hw",
    stage=3,
)
