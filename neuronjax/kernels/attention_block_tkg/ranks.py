"""Keys and values divided over the ranks of a group, by sequence.

Every rank has heads of its own and all sequences in front of attention, the heads of
all ranks and its own sequences inside it. Forward, two all-gathers cross the wire, and
a third of one number a head where each rank holds its own sinks; backward, all-to-alls.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.shard_common import uniform, varying


def own_batch(x: jax.Array, c: Any) -> jax.Array:
    """The sequences of this rank: `[batch, ...]` to `[batch/ranks, ...]`."""
    return x if c.kvdp == 1 else _own(x, 0, c)


def own_batch_bwd(dx: jax.Array, c: Any) -> jax.Array:
    """Zeros for the sequences of the other ranks."""
    if c.kvdp == 1:
        return dx
    rows, me = dx.shape[0], lax.axis_index(c.axis)
    zeros = jnp.zeros((rows * c.kvdp, *dx.shape[1:]), dx.dtype)
    zeros, dx, me = uniform(zeros, dx, me)
    return lax.dynamic_update_slice_in_dim(zeros, dx, me * rows, 0)


def all_heads(q: jax.Array, c: Any) -> jax.Array:
    """`[batch, heads, ...]` to `[batch/ranks, ranks*heads, ...]`."""
    return _exchanged(q, 1, 0, c)


def all_heads_bwd(dq: jax.Array, c: Any) -> jax.Array:
    """The inverse exchange: every cotangent goes to the rank that owns its head."""
    return _returned(dq, 1, 0, c)


def own_heads(attention: jax.Array, c: Any) -> jax.Array:
    """`[batch/ranks, ranks*heads, ...]` to `[batch, heads, ...]`."""
    return _exchanged(attention, 0, 1, c)


def own_heads_bwd(d_attention: jax.Array, c: Any) -> jax.Array:
    """The inverse exchange: every cotangent goes to the rank that owns its sequence."""
    return _returned(d_attention, 0, 1, c)


def all_sinks(sink: jax.Array | None, num_heads: int, c: Any) -> jax.Array | None:
    """The sinks of all ranks' heads: gathered, unless each rank has all of them."""
    if sink is None or c.kvdp == 1 or sink.shape[0] != num_heads:
        return sink
    return lax.all_gather(sink, c.axis, axis=0, tiled=True)


def all_sinks_bwd(d_sink: jax.Array, num_heads: int, own: int, c: Any) -> jax.Array:
    """The cotangent of the sinks that a rank holds, `own` of them."""
    if c.kvdp == 1 or own != num_heads:
        return d_sink
    return lax.psum_scatter(d_sink, c.axis, scatter_dimension=0, tiled=True)


def all_columns_bwd(d_heads: jax.Array, c: Any) -> jax.Array:
    """The cotangent of heads that all cores hold, from each core's own columns."""
    if c.lnc_axis is None or c.lnc_axis not in varying(d_heads):
        return d_heads
    return lax.psum(d_heads, c.lnc_axis)


def zeros_like(x: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh as `x` does."""
    return uniform(jnp.zeros_like(x), x)[0]


def _exchanged(x, gathered, kept, c):
    """All ranks' parts of one axis, of another this rank's part."""
    if c.kvdp == 1:
        return x
    return _own(lax.all_gather(x, c.axis, axis=gathered, tiled=True), kept, c)


def _returned(dx, gathered, kept, c):
    """The transpose of `_exchanged`."""
    if c.kvdp == 1:
        return dx
    return lax.all_to_all(dx, c.axis, gathered, kept, tiled=True)


def _own(x, axis, c):
    """The part of `x` that belongs to this rank."""
    size = x.shape[axis] // c.kvdp
    me = lax.axis_index(c.axis)
    return lax.dynamic_slice_in_dim(x, me * size, size, axis)
