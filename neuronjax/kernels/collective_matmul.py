"""A product of rows that are divided over ranks, computed as they come by.

The gather is a permute ring inside the kernel, so the rows of all ranks are never held
at once, and a product needs one permute only, not the whole exchange, behind it.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.shard_common import Group, arriving, group_size, reduced, uniform
from neuronjax.kernels.shard_common.groups import Members

Rows = Float[Array, "rows d_in"]
Matrix = Float[Array, "d_in d_out"]


def collective_matmul_fwd(
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    *,
    name: str,
    axis: str | None = None,
    groups: Members | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    **_: Any,
) -> tuple[Float[Array, "all_rows d_out"]]:
    """Returns `(gathered lhs) @ rhs`, in the dtype of `lhs`.

    Rows come in the order of the ranks. A channel takes its share of each rank's rows.
    """
    group = Group(axis, groups)
    # Made of both operands, it is divided as they are over an explicit mesh.
    blank = jnp.zeros_like(lhs.sum(1))[:, None] + jnp.zeros_like(rhs.sum(0), lhs.dtype)
    out, lhs, rhs = uniform(of_all_ranks(blank, group), lhs, rhs, over=axis)
    for own, rank, chunk in arriving_rows(lhs, group, channels, bidirectional):
        first = rank * lhs.shape[0] + own.start
        out = placed(out, product(chunk, rhs).astype(lhs.dtype), first)
    return (out,)


def matmul_reduce_scatter_fwd(
    lhs: Float[Array, "all_rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    *,
    name: str,
    axis: str | None = None,
    groups: Members | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    **_: Any,
) -> tuple[Float[Array, "rows d_out"]]:
    """Returns this rank's rows of `lhs @ rhs`, summed over ranks, in `lhs`'s dtype.

    Sums travel in float32 and are rounded once.
    """
    group = Group(axis, groups)
    lhs, rhs = uniform(lhs, rhs, over=axis)
    blocks = by_rank(lhs, group)
    totals = [
        reduced(
            lambda rank, rows=rows: product(block(blocks, rank, rows), rhs),
            group,
            bidirectional=bidirectional,
        )
        for rows in shares(blocks.shape[1], channels)
    ]
    return (joined(totals).astype(lhs.dtype),)


def collective_matmul_weight_bwd(
    lhs: Float[Array, "rows d_in"],
    d_out: Float[Array, "all_rows d_out"],
    *,
    name: str,
    axis: str | None = None,
    groups: Members | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    dtype: str | None = None,
    **_: Any,
) -> tuple[Float[Array, "d_in d_out"]]:
    """Returns `(gathered lhs).T @ d_out` in `dtype`, by the ring of the forward."""
    group = Group(axis, groups)
    dtype = dtype or str(promoted(lhs.dtype, d_out.dtype))
    acc = accumulator(lhs.dtype, d_out.dtype, dtype)
    total = jnp.zeros((lhs.shape[1], d_out.shape[1]), acc)
    total, lhs, d_out = uniform(total, lhs, d_out, over=axis)
    blocks = by_rank(d_out, group)
    for rows, rank, chunk in arriving_rows(lhs, group, channels, bidirectional):
        # Wide factors: XLA on a CPU has no batched bfloat16 product of this form.
        total = total + jnp.einsum(
            "rk,rn->kn", chunk.astype(acc), block(blocks, rank, rows).astype(acc)
        )
    return (total.astype(dtype),)


def collective_matmul_plain(
    lhs: Rows, rhs: Matrix, *, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Array]:
    """The same by JAX's own all-gather."""
    return (product(gathered(lhs, axis, groups), rhs).astype(lhs.dtype),)


def matmul_reduce_scatter_plain(
    lhs: Rows, rhs: Matrix, *, axis: str | None = None, groups: Any = None, **_: Any
) -> tuple[Array]:
    """The same by JAX's own reduce-scatter."""
    return (scattered(product(lhs, rhs), axis, groups).astype(lhs.dtype),)


def collective_matmul_weight_plain(
    lhs: Array,
    d_out: Array,
    *,
    axis: str | None = None,
    groups: Any = None,
    dtype: str | None = None,
    **_: Any,
) -> tuple[Array]:
    """The same by JAX's own all-gather."""
    total = product(gathered(lhs, axis, groups).T, d_out)
    return (total.astype(dtype or promoted(lhs.dtype, d_out.dtype)),)


def product(lhs: Array, rhs: Array) -> Array:
    """`lhs @ rhs` in at least float32."""
    dtype, acc = promoted(lhs.dtype, rhs.dtype), accumulator(lhs.dtype, rhs.dtype)
    return jnp.dot(lhs.astype(dtype), rhs.astype(dtype), preferred_element_type=acc)


def gathered(x: Array, axis: str | None, groups: Any, dim: int = 0) -> Array:
    """What all ranks hold, joined along `dim`: one all-gather."""
    if axis is None:
        return x
    (x,) = uniform(x, over=axis)
    if not x.shape[dim]:  # XLA gathers nothing that is empty
        return x
    return lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)


def scattered(x: Array, axis: str | None, groups: Any, dim: int = 0) -> Array:
    """This rank's part along `dim` of the sum over ranks: one reduce-scatter."""
    if axis is None:
        return x
    (x,) = uniform(x, over=axis)
    if not x.shape[dim]:
        return x
    return lax.psum_scatter(
        x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups
    )


def by_rank(x: jax.Array, group: Group) -> jax.Array:
    """`[size * rows, columns]` as `[size, rows, columns]`."""
    size = group_size(group)
    return x.reshape(size, x.shape[0] // size, x.shape[1])


def block(blocks: jax.Array, rank: Any, rows: slice) -> jax.Array:
    """Some rows of the block of one rank."""
    own = lax.dynamic_index_in_dim(blocks, rank, keepdims=False)
    return own if rows == slice(0, blocks.shape[1]) else own[rows]


def of_all_ranks(blank: jax.Array, group: Group) -> jax.Array:
    """Room for the rows of all ranks, each as many as `blank` has, which is zero."""
    return jnp.concatenate([blank] * group_size(group))


def placed(out: jax.Array, rows: jax.Array, first: Any) -> jax.Array:
    """`out` with these rows in it, from row `first` on."""
    start = [jnp.asarray(i, jnp.int32) for i in (first, 0)]
    return lax.dynamic_update_slice(out, rows, start)


def shares(rows: int, channels: int) -> list[slice]:
    """The rows of each channel."""
    size = rows // channels
    return [slice(c * size, (c + 1) * size) for c in range(channels)]


def joined(parts: list[jax.Array]) -> jax.Array:
    """What the channels made, below one another."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def arriving_rows(
    lhs: jax.Array, group: Group, channels: int, bidirectional: bool
) -> Iterator[tuple[slice, Any, jax.Array]]:
    """`(rows of the channel, rank, chunk)`: all channels at one step, then the next."""
    rows = shares(lhs.shape[0], channels)
    rings = [
        arriving(
            lhs if channels == 1 else lhs[own],
            group,
            channel=channel,
            bidirectional=bidirectional,
        )
        for channel, own in enumerate(rows)
    ]
    for arrived in zip(*rings, strict=True):
        for own, (rank, chunk) in zip(rows, arrived, strict=True):
            yield own, rank, chunk
