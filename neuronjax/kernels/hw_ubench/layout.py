"""From the operands of a probe to what its passes load, and back.

`tiles` counts the small products. Each has `rows` to contract; a row of the array
holds one of them, or, where double rows are packed, two: the halves.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.hw_ubench.plan import PARTITIONS, ProbePlan


def tensor_of(data: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """The tensor whose tile holds `data`: `[*tiles, rows, *free]`.

    The axis on the partitions is the first of one product's operand, which has `rank`
    axes; the axis `tiles`, if there is one, stands before it.
    """
    x = lax.collapse(data, 0, 2)
    return jnp.moveaxis(x, 0, x.ndim - rank)


def data_of(x: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """The inverse of `tensor_of`."""
    x = jnp.moveaxis(x, x.ndim - rank, 0)
    partitions = min(x.shape[0], PARTITIONS)
    return x.reshape(partitions, x.shape[0] // partitions, *x.shape[1:])


def stacked(x: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """`x` with an axis `tiles` in front; `rank` is that of one product's operand."""
    return x[None] if x.ndim == rank else x


def loaded(
    x: Float[Array, "tiles rows halves free"], plan: ProbePlan, free: int | None = None
) -> Float[Array, "groups chunks bands band halves width"]:
    """What each band of each pass loads of `x`; zeros where nothing lies.

    Args:
        x: an operand of all products.
        plan: where their tiles lie.
        free: the size to which the last axis is filled up.
    """
    band, slots = plan.tile_size[0], len(plan.positions)
    more = [plan.groups * slots - plan.tiles, plan.chunks * band - plan.k, 0, 0]
    if free is not None:
        more[3] = max(free - x.shape[3], 0)
    x = jnp.pad(x, [(0, zeros) for zeros in more])
    x = x.reshape(plan.groups, slots, plan.chunks, band, *x.shape[2:])
    return _in_bands(x.swapaxes(1, 2), plan)


def _in_bands(x: jax.Array, plan: ProbePlan) -> jax.Array:
    """Moves the tiles on axis 2 to the bands that they lie in."""
    if plan.slots == tuple(range(x.shape[2])):
        return x
    empty = jnp.zeros_like(x[:, :, :1])
    bands = [empty if i is None else x[:, :, i : i + 1] for i in plan.slots]
    return jnp.concatenate(bands, 2)


def in_psum(
    added: Float[Array, "tiles rows columns"],
    plan: ProbePlan,
    width: int,
    transpose: bool,
) -> Float[Array, "groups bands m n"]:
    """What PSUM holds in each band before the first pass of a group.

    Its axis of `m`, the last one with `transpose`, is filled up to `width`.
    """
    slots = len(plan.positions)
    more = [plan.groups * slots - plan.tiles, 0, 0]
    more[2 if transpose else 1] = width - added.shape[2 if transpose else 1]
    x = jnp.pad(added, [(0, zeros) for zeros in more])
    return _in_bands(x.reshape(plan.groups, 1, slots, *x.shape[1:]), plan)[:, 0]


def taken(
    out: Float[Array, "groups bands rows columns"], plan: ProbePlan
) -> Float[Array, "tiles rows columns"]:
    """The result of each tile, from those of all bands."""
    if plan.slots != tuple(range(len(plan.positions))):
        where = [plan.slots.index(i) for i in range(len(plan.positions))]
        out = jnp.stack([out[:, band] for band in where], 1)
    return lax.collapse(out, 0, 2)[: plan.tiles]


def addressed(
    x: Float[Array, "*tiles rows halves free"], index: tuple[int, ...] | None
) -> Float[Array, "*tiles rows halves free"]:
    """`x` with its rows read from the partitions `index`."""
    return x if index is None else x[..., np.array(index, np.int32), :, :]


def paired(
    x: Float[Array, "*tiles rows halves free"],
    indices: tuple[tuple[int, int], ...] | None,
) -> Float[Array, "*tiles rows halves free"]:
    """`x` with the logical rows `indices[i]` on its physical row `i`.

    The logical row `2 i + r` is `x[.., i, r, :]`.
    """
    if indices is None:
        return x
    return logical(x)[..., np.array(indices, np.int32), :]


def logical(
    x: Float[Array, "*tiles rows halves free"],
) -> Float[Array, "*tiles logical free"]:
    """`x` with its double rows one below the other."""
    return lax.collapse(x, x.ndim - 3, x.ndim - 1)


def doubled(
    x: Float[Array, "*tiles logical free"],
) -> Float[Array, "*tiles rows 2 free"]:
    """The inverse of `logical`; an odd number of rows gets one more, of zeros."""
    odd = x.shape[-2] % 2
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, odd), (0, 0)])
    return x.reshape(*x.shape[:-2], x.shape[-2] // 2, 2, x.shape[-1])


def unflattened(
    x: Float[Array, "*tiles rows free"], shape: tuple[int, int] | None
) -> Float[Array, "..."]:
    """`x` with its flat last axis split as `shape = (m, 2)`: `[.., rows, 2, m]`."""
    if shape is None:
        return x
    return x.reshape(*x.shape[:-1], *shape).swapaxes(-1, -2)
