"""The transpose of the last two axes, of tensors and of tiles.

    y[..., j, i] = x[..., i, j]

A tile keeps one of the two axes on its partitions. The array turns 128 x 128 elements
at a time: the axis that lay on the partitions becomes free, and the other one goes
there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

PARTITIONS = 128


def transpose_fwd(
    x: Shaped[Array, "..."],
    *,
    name: str,
    is_tiled: bool,
    chunks: int | None,
    row_axis: bool,
    **hints: Any,
) -> tuple[Shaped[Array, "..."]]:
    """Returns `(y,)`: `[*batch, b, a]` of `[*batch, a, b]`.

    With `is_tiled` x is `[p, c, *batch, b]`, where `n = p*C + c` is the row `i`, and y
    `[q, e, *batch, a]`, where `q*E + e` is the column `j`, if `row_axis`; if not, x has
    its columns on the partitions and y its rows. `chunks` is the number of chunks `E`;
    `None` for one until the partitions are full. `hints` change no value.
    """
    if not is_tiled:
        return (jnp.swapaxes(x, -1, -2),)
    # Both kinds of tile hold [p, c, *batch, free]: `row_axis` says what they mean.
    partitions, own = x.shape[:2]
    count = _chunks(x.shape[-1]) if chunks is None else chunks
    split = x.reshape(*x.shape[:-1], x.shape[-1] // count, count)
    last = split.ndim - 1
    batch = range(2, last - 1)
    turned = split.transpose(last - 1, last, *batch, 0, 1)
    return (turned.reshape(*turned.shape[:-2], partitions * own),)


def transpose_plain(
    x: Shaped[Array, "..."],
    *,
    name: str,
    is_tiled: bool,
    chunks: int | None,
    row_axis: bool,
    **hints: Any,
) -> tuple[Shaped[Array, "..."]]:
    """The same as one permutation of the whole tensor's axes."""
    if is_tiled:
        x = _whole(x, row_axis)
    order = [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]
    y = lax.transpose(x, order)
    if not is_tiled:
        return (y,)
    rows = jnp.moveaxis(y, -2 if row_axis else -1, 0)
    count = _chunks(rows.shape[0]) if chunks is None else chunks
    return (rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]),)


def _chunks(size: int) -> int:
    """Chunks of an axis on the partitions: one until they are full."""
    return max(size // PARTITIONS, 1)


def _whole(data: jax.Array, row_axis: bool) -> jax.Array:
    """The tensor `[*batch, a, b]` that a tile holds."""
    rows = lax.collapse(data, 0, 2)
    return jnp.moveaxis(rows, 0, -2 if row_axis else -1)
