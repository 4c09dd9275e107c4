"""Row-tiled, column-tiled and packed products, as their plan has them.

    out[t, m, n] = sum_k stationary[t, k, m] * moving[t, k, n]

and with double rows `out[t, m, n] = sum_{k, r} stationary[t, k, r, m] *
moving[t, k, r, n]`. One product of the array a pass: its 128 rows and columns are cut
into bands, and a band meets no other. Passes of one group add into the same PSUM.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.hw_ubench.layout import (
    addressed,
    data_of,
    in_psum,
    loaded,
    paired,
    stacked,
    taken,
    tensor_of,
    unflattened,
)
from neuronjax.kernels.hw_ubench.plan import ProbePlan, plan_of

KIND = {
    "RowTiledMM": "row",
    "ColumnTiledMM": "column",
    "CaymanPackedPETranspose": "packed",
}


def tiled_mm_fwd(
    stationary: Float[Array, "..."],
    moving: Float[Array, "..."],
    added: Float[Array, "..."] | None,
    *,
    name: str,
    tile_size: tuple[int, int],
    tile_position: tuple[tuple[int, int], ...],
    transpose: bool,
    is_tiled: bool,
    psum: str,
    **hints: Any,
) -> tuple[Array]:
    """Returns `(out,)`: `[*tiles, m, n]`, transposed `[*tiles, n, m]`, float32.

    `stationary` is `[k, m]` or `[tiles, k, m]` and `moving` alike with `n`. `added` is
    what PSUM holds before, of the shape of `out`; `psum` says whether there is any.
    Float64 operands are summed in float64. On tiles (`is_tiled`) the axis after `tiles`
    lies on the partitions, in operands and result. `hints` change no value.
    """
    if is_tiled:
        stationary, moving = (tensor_of(x, 2) for x in (stationary, moving))
        added = None if added is None else tensor_of(added, 2)
    s, x = (stacked(y, 2)[:, :, None] for y in (stationary, moving))
    tiles, k, _, m = s.shape
    plan = plan_of(KIND[name], tiles, k, m, tile_size, tile_position)
    out = _by_plan(s, x, added, plan, transpose, alone=moving.ndim == 2)
    return (data_of(out, 2) if is_tiled else out,)


def packed_fwd(
    stationary: Float[Array, "..."],
    moving: Float[Array, "..."],
    added: Float[Array, "..."] | None,
    *,
    name: str,
    tile_size: tuple[int, int],
    tile_position: tuple[tuple[int, int], ...],
    transpose: bool,
    is_tiled: bool,
    psum: str,
    perf_mode: str | None,
    double_row_indices: tuple[tuple[int, int], ...] | None,
    lhs_free_and_double_row_shape: tuple[int, int] | None,
    stationary_index: tuple[int, ...] | None,
    moving_index: tuple[int, ...] | None,
    **hints: Any,
) -> tuple[Array]:
    """Returns `(out,)` as `tiled_mm_fwd` does, of operands with double rows.

    `stationary` is `[k, 2, m]` or `[num_channels, k, 2, m]`, flat with
    `lhs_free_and_double_row_shape`; `moving` alike with `n`. Rows are read from the
    partitions of `*_index`, then paired as `double_row_indices` has them. Without
    `perf_mode` each half is a pass of its own.
    """
    flat = lhs_free_and_double_row_shape
    if is_tiled:
        stationary = tensor_of(stationary, 3 if flat is None else 2)
        moving = tensor_of(moving, 3)
        added = None if added is None else tensor_of(added, 2)
    s = paired(
        addressed(unflattened(stationary, flat), stationary_index), double_row_indices
    )
    x = paired(addressed(moving, moving_index), double_row_indices)
    s, x = stacked(s, 3), stacked(x, 3)
    tiles, k, _, m = s.shape
    double = perf_mode is not None
    plan = plan_of("packed", tiles, k, m, tile_size, tile_position, double)
    out = _by_plan(s, x, added, plan, transpose, alone=moving.ndim == 3)
    return (data_of(out, 2) if is_tiled else out,)


def _by_plan(
    stationary: Array,
    moving: Array,
    added: Array | None,
    plan: ProbePlan,
    transpose: bool,
    *,
    alone: bool,
) -> Array:
    """The products of stacked operands; of one that was `alone`, without `tiles`."""
    added = None if added is None else stacked(added, 2)
    out = passes(stationary, moving, added, plan, transpose)
    return out[0] if alone else out


def passes(
    stationary: Float[Array, "tiles k halves m"],
    moving: Float[Array, "tiles k halves n"],
    added: Float[Array, "tiles rows columns"] | None,
    plan: ProbePlan,
    transpose: bool,
) -> Float[Array, "tiles rows columns"]:
    """The products of all tiles: one of the array a pass, group after group."""
    m = stationary.shape[3]
    factor = promoted(stationary.dtype, moving.dtype)
    acc = accumulator(factor)
    columns = plan.tile_size[1] if plan.kind == "column" else None
    held = [loaded(stationary.astype(factor), plan, columns)]
    held.append(loaded(moving.astype(factor), plan))
    if added is not None:
        held.append(in_psum(added.astype(acc), plan, held[0].shape[-1], transpose))

    def group(operands: list[jax.Array]) -> jax.Array:
        return group_of_passes(*operands, plan=plan, transpose=transpose)

    if plan.groups == 1:
        out = group([x[0] for x in held])[None]
    else:
        out = lax.map(group, held)
    out = taken(out, plan)
    return out[:, :, :m] if transpose else out[:, :m]


def group_of_passes(
    stationary: Float[Array, "chunks bands band halves width"],
    moving: Float[Array, "chunks bands band halves n"],
    added: Float[Array, "bands rows columns"] | None = None,
    *,
    plan: ProbePlan,
    transpose: bool,
) -> Float[Array, "bands rows columns"]:
    """What PSUM holds after the last pass of a group; the first overwrites it."""
    spec = "brhm,brhn->bnm" if transpose else "brhm,brhn->bmn"
    acc, total = accumulator(stationary.dtype), added
    for chunk in range(plan.chunks):
        for halves in plan.halves:
            part = slice(halves[0], halves[-1] + 1)
            rows = stationary[chunk, :, :, part], moving[chunk, :, :, part]
            product = jnp.einsum(spec, *rows, preferred_element_type=acc)
            total = product if total is None else total + product
    assert total is not None
    return total
