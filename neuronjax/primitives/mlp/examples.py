"""Small operands of each NAME, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.mlp import plain
from neuronjax.kernels.mlp.operands import Operands, live_operands
from neuronjax.kernels.mx.formats import E2M1FN
from neuronjax.kernels.mx.layout import HIDDEN, INTERMEDIATE, pack_weight
from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.macro import Example
from neuronjax.primitives.mlp.facts import TILE_AXES
from neuronjax.primitives.mlp.names import (
    BACKWARD,
    BLOCK_SCALED,
    ROW_FP8,
    STATIC_PREFILL,
    TILED,
    UNTILED,
)

VARIANTS = (ROW_FP8, STATIC_PREFILL, BLOCK_SCALED)

_SHAPES = dict(gate_w=(8, 6), up_w=(8, 6), down_w=(6, 8), gamma=(1, 8), beta=(1, 8))
_SHAPES |= dict(gate_b=(1, 6), up_b=(1, 6), down_b=(1, 8))
_TILE = {8: (4, 2), 6: (3, 2)}


def example(name: str, dtype: Any, batch: int) -> Example:
    """RMSNorm and a stored prologue, or for tiles LayerNorm and a residual."""
    if name == BLOCK_SCALED:
        return _block_scaled(dtype, batch)
    if name in VARIANTS:
        return _quantized(name, dtype, batch)
    is_tiled = name == TILED
    rows = dict.fromkeys(
        ("hidden", "residual" if is_tiled else "addend"), (batch, 3, 8)
    )
    shapes = {k: v for k, v in _SHAPES.items() if k != "beta" or is_tiled} | rows
    keys = iter(jax.random.split(jax.random.key(7), 32))
    made = {k: jax.random.normal(next(keys), v, dtype) for k, v in shapes.items()}
    made = {k: x if k in rows else x / 2 for k, x in made.items()}
    if is_tiled:
        made = {k: _tile(x, TILE_AXES[k]) for k, x in made.items()}
    operands: tuple[Any, ...] = tuple(made.get(key) for key in Operands._fields)
    config = dict(
        activation="GELU" if is_tiled else "SiLU",
        norm="layer" if is_tiled else "rms",
        eps=1e-3,
        skip_gate=False,
        fused_add="epilogue" if is_tiled else "prologue",
        store_fused_add=not is_tiled,
        is_tiled=is_tiled,
    )
    axis = 2 if is_tiled else 0
    split = tuple(axis if key in rows else None for key in _present(operands))
    outs = _results(config) * (axis,)
    if name != BACKWARD:
        return Example(operands, config, split, outs)
    stored = plain.mlp_plain(*operands, name=UNTILED, **config)
    cotangents = [jax.random.normal(next(keys), x.shape, x.dtype) for x in stored]
    given = live_operands(Operands(*operands))
    config = dict(config, given=given)
    return Example((*operands, *stored, *cotangents), config, split + 2 * outs, split)


def _tile(x: jax.Array, axis: int) -> jax.Array:
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(*_TILE[x.shape[0]], *x.shape[1:])


def _present(operands: tuple) -> tuple[str, ...]:
    pairs = zip(Operands._fields, operands, strict=True)
    return tuple(key for key, operand in pairs if operand is not None)


def _results(config: dict[str, Any]) -> int:
    return 3 + config["store_fused_add"]


def _block_scaled(dtype: Any, batch: int) -> Example:
    """RMSNorm and all biases; the width is the smallest that fills its tiles."""
    width, d_ff = 512, 32
    shapes = dict(hidden=(batch, 2, width), gamma=(1, width), down_b=(1, width))
    shapes |= dict.fromkeys(("gate_b", "up_b"), (d_ff // 4, 1, 4))
    keys = iter(jax.random.split(jax.random.key(5), 8))
    made = {k: jax.random.normal(next(keys), v, dtype) for k, v in shapes.items()}
    packed = {}
    for key in ("gate_w", "up_w", "down_w"):
        order, rows = (HIDDEN, width) if key != "down_w" else (INTERMEDIATE, d_ff)
        weight = jax.random.normal(next(keys), (rows, width + d_ff - rows)) / 16
        packed[key] = pack_weight(weight, order, E2M1FN)
    made |= {key: codes for key, (codes, _) in packed.items()}
    made["gate_up_w_scale"] = jnp.stack([packed[k][1] for k in ("gate_w", "up_w")])
    made["down_w_scale"] = packed["down_w"][1]
    operands: tuple[Any, ...] = tuple(made.get(key) for key in Operands._fields)
    config: dict[str, Any] = dict(
        activation="SiLU",
        norm="rms",
        eps=1e-3,
        skip_gate=False,
        fused_add="none",
        store_fused_add=False,
        is_tiled=False,
        quant_mode="QuantOnly",
        quantization="MX",
        is_fp8_kernel=False,
        weight_format=E2M1FN.name,
    )
    split = tuple(0 if key == "hidden" else None for key in _present(operands))
    return Example(operands, config, split, _results(config) * (0,))


def _quantized(name: str, dtype: Any, batch: int) -> Example:
    """ROW in decode with a norm and a stored prologue; STATIC in prefill."""
    is_row = name == ROW_FP8
    rows = dict.fromkeys(("hidden", "addend") if is_row else ("hidden",), (batch, 2, 4))
    shapes = rows | dict(gate_w=(4, 6), up_w=(4, 6), down_w=(6, 4), gate_b=(1, 6))
    shapes |= dict(gamma=(1, 4)) if is_row else dict(down_b=(1, 4))
    keys = iter(jax.random.split(jax.random.key(3), 16))
    made = {k: jax.random.normal(next(keys), v, dtype) for k, v in shapes.items()}
    made |= {k: made[k].astype(E4M3) for k in ("gate_w", "up_w", "down_w")}
    scales = dict(gate_up_w_scale=(2, 6), down_w_scale=(1, 4))
    if not is_row:
        scales = dict(gate_up_w_scale=(2, 1), down_w_scale=(1, 1))
        scales |= dict(gate_up_in_scale=(1, 1), down_in_scale=(1, 1))
    for key, shape in scales.items():
        steps = jnp.arange(1, shape[0] * shape[1] + 1, dtype=jnp.float32)
        made[key] = steps.reshape(shape) / 16
    if not is_row:  # the largest of the gated values are clipped
        made["down_in_scale"] = jnp.full((1, 1), 1 / 2400, jnp.float32)
    operands: tuple[Any, ...] = tuple(made.get(key) for key in Operands._fields)
    config: dict[str, Any] = dict(
        activation="SiLU",
        norm="rms" if is_row else "none",
        eps=1e-3,
        skip_gate=False,
        fused_add="prologue" if is_row else "none",
        store_fused_add=is_row,
        is_tiled=False,
        quant_mode="QuantOnly",
        quantization="ROW" if is_row else "STATIC",
        prefill=not is_row,
        is_fp8_kernel=True,
    )
    split = tuple(0 if key in rows else None for key in _present(operands))
    return Example(operands, config, split, _results(config) * (0,))
