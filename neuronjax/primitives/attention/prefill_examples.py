"""Small operands of every form of prefill attention, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention.options import Extras
from neuronjax.primitives.attention.prefill_facts import SWAPPED, TILED
from neuronjax.primitives.macro import Example

_CAUSAL = "CausalAttentionMMSoftmaxMMWithoutSwap"
WINDOWED, PACKED = f"{_CAUSAL} (window, sink, bias)", f"{_CAUSAL} (shard, packed)"
OPTIONS = (WINDOWED, PACKED)


def example(label: str, dtype: Any, batch: int) -> Example:
    """The example of one NAME or variant."""
    if label == TILED:
        return _tiled(dtype, batch)
    swapped = label == SWAPPED
    form = (8, 6) if swapped else (6, 8), (7, 8) if swapped else (8, 7)
    shapes = (2 * batch, *form[0]), (batch, *form[1]), (batch, 7, 5)
    q, k, v = _draw(shapes, dtype)
    config = _config("Causal" in label, swapped)
    extras = _extras(label, batch, dtype, config)
    # Bounds and positions are those of rows, which every device holds whole.
    split = [
        None if name in ("bound_min", "bound_max", "offset") else 0
        for name in extras._fields
        if getattr(extras, name) is not None
    ]
    return Example((q, k, v, extras), config, (0, 0, 0, *split), (0, 0, 0))


def _extras(label: str, batch: int, dtype: Any, config: dict[str, Any]) -> Extras:
    if label == SWAPPED:
        shape = (2 * batch, 6, 7)
        mask = jax.random.bernoulli(jax.random.key(3), 0.6, shape)
        return Extras(mask=mask.at[:, 2].set(False))
    if label == WINDOWED:
        config |= dict(window=3, soft_cap=2.0)
        bias, sink = _draw([(2 * batch, 1, 7), (2 * batch, 1)], dtype)
        return Extras(bias=bias, sink=sink)
    if label == PACKED:
        config |= dict(stride=2)
        rows = jnp.arange(6, dtype=jnp.int32)
        bounds = rows // 3 * 2, rows // 3 * 2 + 4
        return Extras(bound_min=bounds[0], bound_max=bounds[1], offset=jnp.int32(1))
    return Extras()


def _tiled(dtype: Any, batch: int) -> Example:
    shapes = (8, 1, 2 * batch, 6), (8, 1, batch, 6), (6, 1, batch, 5)
    config = _config(True, False) | dict(is_tiled=True)
    operands = (*_draw(shapes, dtype), Extras())
    return Example(operands, config, (2, 2, 2), (2, 2, 2))


def _config(causal: bool, swapped: bool) -> dict[str, Any]:
    return dict(
        scale=1.0 if causal else 0.5,
        is_causal=causal,
        is_tiled=False,
        tp_q=not swapped,
        tp_k=swapped,
        tp_out=swapped,
    )


def _draw(shapes, dtype: Any) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape, dtype) for key, shape in pairs]
