"""Small operands of each NAME of QKV, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.mx.formats import E4M3FN
from neuronjax.kernels.mx.layout import INTERLEAVED, pack_weight
from neuronjax.primitives.macro import Example
from neuronjax.primitives.qkv.leaves import (
    BLOCK_SCALED,
    GRADIENTS,
    QUANTIZED,
    TILED,
    UNTILED,
    leaf,
)

_CONFIG = dict(
    eps=1e-6,
    hidden_actual=None,
    d_head=4,
    num_q_heads=2,
    num_kv_heads=1,
    fused_rope=True,
)


def example(name: str, dtype: Any, batch: int) -> Example:
    if name == BLOCK_SCALED:
        return _block_scaled_example(dtype, batch)
    if name == QUANTIZED:
        return _row_example(dtype, batch)
    if name == TILED:
        return _tiled_example(dtype, batch)
    x, w, gamma, bias, mlp_prev, attn_prev, cos, sin = _normal(
        dtype,
        *((batch, 3, 6), (6, 16), (1, 6), (1, 16), (batch, 3, 6), (batch, 3, 6)),
        *((batch, 3, 4), (batch, 3, 4)),
    )
    operands = (x, w, gamma, None, bias, mlp_prev, attn_prev, cos, sin)
    split = (0, None, None, None, 0, 0, 0, 0)
    config = dict(_CONFIG, norm="rms", fused_add="prologue", layout="BSD")
    config["is_tiled"] = False
    if name == UNTILED:
        return Example(operands, config, split, (0, 0, 0))
    outs = leaf(*operands, name=UNTILED, **config)
    cotangents = [jnp.cos(out + 1) for out in outs]
    live = tuple(k for k, x in zip(GRADIENTS, operands, strict=True) if x is not None)
    return Example(
        (*operands, *outs, *cotangents),
        config | {"live": live},
        split + (0,) * 6,
        split,
    )


def _tiled_example(dtype: Any, batch: int) -> Example:
    x, w, gamma, beta, bias, cos, sin = _normal(
        dtype,
        *((128, 2, batch, 3), (128, 2, 16), (128, 2, 1), (128, 2, 1), (16, 1, 1)),
        *((4, 1, batch, 3), (4, 1, batch, 3)),
    )
    operands = (x, w / 16, gamma, beta, bias, None, None, cos, sin)
    config = dict(_CONFIG, norm="layer", fused_add="none", layout="NBSd")
    config["is_tiled"] = True
    return Example(operands, config, (2, None, None, None, None, 2, 2), (3, 2, 2))


def _row_example(dtype: Any, batch: int) -> Example:
    """ROW in front of caches: query heads, statistics and both caches come back."""
    x, w, gamma, bias, new = _normal(
        dtype, (batch, 2, 6), (6, 16), (1, 6), (1, 16), (batch, 3, 4)
    )
    cache, one = new.astype(jnp.float8_e4m3), jnp.ones((1, 1), jnp.float32)
    scale = jnp.linspace(0.5, 1.5, 16, dtype=jnp.float32)[None]
    operands = (x, w.astype(jnp.float8_e4m3), gamma, None, bias, *[None] * 4)
    operands += (scale, None, cache, -cache, one, one / 2, None)
    config = dict(_CONFIG, norm="rms", fused_add="none", layout="BSD", fused_rope=False)
    config |= dict(is_tiled=False, quantization="ROW", is_fp8_kernel=True)
    config |= dict(out_dtype=None, kv_dtype="float8_e4m3", kv_limits=(-240.0, 240.0))
    split = (0, None, None, None, None, 0, 0, None, None)
    return Example(operands, config, split, (0, 0, 0, 0))


def _block_scaled_example(dtype: Any, batch: int) -> Example:
    """MX in interleaved rows: norm, bias and rotation, no caches."""
    x, w, gamma, bias, cos, sin = _normal(
        dtype,
        *((batch, 2, 32), (32, 16), (1, 32), (1, 16)),
        *((batch, 2, 4), (batch, 2, 4)),
    )
    packed = pack_weight(w.astype(jnp.float32), INTERLEAVED, E4M3FN)
    codes, scale = (z[:, 0] for z in packed)
    operands = (x, codes, gamma, None, bias, None, None, cos, sin, scale)
    operands += (None,) * 6
    config = dict(_CONFIG, norm="rms", fused_add="none", layout="BSD", is_tiled=False)
    config |= dict(quantization="MX", is_fp8_kernel=True, out_dtype=None)
    config |= dict(kv_dtype=None, kv_limits=None, weight_format=E4M3FN.name)
    config |= dict(weight_layout="MX_INTERLEAVED")
    return Example(operands, config, (0, None, None, None, 0, 0, None), (0, 0))


def _normal(dtype: Any, *shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
