"""Small operands of the decode macros, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention.decode_plain import attention_decode_plain
from neuronjax.primitives.attention.decode_rules import AXES
from neuronjax.primitives.macro import Example
from neuronjax.primitives.tile import MemrefTile

OPTIONS_VARIANT = "AttentionTkgFwd (blocks, window, sink)"


def example(name: str, dtype: Any, batch: int) -> Example:
    """Operands of a label: its NAME, over tiles, or over blocks with every option."""
    if name.endswith("(tiles)"):
        return _tiled(dtype, batch)
    blocks = "(" in name
    operands: tuple[Any, ...]
    operands, config = _blocks(dtype, batch) if blocks else _flat(dtype, batch)
    # What a mesh splits: all but the caches of blocks and the sink, which are shared.
    split = [0, 0, 0, None, None, 0, None, 0, 0] if blocks else [0] * 6
    if not name.startswith("AttentionTkgFwdBwd"):
        return Example(operands, config, tuple(split), (0, 0, 0))
    outs = attention_decode_plain(*operands, name="AttentionTkgFwd", **config)
    if blocks:
        config |= dict(gradients="dq dk_active dv_active dk_prior dv_prior d_sink")
    keys = jax.random.split(jax.random.key(1), len(outs))
    cotangents = [
        jax.random.normal(key, out.shape, out.dtype)
        for key, out in zip(keys, outs, strict=True)
    ]
    grads = (0, 0, 0, None, None, None) if blocks else (0,) * 5
    stored = (*operands, *outs, *cotangents)
    return Example(stored, config, (*split, *[0] * 6), grads)


def _config(**changes: Any) -> dict[str, Any]:
    layout: dict[str, Any] = dict(prior_slots=7, tp_k_prior=False, fuse_rope=False)
    return dict(layout, is_tkg=True, is_tiled=False) | changes


def _drawn(shapes, dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape, dtype) / 2 for key, shape in pairs]


def _flat(dtype, batch):
    shapes = [(4, 2, 8), (2, 2, 8), (2, 2, 6), (2, 8, 7), (2, 7, 6)]
    cached = _drawn([(batch, *shape) for shape in shapes], dtype)
    lengths = (3 + 2 * jnp.arange(batch, dtype=jnp.int32)) % 8
    return (*cached, None, lengths, *[None] * 5), _config()


def _blocks(dtype, batch):
    """A sequence whose window goes around, one whose does not; two share a block."""
    shapes = [(batch, 2, 2, 4), (batch, 1, 2, 4), (batch, 1, 2, 4)]
    *cached, sink = _drawn([*shapes, (5, 1, 2, 4), (5, 1, 2, 4), (2, 1)], dtype)
    row = jnp.arange(batch, dtype=jnp.int32)
    lengths = 1 + 3 * row % 5
    starts = (jnp.array([3, 4], jnp.int32) + row[:, None]) % 6
    table = jnp.stack([row % 3, 2 + row % 3, 0 * row], 1)
    operands = (*cached, None, lengths, None, None, sink, starts, table)
    return operands, _config(prior_slots=5, tp_k_prior=True)


def _tiled(dtype, batch):
    cached: tuple[Any, ...]
    cached, config = _flat(dtype, batch)
    tensors = (*cached[:5], cached[6])
    tiles = [
        MemrefTile.from_tensor(x, axis).data
        for x, axis in zip(tensors, AXES.values(), strict=True)
    ]
    split = (2, 2, 2, 2, 2, 0)
    return Example(tuple(tiles), dict(config, is_tiled=True), split, (2, 2, 2))
