"""Arguments of a decode step's experts that keep the rules: the rules' examples."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.expert_mlps.operands import TILE_AXES, Operands
from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.expert_mlps.facts import ARGUMENTS
from neuronjax.primitives.tile import MemrefTile

_ROW: dict[str, Any] = dict(
    hidden=(4, 8),
    gate_up_w=(3, 8, 2, 6),
    down_w=(3, 6, 8),
    affinities=(4, 3),
    index=np.zeros((4, 2), np.int32),
    scaling="POST_SCALE",
    all_experts=False,
)
_FP8: dict[str, Any] = dict(
    gate_up_w=np.zeros((3, 8, 2, 6), E4M3),
    down_w=np.zeros((3, 6, 8), E4M3),
    gate_up_scale=(3, 2, 6),
    down_scale=(3, 8),
)
BLOCKS: dict[str, Any] = dict(
    hidden=(4, 512),
    gate_up_w=np.zeros((1, 128, 2, 1, 32), np.uint16),
    down_w=np.zeros((1, 8, 1, 512), np.uint16),
    affinities=(4, 1),
    gate_up_scale=np.zeros((1, 16, 2, 1, 32), np.uint8),
    down_scale=np.zeros((1, 1, 1, 512), np.uint8),
)
# All experts, of which the three local ones are the second half.
ALL: dict[str, Any] = dict(
    all_experts=True, affinities=(4, 6), rank=np.ones((1, 1), np.int32)
)
Build = Callable[[str], dict[str, Any]]


def arguments(**changes: Any) -> Build:
    """Arguments that keep the rules but for `changes`, by their own names.

    A tuple is a shape of zeros; None leaves an operand out.
    """

    def build(function: str) -> dict[str, Any]:
        found, names = _ROW | changes, ARGUMENTS[function]
        return {names.get(key, key): _array(x) for key, x in found.items()}

    return build


def tiled(**changes: Any) -> Build:
    """The same on tiles."""

    def build(function: str) -> dict[str, Any]:
        own = {name: key for key, name in ARGUMENTS[function].items()}
        given = arguments(**changes)(function)
        return {name: _tile(own[name], x) for name, x in given.items()}

    return build


def quantized(**changes: Any) -> Build:
    """The same with fp8 weights and their scales."""
    return arguments(**(_FP8 | changes))


def block_scaled(**changes: Any) -> Build:
    """The same with block-scaled weights."""
    return arguments(**(BLOCKS | changes))


def _array(x: Any) -> Any:
    is_shape = type(x) is tuple and all(isinstance(size, int) for size in x)
    return np.zeros(x, np.float32) if is_shape else x


def _tile(key: str, x: Any) -> Any:
    if key not in Operands._fields or not hasattr(x, "shape"):
        return x
    return MemrefTile.from_tensor(jnp.asarray(x), TILE_AXES[key])
