"""Row-tiled and column-tiled products: their emitters."""

from typing import Any

from neuronjax.primitives import contracts
from neuronjax.primitives.probes import (
    rules,  # noqa: F401  enters the rows
)
from neuronjax.primitives.probes.emission import Operand, emit_probe
from neuronjax.primitives.probes.facts import COLUMN, ROW, facts, one_of
from neuronjax.primitives.probes.macro import COLUMN as COLUMN_NAME
from neuronjax.primitives.probes.macro import ROW as ROW_NAME


@contracts.contracted(facts)
def row_tiled_mm_kernel(
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
    **hints: Any,
) -> Operand:
    r"""Emits `RowTiledMM`, on tensors or on tiles (`is_tiled`).

    $$\mathrm{out}_{tmn} = \mathrm{psum}_{tmn} +
      \sum_k \mathrm{stationary}_{tkm}\, \mathrm{moving}_{tkn}$$

    The 128 contraction rows of the array are cut into bands of 32, 64 or 128: as many
    tiles as there are bands meet in one pass, each in its own rows. `probe_plan("row",
    ..)` says which lies where, and the leaf multiplies so: a NaN stays in its tile.

    Args:
        stationary: `[k, m]` or `[tiles, k, m]`, any floating dtype; a tile lies on `k`
            in SBUF.
        moving: `[k, n]` or `[tiles, k, n]`, in the dtype of `stationary`.
        psum: what the PSUM group holds already, of the result's shape and dtype; a tile
            in PSUM, on its rows. None starts a group.
        lhs: another name of `stationary`.
        rhs: another name of `moving`.
        tile_position: row and column of the bands that a pass uses, one pair or
            several; all bands unless given.
        tile_size: rows and columns of a band; the smallest that holds `k` unless given.
        tile_shape: another name of `tile_size`.
        transpose: the result is `[n, m]`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[m, n]` or `[tiles, m, n]`, float32, or float64 for float64: the sums as PSUM
        holds them. For tiles a tile of them in PSUM, on its rows. The gradients of
        both operands are `RowTiledMM` again.
    """
    operands = one_of(stationary, lhs), one_of(moving, rhs), psum
    size = one_of(tile_size, tile_shape)
    config = dict(hints, transpose=bool(transpose))
    return emit_probe(
        ROW, ROW_NAME, operands, _sizes(operands[0]), size, tile_position, **config
    )


@contracts.contracted(facts)
def column_tiled_mm_kernel(
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
    **hints: Any,
) -> Operand:
    """Emits `ColumnTiledMM`, on tensors or on tiles (`is_tiled`).

    The products of `row_tiled_mm_kernel`. Here the 128 columns of the array are cut:
    each tile has all rows, and writes its own band of the result's partitions.

    Args:
        stationary: as in `row_tiled_mm_kernel`; `m` at most the columns of a band.
        moving: as in `row_tiled_mm_kernel`.
        psum: as in `row_tiled_mm_kernel`.
        lhs: another name of `stationary`.
        rhs: another name of `moving`.
        tile_position: as in `row_tiled_mm_kernel`.
        tile_size: rows and columns of a band; the smallest that holds `m` unless given.
        tile_shape: another name of `tile_size`.
        transpose: the result is `[n, m]`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        As `row_tiled_mm_kernel`; the gradients are `ColumnTiledMM` again.
    """
    operands = one_of(stationary, lhs), one_of(moving, rhs), psum
    size = one_of(tile_size, tile_shape)
    config = dict(hints, transpose=bool(transpose))
    return emit_probe(
        COLUMN,
        COLUMN_NAME,
        operands,
        _sizes(operands[0]),
        size,
        tile_position,
        **config,
    )


def _sizes(x: Any) -> tuple[Any, Any, int]:
    """Rows, columns and tiles of the stationary operand."""
    return x.shape[-2], x.shape[-1], x.shape[0] if len(x.shape) == 3 else 1
