"""The rules of block-scaled QKV calls: one row each."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.contracts import Contract, Size, add
from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import QKVWeightLayout
from neuronjax.primitives.qkv.facts import CACHING, arguments
from neuronjax.primitives.tile import MemrefTile

BLOCK, TILE = 32, 512
_ORDERS = (QKVWeightLayout.MX_CONTIGUOUS, QKVWeightLayout.MX_INTERLEAVED)


def _row(rule: str, message: str, violated, example, **more: Any) -> None:
    more.setdefault("stage", 1)
    text = "{function}: " + message
    name = f"qkv.mx_{rule}"
    add(Contract(name, CACHING, text, violated, example=example, **more))


def _blocks(width: int = TILE, **changes: Any):
    """Arguments of a block-scaled call that keep the rules but for `changes`."""
    given: dict[str, Any] = dict(
        x=np.zeros((1, 2, width), np.float32),
        w=np.zeros((width // 4, 16), jnp.uint32),
        w_scale=np.zeros((width // BLOCK, 16), jnp.uint8),
        quantization_type="MX",
        weight_layout="MX_CONTIGUOUS",
    )
    return arguments(**given | changes)


def _misfit(c: SimpleNamespace) -> bool:
    if not c.is_mx or not c.ranked:
        return False
    scale: Any = getattr(c.w_scale, "dtype", None)
    fits = c.shape.w == (c.H // 4, c.I) and weight_format(c.w) is not None
    return not (fits and scale == jnp.uint8 and c.shape.w_scale == (c.H // BLOCK, c.I))


_row(
    "shapes",
    "MX takes {arg.w} [H/4, I] in uint16 or uint32 and {arg.w_scale} [H/32, I] in "
    "uint8, H = {H}, got {shape.w} and {shape.w_scale}",
    _misfit,
    _blocks(w_scale=np.zeros((16, 16), np.float32)),
)
_row(
    "in_scale",
    "MX scales activations by their own blocks: {arg.in_scale} is for STATIC",
    lambda c: c.is_mx and c.in_scale is not None,
    _blocks(in_scale=np.ones((1, 1), np.float32)),
)
_row(
    "weight_layout",
    "weight_layout must be MX_CONTIGUOUS or MX_INTERLEAVED for MX, CONTIGUOUS for the "
    "others, got {weight_layout}",
    lambda c: (
        c.weight_order not in (_ORDERS if c.is_mx else (QKVWeightLayout.CONTIGUOUS,))
    ),
    _blocks(weight_layout="CONTIGUOUS"),
)
_row(
    "blocks",
    "MX scales blocks of 32 channels: H must be a multiple of 32 for {arg.x}, got "
    "{shape.x}",
    None,
    _blocks(48),
    size=Size("H", lambda c: c.H if c.is_mx else BLOCK, multiple=BLOCK),
)
_row(
    "tiles",
    "MX takes tensors: packed weights lie on their partitions as they are",
    lambda c: c.is_mx and c.tiled,
    lambda function: {
        name: MemrefTile.from_tensor(x, x.ndim - 1 if x.ndim == 3 else 0)
        if isinstance(x, jax.Array | np.ndarray)
        else x
        for name, x in _blocks()(function).items()
    },
)
_row(
    "chip_width",
    "the chip takes H in multiples of 512 for MX, got {shape.x}",
    # No size rule: its multiple would count in the nearest H of every other kind.
    lambda c: c.is_mx and c.H % TILE,
    _blocks(64),
    tag="hw",
    stage=3,
)
add(
    Contract(
        "qkv.mx_chip_tokens",
        ("qkv", "qkv_cte"),
        "{function}: the chip's two cores share an even S of {arg.x} for MX, got "
        "{shape.x}",
        lambda c: c.is_mx and c.prefill and isinstance(c.S, int) and c.S % 2 != 0,
        example=_blocks(x=jax.ShapeDtypeStruct((1, 131, TILE), jnp.float32)),
        tag="hw",
        stage=3,
    )
)
