"""Products of double rows: the emitter, and the merge of two halves in PSUM."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.probes import (
    packed_rules,  # noqa: F401  enters the rows
)
from neuronjax.primitives.probes.emission import Operand, emit_probe
from neuronjax.primitives.probes.facts import PACKED, facts, integers, one_of
from neuronjax.primitives.probes.macro import PACKED as NAME
from neuronjax.primitives.probes.packed_rules import PERF_MODE
from neuronjax.primitives.probes.plan import pair_of
from neuronjax.primitives.tile import PARTITIONS, MemrefTile, require_fit

Pairs = Sequence[Sequence[int]] | np.ndarray


@contracts.contracted(facts)
def packed_cayman_pe_tp_kernel(
    stationary: Operand | None = None,
    moving: Operand | None = None,
    psum: Operand | None = None,
    *,
    lhs: Operand | None = None,
    rhs: Operand | None = None,
    tile_position: Any = None,
    tile_size: tuple[int, int] | None = None,
    tile_shape: tuple[int, int] | None = None,
    transpose: bool = False,
    num_channels: int | None = None,
    perf_mode: str | None = PERF_MODE,
    double_row_indices: Pairs | None = None,
    lhs_free_and_double_row_shape: tuple[int, int] | None = None,
    stationary_index: Sequence[int] | np.ndarray | None = None,
    moving_index: Sequence[int] | np.ndarray | None = None,
    target: str | None = None,
    **hints: Any,
) -> Operand:
    r"""Emits `CaymanPackedPETranspose`, on tensors or on tiles (`is_tiled`).

    $$\mathrm{out}_{cmn} = \mathrm{psum}_{cmn} + \sum_{k,\, r \in \{0, 1\}}
      \mathrm{stationary}_{ckrm}\, \mathrm{moving}_{ckrn}$$

    Two rows to contract share a physical row, so a pass contracts up to 256. With an
    identity as `moving` and `transpose`, this is a packed transpose. Channels share
    the rows of the array as the tiles of `RowTiledMM` do.

    Args:
        stationary: `[k, 2, m]` or `[num_channels, k, 2, m]`, any floating dtype; a tile
            lies on `k` in SBUF.
        moving: `[k, 2, n]` or `[num_channels, k, 2, n]`, in the dtype of `stationary`.
        psum: as in `row_tiled_mm_kernel`.
        lhs: another name of `stationary`.
        rhs: another name of `moving`.
        tile_position: as in `row_tiled_mm_kernel`.
        tile_size: as in `row_tiled_mm_kernel`.
        tile_shape: another name of `tile_size`.
        transpose: the result is `[n, m]`, transposed in the same pass.
        num_channels: how many independent products the leading axis holds; as many as
            it has unless given.
        perf_mode: `"double_row_gen3"`, which generation 2 has not; with None each of
            the two halves is a pass of its own.
        double_row_indices: `[k, 2]`, the logical rows that share each physical row; the
            logical row `2 i + r` is `[i, r]` of both operands. It moves rows, no value.
        lhs_free_and_double_row_shape: `(m, 2)`: `stationary` arrives flat, `[.., k,
            m * 2]`, its last axis in this order.
        stationary_index: the partition from which each row of `stationary` is read; of
            more than 32 partitions `i * 32 + j` alone, which is their order.
        moving_index: the same of `moving`.
        target: the generation whose array it is; that of `neuronjax.target` unless
            named.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[m, n]` or `[num_channels, m, n]`, float32, or float64 for float64: the sums as
        PSUM holds them. For tiles a tile of them in PSUM, on its rows. The gradients of
        both operands are `CaymanPackedPETranspose` again.
    """
    left, right = one_of(stationary, lhs), one_of(moving, rhs)
    flat = pair_of(lhs_free_and_double_row_shape)
    channels = int(right.shape[0]) if len(right.shape) == 4 else 1
    columns = left.shape[-1] if flat is None else flat[0]
    return emit_probe(
        PACKED,
        NAME,
        (left, right, psum),
        (right.shape[-3], columns, channels),
        one_of(tile_size, tile_shape),
        tile_position,
        transpose=bool(transpose),
        num_channels=channels,
        perf_mode=perf_mode,
        double_row_indices=_static(double_row_indices),
        lhs_free_and_double_row_shape=flat,
        stationary_index=_static(stationary_index),
        moving_index=_static(moving_index),
        **hints,
    )


def combine_trn2_double_row_matmult_tiles(
    tiles: Sequence[MemrefTile],
) -> MemrefTile:
    """Merges two halves of a result in PSUM into one tile.

    Args:
        tiles: two tiles in PSUM of one shape, dtype and axis: the even rows of the
            result, and its odd ones. The axis on the partitions is the rows'.

    Returns:
        A tile in PSUM with twice the rows: row `2 i` from the first, row `2 i + 1` from
        the second.

    Raises:
        ValueError: there are not two tiles in PSUM, they differ, their rows together do
            not fill whole partitions, or the result does not fit PSUM.

    Source:
        The compiler's helper of this name; nothing public defines the order of its
        rows, which is this project's own.

    Example:
        >>> import jax.numpy as jnp
        >>> even, odd = jnp.zeros((2, 3)), jnp.ones((2, 3))
        >>> halves = [MemrefTile.from_tensor(x, 0, buffer="psum") for x in (even, odd)]
        >>> combine_trn2_double_row_matmult_tiles(halves).to_tensor()[:, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    function = "combine_trn2_double_row_matmult_tiles"
    given: list[Any] = list(tiles) if isinstance(tiles, list | tuple) else [tiles]
    kinds = [getattr(tile, "buffer", type(tile).__name__) for tile in given]
    if kinds != ["psum", "psum"]:
        raise ValueError(
            f"{function}: tiles must be two MemrefTiles in PSUM, got "
            f"{len(given)} in {', '.join(kinds) or 'none'}"
        )
    first, second = given
    described = [f"{tile.dtype} {tile.shape} on {tile.axis}" for tile in given]
    if described[0] != described[1]:
        raise ValueError(
            f"{function}: tiles must have one shape, dtype and axis, got "
            f"{' and '.join(described)}"
        )
    rows = 2 * first.data.shape[0] * first.data.shape[1]
    if rows > PARTITIONS and rows % PARTITIONS:
        raise ValueError(
            f"{function}: tiles must have together at most {PARTITIONS} rows or a "
            f"multiple of them, got {rows} of {described[0]}"
        )
    pair = jnp.stack([first.data, second.data], 2)
    partitions = min(rows, PARTITIONS)
    data = pair.reshape(partitions, rows // partitions, *first.data.shape[2:])
    merged = MemrefTile(data, first.axis, "psum")
    require_fit(function, tiles=merged)
    return merged


def _static(indices: Any) -> Any:
    """Indices as hashable tuples, or None."""
    if indices is None:
        return None
    held = integers(indices)
    assert held is not None
    return tuple(map(tuple, held.tolist())) if held.ndim == 2 else tuple(held.tolist())
