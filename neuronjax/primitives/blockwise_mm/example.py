"""Small operands of the blockwise experts, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.blockwise_mm.operands import Operands
from neuronjax.kernels.blockwise_mm.plain import blockwise_mm_plain
from neuronjax.primitives.blockwise_mm.names import BACKWARD, FORWARD
from neuronjax.primitives.macro import Example

SCALED = f"{FORWARD} (PRE_SCALE, biases, clamps, recompute)"
VARIANTS = (SCALED,)
_TOKENS, _WIDTH, _D_FF, _EXPERTS, _SIZE = 5, 4, 3, 3, 2


def _operands(dtype: Any, batch: int, biases: bool) -> Operands:
    """Two blocks for each of `batch`, one padding slot in four; expert 1 gets none."""
    keys = jax.random.split(jax.random.key(5), 6)
    shapes = [
        (_TOKENS + 1, _WIDTH),
        ((_TOKENS + 1) * _EXPERTS, 1),
        (_EXPERTS, _WIDTH, 2, _D_FF),
        (_EXPERTS, _D_FF, _WIDTH),
        (_EXPERTS, 2, _D_FF),
        (_EXPERTS, _WIDTH),
    ]
    hidden, affinity, gate_up_w, down_w, *rows = (
        jax.random.normal(key, shape, dtype) / 2
        for key, shape in zip(keys, shapes, strict=True)
    )
    first = jnp.arange(2 * batch, dtype=jnp.int32)
    second = jnp.where(first % 2 == 1, _TOKENS, (first + 2) % _TOKENS)
    token_id = jnp.stack([first % _TOKENS, second], 1).reshape(-1)
    block_expert = (first % 2) * 2
    ids = token_id.astype(jnp.int32), block_expert.astype(jnp.int32)
    bias = rows if biases else (None, None)
    return Operands(hidden, affinity, gate_up_w, down_w, *ids, *bias)


def example(label: str, dtype: Any, batch: int) -> Example:
    """Blocks are divided, everything else is whole: a device's `out` is a part."""
    config: dict[str, Any] = dict(block_size=_SIZE, activation="SiLU")
    ops = _operands(dtype, batch, label == SCALED)
    whole = (None,) * 4
    biases = () if ops.gate_up_b is None else (None, None)
    if label == SCALED:
        config |= dict(scaling="PRE_SCALE", checkpoint="recompute", returned=False)
        config |= dict(gate_clamp_upper_limit=0.4, up_clamp_lower_limit=-0.5)
        return Example(ops, config, (*whole, 0, 0, *biases), (None,))
    if label != BACKWARD:
        return Example(ops, config, (*whole, 0, 0), (None, 0, 0))
    outs = blockwise_mm_plain(*ops, name=FORWARD, **config)
    keys = jax.random.split(jax.random.key(6), 3)
    seeds = [
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys, outs, strict=True)
    ]
    grads = ("hidden", "affinity", "gate_up_w", "down_w")
    split = (*whole, 0, 0, 0, 0, None, 0, 0)
    operands = (*ops, *outs[1:], *seeds)
    return Example(operands, dict(config, grads=grads), split, (None,) * 4)
