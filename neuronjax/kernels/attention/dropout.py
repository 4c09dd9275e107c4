"""Which weights dropout keeps: a function of the key, the head, the row and the column.

Nothing depends on how the scores are cut into blocks, so the forward, the backward and
a recomputation all draw the same weights, block by block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.attention.segments import Index, Segment, columns_of


def block_weights(
    extras: Extras, options: Options, heads: tuple
) -> Callable[[Segment, Index, Index], jax.Array | None]:
    """What the weights of query block `i` and key block `j` are multiplied by."""
    key = extras.key
    if key is None:
        return lambda segment, i, j: None

    def weights(segment, i, j):
        rows = jnp.asarray(i, jnp.int32) * segment.rows.block
        rows = rows + jnp.arange(segment.rows.block, dtype=jnp.int32)
        columns = segment.first + columns_of(segment, j)
        positions = extras.positions(rows, options)
        return kept_weights(key, options, heads, positions, columns)

    return weights


def kept_weights(
    key: jax.Array,
    options: Options,
    heads: tuple,
    rows: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """`1 / (1 - rate)` where a weight is kept and 0 where not, `[*heads, rows, keys]`.

    Args:
        key: the data of the key.
        options: holds `dropout_rate` and `dropout_impl`.
        heads: `(kv_heads, group)`.
        rows: the positions of the rows, int32.
        columns: the columns of the keys, int32.
    """
    keys = jax.random.wrap_key_data(key, impl=options.dropout_impl)
    head = jnp.arange(heads[0] * heads[1], dtype=jnp.uint32)
    for ids in (head, rows.astype(jnp.uint32), columns.astype(jnp.uint32)):
        keys = _fold_each(keys, ids)
    bits = jax.random.key_data(keys)[..., -1].reshape(*heads, rows.size, columns.size)
    least = min(round(options.dropout_rate * 2**32), 2**32 - 1)
    keep = bits >= jnp.uint32(least)
    return jnp.where(keep, 1 / (1 - options.dropout_rate), 0)


def _fold_each(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """`[...]` keys and `[n]` numbers to `[..., n]` keys."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, ids)
