"""Gathers without a product, and the sums that are their transposes.

The fine-grained pair is the permute ring of `collective_matmul` with copies in place of
products. The small-tensor pair is one collective each, along columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from neuronjax.kernels.collective_matmul import (
    arriving_rows,
    block,
    by_rank,
    gathered,
    joined,
    of_all_ranks,
    placed,
    scattered,
    shares,
)
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import Group, reduced, uniform
from neuronjax.kernels.shard_common.groups import Members

Matrix = Shaped[Array, "rows columns"]


def all_gather_fwd(
    x: Matrix,
    *,
    name: str,
    axis: str | None = None,
    groups: Members | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    **_: Any,
) -> tuple[Shaped[Array, "all_rows columns"]]:
    """Returns the rows of all ranks, in the order of the ranks; a copy."""
    group = Group(axis, groups)
    out, x = uniform(of_all_ranks(jnp.zeros_like(x), group), x, over=axis)
    for own, rank, chunk in arriving_rows(x, group, channels, bidirectional):
        out = placed(out, chunk, rank * x.shape[0] + own.start)
    return (out,)


def reduce_scatter_fwd(
    x: Shaped[Array, "all_rows columns"],
    *,
    name: str,
    axis: str | None = None,
    groups: Members | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    **_: Any,
) -> tuple[Matrix]:
    """Returns this rank's rows of the sum over ranks.

    Sums travel in float32 and are rounded once.
    """
    group, acc = Group(axis, groups), accumulator(x.dtype)
    (varied,) = uniform(x, over=axis)
    blocks = by_rank(varied, group)
    totals = [
        reduced(
            lambda rank, rows=rows: block(blocks, rank, rows).astype(acc),
            group,
            bidirectional=bidirectional,
        )
        for rows in shares(blocks.shape[1], channels)
    ]
    return (joined(totals).astype(x.dtype),)


def all_gather_plain(
    x: Matrix, *, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Array]:
    """The same by JAX's own all-gather."""
    return (gathered(x, axis, groups),)


def reduce_scatter_plain(
    x: Matrix, *, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Array]:
    """The same by JAX's own reduce-scatter."""
    return (_summed(x, axis, groups, 0),)


def column_gather_plain(
    x: Matrix, *, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Array]:
    """The same by the ring of rows."""
    return (all_gather_fwd(x.T, name="", axis=axis, groups=groups)[0].T,)


def column_scatter_plain(
    x: Matrix, *, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Array]:
    """The same by the ring of rows."""
    return (reduce_scatter_fwd(x.T, name="", axis=axis, groups=groups)[0].T,)


def column_gather(
    x: Matrix, *, name: str, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Shaped[Array, "rows all_columns"]]:
    """Returns the columns of all ranks, in the order of the ranks: one all-gather."""
    return (gathered(x, axis, groups, 1),)


def column_scatter(
    x: Shaped[Array, "rows all_columns"],
    *,
    name: str,
    axis: str | None = None,
    groups: Any = None,
    **_: Any,
) -> tuple[Matrix]:
    """Returns this rank's columns of the sum over ranks: one reduce-scatter."""
    return (_summed(x, axis, groups, 1),)


def _summed(x: jax.Array, axis: str | None, groups: Any, dim: int) -> jax.Array:
    return scattered(x.astype(accumulator(x.dtype)), axis, groups, dim).astype(x.dtype)
