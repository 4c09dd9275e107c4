"""Which weights dropout keeps: a function of the key, the head, the row and the column.

Nothing depends on how the scores are cut into blocks, so the forward, the backward and
a recomputation all draw the same weights, block by block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention.blocks import Size, grouped
from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.attention.segments import Index, Segment, columns_of


def block_weights(
    extras: Extras, options: Options, num_kv_heads: Size
) -> Callable[[Segment, Index, Index], jax.Array | None]:
    """What the weights of query block `i` and key block `j` are multiplied by."""
    if extras.key is None:
        return lambda segment, i, j: None
    keys = grouped(extras.key, num_kv_heads)

    def weights(segment, i, j):
        rows = jnp.asarray(i, jnp.int32) * segment.rows.block
        rows = rows + jnp.arange(segment.rows.block, dtype=jnp.int32)
        columns = segment.first + columns_of(segment, j)
        positions = extras.positions(rows, options)
        return kept_weights(keys, options, positions, columns)

    return weights


def kept_weights(
    keys: jax.Array,
    options: Options,
    rows: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """`1 / (1 - rate)` where a weight is kept and 0 where not, `[*heads, rows, keys]`.

    Args:
        keys: the data of a key a head, `[*heads, words]`.
        options: holds `dropout_rate` and `dropout_impl`.
        rows: the positions of the rows, int32.
        columns: the columns of the keys, int32.
    """
    folded = jax.random.wrap_key_data(keys, impl=options.dropout_impl)
    for ids in (rows, columns):
        folded = _fold_each(folded, ids.astype(jnp.uint32))
    bits = jax.random.key_data(folded)[..., -1]
    least = min(round(options.dropout_rate * 2**32), 2**32 - 1)
    keep = bits >= jnp.uint32(least)
    return jnp.where(keep, 1 / (1 - options.dropout_rate), 0)


def _fold_each(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """`[...]` keys and `[n]` numbers to `[..., n]` keys."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, ids)
