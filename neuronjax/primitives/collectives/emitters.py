"""The emitters of the collectives: operands are what one core holds."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from neuronjax.primitives import contracts
from neuronjax.primitives.collectives import macro
from neuronjax.primitives.collectives.facts import kernel_facts
from neuronjax.primitives.collectives.mapped import is_of_mesh, own_group
from neuronjax.primitives.collectives.names import (
    COLLECTIVES,
    COLUMNS,
    GATHER,
    GATHER_MIRROR,
    MATMUL,
    MATMUL_MIRROR,
)

Groups = tuple[tuple[int, ...], ...]


@contracts.contracted(kernel_facts)
def collective_matmul_kernel(
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    *,
    axis: str | None,
    groups: Groups | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    path: str = "sbuf",
    **hints: Any,
) -> Float[Array, "all_rows d_out"]:
    """Emits `CollectiveMatmul`, inside `shard_map` over `axis`.

    Args:
        lhs: `[rows, K]`, this core's.
        rhs: `[K, N]`, this core's.
        axis: the mesh axis of the ranks; None for a rank that is alone.
        groups: the positions on `axis` of each group's ranks, in the order of the
            result; None for one group of all.
        channels: how many rings share the rows.
        bidirectional: chunks travel both ways, half as far.
        path: `"sbuf"` or `"hbm"`, where what travels is kept; for the record.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[ranks * rows, N]` in the dtype of `lhs`.
    """
    ring = _ring(MATMUL, axis, groups, channels, bidirectional, path)
    return macro.collective_matmul(lhs, rhs, **ring, **hints)[0]


@contracts.contracted(kernel_facts)
def matmul_reduce_scatter_kernel(
    lhs: Float[Array, "all_rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    *,
    axis: str | None,
    groups: Groups | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    path: str = "sbuf",
    **hints: Any,
) -> Float[Array, "rows d_out"]:
    """Emits `MatmulReduceScatter`, inside `shard_map` over `axis`.

    Args:
        lhs: `[ranks * rows, K]`, this core's.
        rhs: `[K, N]`, this core's.
        axis: as in `collective_matmul_kernel`.
        groups: likewise.
        channels: likewise.
        bidirectional: sums travel both ways, half as far.
        path: as in `collective_matmul_kernel`.
        **hints: likewise.

    Returns:
        `[rows, N]` in the dtype of `lhs`: this rank's rows of the sum over ranks.
    """
    ring = _ring(MATMUL_MIRROR, axis, groups, channels, bidirectional, path)
    return macro.matmul_reduce_scatter(lhs, rhs, **ring, **hints)[0]


@contracts.contracted(kernel_facts)
def fine_grained_all_gather_kernel(
    lhs: Shaped[Array, "rows d_in"],
    *,
    axis: str | None,
    groups: Groups | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    path: str = "sbuf",
    **hints: Any,
) -> Shaped[Array, "all_rows d_in"]:
    """Emits `FineGrainedAllGather`, inside `shard_map` over `axis`.

    Args:
        lhs: `[rows, K]`, this core's; any dtype.
        axis: as in `collective_matmul_kernel`.
        groups: likewise.
        channels: likewise.
        bidirectional: likewise.
        path: likewise.
        **hints: likewise.

    Returns:
        `[ranks * rows, K]`, a copy.
    """
    ring = _ring(GATHER, axis, groups, channels, bidirectional, path)
    return macro.all_gather(lhs, **ring, **hints)[0]


@contracts.contracted(kernel_facts)
def fine_grained_reduce_scatter_kernel(
    lhs: Float[Array, "all_rows d_in"],
    *,
    axis: str | None,
    groups: Groups | None = None,
    channels: int = 1,
    bidirectional: bool = False,
    path: str = "sbuf",
    **hints: Any,
) -> Float[Array, "rows d_in"]:
    """Emits `FineGrainedReduceScatter`, inside `shard_map` over `axis`.

    Args:
        lhs: `[ranks * rows, K]`, this core's.
        axis: as in `collective_matmul_kernel`.
        groups: likewise.
        channels: likewise.
        bidirectional: sums travel both ways, half as far.
        path: as in `collective_matmul_kernel`.
        **hints: likewise.

    Returns:
        `[rows, K]` in the dtype of `lhs`: this rank's rows of the sum over ranks.
    """
    ring = _ring(GATHER_MIRROR, axis, groups, channels, bidirectional, path)
    return macro.reduce_scatter(lhs, **ring, **hints)[0]


@contracts.contracted(kernel_facts)
def sb2sb_all_gather_kernel(
    inp: Shaped[Array, "rows columns"],
    *,
    axis: str | None,
    groups: Groups | None = None,
    **hints: Any,
) -> Shaped[Array, "rows all_columns"]:
    """Emits `SB2SBAllGather`, inside `shard_map` over `axis`.

    Args:
        inp: `[H, W]`, this core's; any dtype.
        axis: as in `collective_matmul_kernel`.
        groups: likewise. Over an axis of `vmap` all ranks gather, and keep their own.
        **hints: likewise.

    Returns:
        `[H, ranks * W]`, a copy.
    """
    config = _config(COLUMNS, axis, groups)
    if axis is None or groups is None or is_of_mesh(axis):
        return macro.sb2sb_all_gather(inp, **config, **hints)[0]
    everyone = macro.sb2sb_all_gather(inp, **config | dict(groups=None), **hints)[0]
    ranks = everyone.reshape(len(inp), lax.axis_size(axis), -1)
    own = jnp.take(ranks, own_group(axis, config["groups"]), axis=1)
    return lax.collapse(own, 1)


def _ring(
    name: str,
    axis: str | None,
    groups: Groups | None,
    channels: int,
    bidirectional: bool,
    path: str,
) -> dict[str, Any]:
    """NAME and config bag of a ring."""
    return _config(name, axis, groups) | dict(
        channels=int(channels), bidirectional=bool(bidirectional), path=path
    )


def _config(name: str, axis: str | None, groups: Groups | None) -> dict[str, Any]:
    """NAME and config bag of any exchange, with its kind for the record."""
    if groups is not None:
        groups = tuple(tuple(map(int, ranks)) for ranks in groups)
    record = COLLECTIVES[name]._asdict()
    return dict(name=name, axis=axis, groups=groups, **record)
