"""New keys and values written into caches that no macro writes.

A macro that is mapped over key/value heads would bring their axis to the front of the
caches: on a CPU a copy of all slots, four times the step's time for two sequences. One
in a scan would hold them twice.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention_block_tkg.cache import first_slots
from neuronjax.kernels.kv_cache import write_slots
from neuronjax.kernels.shard_common import uniform


def after(attended: jax.Array, position: jax.Array) -> jax.Array:
    """The position, known only when `attended` is, and the same.

    The caches are read before they are written. XLA does not see that order, and copies
    them, unless the write depends on what was read: no number is below -inf.
    """
    never = (attended < -jnp.inf).any()
    return jnp.where(never, jnp.zeros_like(position), position)


def written(
    caches: Sequence[jax.Array], new: Sequence[jax.Array], position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The caches with new tokens in them; a write that does not fit changes nothing.

    Args:
        caches: keys `[layers, batch, G, head_dim, slots]`, values `[layers, batch, G,
            slots, head_dim]`.
        new: the same with the new tokens for slots.
        position: `[batch, 1]`, the slot of the first new token.
    """
    (k_cache, v_cache), (k, v) = caches, new
    return _written(k_cache, k, position, 4), _written(v_cache, v, position, 3)


@functools.partial(jax.jit, static_argnums=3)  # traced once for all layers
def _written(cache, new, position, axis):
    layers, batch, groups = cache.shape[:3]
    first = first_slots(position, new.shape[axis], cache.shape[axis])
    if batch == 1:  # every row begins at one slot: all of them are one row
        rows, new = (x.reshape(1, layers, *x.shape[2:]) for x in (cache, new))
    else:
        first = jnp.broadcast_to(first[None, :, None], (layers, batch, groups)).ravel()
        rows, new = (x.reshape(first.size, *x.shape[3:]) for x in (cache, new))
        axis -= 2
    rows, new, first = uniform(rows, new, first)
    return write_slots(rows, new, first, axis=axis).reshape(cache.shape)
