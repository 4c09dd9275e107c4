"""New keys and values written into caches that no macro writes.

A macro that is mapped over key/value heads would bring their axis to the front of the
caches, which copies them on a CPU; one in a scan would hold them twice.
tests/test_transformer_tkg_memory.py measures that neither happens.
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
        caches: keys `[*layers, batch, G, head_dim, slots]`, values `[*layers, batch, G,
            slots, head_dim]`, of one layer or of all.
        new: the same with the new tokens for slots.
        position: `[batch, 1]`, the slot of the first new token.
    """
    (k_cache, v_cache), (k, v) = caches, new
    return _written(k_cache, k, position, 3), _written(v_cache, v, position, 2)


@functools.partial(jax.jit, static_argnums=3)  # traced once for all layers
def _written(cache, new, position, axis):
    """`axis` is that of the slots in one layer.

    Layers and heads keep their axes: XLA lays out what a reshape gives in another way,
    and copies the whole cache before the write and after it.
    """
    axes = cache.ndim - 4
    first = first_slots(position, new.shape[axis + axes], cache.shape[axis + axes])
    cache, new, first = uniform(cache, new, first)
    write = functools.partial(write_slots, axis=axis)
    return (jax.vmap(write, (0, 0, None)) if axes else write)(cache, new, first)
