"""Tiles of a decode step's experts: `[partition, chunk, *other axes]`, and back."""

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.expert_mlps.operands import OUT_AXIS, TILE_AXES, Operands

PARTITIONS = 128


def untiled(ops: Operands) -> Operands:
    """The tensors that the tiles hold."""
    held = {key: x for key, x in ops._asdict().items() if x is not None}
    return ops._replace(**{key: untile(x, TILE_AXES[key]) for key, x in held.items()})


def on_tokens(ops: Operands) -> Operands:
    """The operands with what lies on tokens as rows; the others are left out."""
    given = ops.affinities, ops.index, ops.rank
    rows = [None if x is None else lax.collapse(x, 0, 2) for x in given]
    return Operands(ops.hidden, ops.gate_up_w, ops.down_w, *rows)


def untile(data: jax.Array, axis: int) -> jax.Array:
    """The tensor of one tile, whose `axis` lies on the partitions."""
    whole = data.reshape(data.shape[0] * data.shape[1], *data.shape[2:])
    return jnp.moveaxis(whole, 0, axis)


def retiled(x: jax.Array, axis: int = OUT_AXIS) -> jax.Array:
    """The tile of a tensor, its `axis` on the partitions."""
    rows = jnp.moveaxis(x, axis, 0)
    partitions = min(rows.shape[0], PARTITIONS)
    return rows.reshape(partitions, rows.shape[0] // partitions, *rows.shape[1:])
