"""Plain collectives inside `shard_map`: sums, exchanges, the batch shard of queries."""

import contextlib
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from neuronjax.kernels.shard_common import Group, uniform
from neuronjax.kernels.shard_common import all_reduce as sum_over
from neuronjax.primitives.collectives.mapped import is_of_mesh, own_group
from neuronjax.primitives.kinds import described, is_count
from neuronjax.primitives.mesh_axes import bound_size, group_of, is_partition
from neuronjax.sharding.exchange import exchanged

_LAYOUTS = ("NBSd", "dBnS")


def all_reduce(
    x: Shaped[Array, "..."],
    axis: str,
    replica_groups: list[list[int]] | None = None,
) -> Shaped[Array, "..."]:
    """The sum of `x` over ranks, on each of them.

    Call it inside `shard_map` over `axis`. Over the whole axis it is one all-reduce,
    and the result is typed alike on all ranks. Over several groups it is a
    reduce-scatter and an all-gather; over groups of one rank it is nothing.

    Args:
        x: numbers, of one shape on all ranks.
        axis: the mesh axis of the ranks.
        replica_groups: lists of ranks, all of one length, that share a sum; None for
            one group of all.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        ValueError: `axis` is not bound, `replica_groups` do not divide it, or `x` is no
            array of numbers.

    Example:
        >>> import jax
        >>> jax.vmap(lambda x: all_reduce(x, "tensor"), axis_name="tensor")(
        ...     jax.numpy.array([1.0, 2.0])).tolist()
        [3.0, 3.0]
    """
    size, x = _bound("all_reduce", axis), _array("all_reduce", x)
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise ValueError(f"all_reduce: x must hold numbers, got {x.dtype}")
    if replica_groups is None:
        return sum_over(x, Group(axis))
    if not is_partition(replica_groups, size):
        raise ValueError(
            "all_reduce: replica_groups must be lists of ranks, all of one length, "
            f"that name each of 0 to {size - 1} once, got {replica_groups}"
        )
    group = group_of(axis, replica_groups)
    if group.axis is None:
        return uniform(x, over=axis)[0]
    if group.members is not None and not is_of_mesh(axis):
        own = lax.all_gather(x, axis)[own_group(axis, group.members)]
        return jnp.sum(own, axis=0, dtype=x.dtype)
    return sum_over(x, group)


def all_to_all(x: Shaped[Array, "rows ..."], axis: str) -> Shaped[Array, "rows ..."]:
    """Rank `d` gets chunk `d` of every rank's rows, in the order of the ranks.

    One all-to-all. Call it inside `shard_map` over `axis`.

    Args:
        x: `[n * rows, ...]` on each of `n` ranks.
        axis: the mesh axis of the ranks.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        ValueError: `axis` is not bound, `x` is no array, or the ranks cannot share its
            rows evenly.

    Example:
        >>> import jax
        >>> jax.vmap(lambda x: all_to_all(x, "tensor"), axis_name="tensor")(
        ...     jax.numpy.array([[1, 2], [3, 4]])).tolist()
        [[1, 3], [2, 4]]
    """
    size, x = _bound("all_to_all", axis), _array("all_to_all", x)
    if not x.ndim or x.shape[0] % size:
        raise ValueError(
            f"all_to_all: the first axis of x must be a multiple of the {size} ranks "
            f"of {axis!r}, got shape {x.shape}"
        )
    return exchanged(x, axis, size, 0, 0)


def attn_q_batch_shard(
    x: Shaped[Array, "_ batch _ _"],
    layout: str = "NBSd",
    *,
    axis: str = "tensor",
    gqa_group_size: int,
) -> Shaped[Array, "_ batch_share _ _"]:
    """Exchanges heads for sequences: all heads of a group, of this rank's part of them.

    Ranks that share a key/value head gather their query heads and divide the batch. It
    equals an all-gather of the heads and a slice of the batch, and is one all-to-all,
    with a `G`-th of that traffic. Call it inside `shard_map` over `axis`.

    Args:
        x: this rank's queries, `[n, B, S, d]` or, in layout `"dBnS"`, `[d, B, 1, S]`.
        layout: `"NBSd"` or `"dBnS"`.
        axis: the mesh axis of the ranks.
        gqa_group_size: `G`, ranks of a group: neighbours on `axis`.

    Returns:
        `[G * n, B / G, S, d]`, heads in the order of the ranks; in layout `"dBnS"`
        `[G, d, B / G, S]`.

    Raises:
        ValueError: the layout is unknown, `axis` is not bound, `G` does not divide it
            or the batch, or `x` is no array of such a shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> q = jnp.arange(4.0).reshape(2, 1, 2, 1, 1)  # 2 ranks of 1 head, 2 sequences
        >>> run = lambda q: attn_q_batch_shard(q, gqa_group_size=2)
        >>> jax.vmap(run, axis_name="tensor")(q).reshape(2, 2).tolist()
        [[0.0, 2.0], [1.0, 3.0]]
    """
    name = "attn_q_batch_shard"
    size, x = _bound(name, axis), _array(name, x)
    _require_queries(x, layout, size, axis, gqa_group_size)
    batch = 1
    if layout == "dBnS":  # no rank has more than one head here
        x, batch = x[:, :, 0][None], 2
    return exchanged(x, axis, int(gqa_group_size), batch, 0)


def _require_queries(
    x: jax.Array, layout: str, size: int, axis: str, ranks: Any
) -> None:
    name, shape = "attn_q_batch_shard", x.shape
    if layout not in _LAYOUTS:
        raise ValueError(
            f"{name}: layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}"
        )
    if not is_count(ranks) or size % ranks:
        raise ValueError(
            f"{name}: gqa_group_size must be a positive integer that divides the "
            f"{size} ranks of {axis!r}, got {ranks!r}"
        )
    words = "[n, B, S, d]" if layout == "NBSd" else "[d, B, 1, S]"
    if len(shape) != 4 or (layout == "dBnS" and shape[2] != 1):
        raise ValueError(f"{name}: x must have shape {words}, got {shape}")
    if shape[1] % ranks:
        raise ValueError(
            f"{name}: the batch must be a multiple of gqa_group_size = {ranks}, got "
            f"{shape[1]}"
        )


def _array(function: str, x: Any) -> jax.Array:
    """`x`, an array or a number."""
    if hasattr(x, "dtype") or isinstance(x, Number):
        with contextlib.suppress(TypeError):  # NumPy has arrays of words and objects
            return jnp.asarray(x)
    raise ValueError(f"{function}: x must be an array, got {described(x)}")


def _bound(function: str, axis: str) -> int:
    """How many ranks an axis has."""
    size = bound_size(axis) if isinstance(axis, str) else None
    if size is None:
        raise ValueError(
            f"{function}: axis must be a mesh axis, and the call inside its shard_map, "
            f"got {axis!r}"
        )
    return size
