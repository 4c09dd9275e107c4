"""What the rules of the matmul probes read of a call."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.context import settings
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.hw_ubench.plan import default_size
from neuronjax.primitives.kinds import is_count, is_on
from neuronjax.primitives.options import FLOATS, odd_dtype
from neuronjax.primitives.probes import plan
from neuronjax.primitives.tile import MemrefTile

ROW, COLUMN = "row_tiled_mm_kernel", "column_tiled_mm_kernel"
PACKED = "packed_cayman_pe_tp_kernel"
KINDS = {ROW: "row", COLUMN: "column", PACKED: "packed"}


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes by their names, 1 where an operand has not the axes for them."""
    left, right = operands_of(call)
    rank = 3 if call.function == PACKED else 2
    shapes = _unflat(shape_of(left), _flat_shape(call)), shape_of(right)
    ranked = len(shapes[0]) == len(shapes[1]) and len(shapes[1]) in (rank, rank + 1)
    sizes = _sizes(*shapes, rank) if ranked else _NONE
    tiled = isinstance(left, MemrefTile)
    return dict(
        sizes,
        left=left,
        left_shape=shape_of(left),
        right_shape=shapes[1],
        ranked=ranked,
        tiled=tiled,
        odd_tile=_odd_tile(call, rank, left, right) if tiled and ranked else "",
        out_shape=_out_shape(call, sizes, len(shapes[1]) > rank),
        psum_shape=shape_of(call.psum),
        generation=settings().target if _target(call) is None else _target(call),
        **_dtypes(call, left, right),
        **_bands(call, sizes),
    )


def _dtypes(call: SimpleNamespace, left: Any, right: Any) -> dict[str, Any]:
    dtypes: list[Any] = [getattr(x, "dtype", None) for x in (left, right)]
    known = all(dtype in FLOATS for dtype in dtypes)
    return dict(
        odd_dtype=odd_dtype(dict(stationary=left, moving=right)),
        dtypes=" and ".join(map(str, dtypes)),
        alike=len(set(dtypes)) == 1,
        acc=str(accumulator(*dtypes)) if known else "",
        psum_dtype=str(getattr(call.psum, "dtype", None)),
    )


def _bands(call: SimpleNamespace, sizes: dict[str, Any]) -> dict[str, Any]:
    kind = KINDS[call.function]
    size = one_of(call.tile_size, call.tile_shape)
    odd = plan.odd_size(kind, size)
    band = plan.pair_of(size) if not odd else None
    band = band or default_size(kind, *_ints(sizes["k"], sizes["m"]))
    return dict(
        odd_size=odd,
        both_sizes=call.tile_size is not None and call.tile_shape is not None,
        band=band,
        odd_position=plan.odd_positions(call.tile_position, band, sizes["tiles"]),
    )


def operands_of(call: SimpleNamespace) -> tuple[Any, Any]:
    """The stationary and the moving operand, by whichever name they came."""
    return one_of(call.stationary, call.lhs), one_of(call.moving, call.rhs)


def one_of(x: Any, other: Any) -> Any:
    """An argument that has two names, by whichever it came."""
    return other if x is None else x


def shape_of(x: Any) -> tuple[Any, ...]:
    """The shape of an operand; () where it has none."""
    return tuple(getattr(x, "shape", ()))


_NONE = dict(tiles=1, tiles_moving=1, k=1, k_moving=1, m=1, n=1, halves=(2, 2))


def _sizes(left: tuple, right: tuple, rank: int) -> dict[str, Any]:
    stacked = len(right) > rank
    return dict(
        tiles=left[0] if stacked else 1,
        tiles_moving=right[0] if stacked else 1,
        k=left[-rank],
        k_moving=right[-rank],
        m=left[-1],
        n=right[-1],
        halves=(left[-2], right[-2]) if rank == 3 else (2, 2),
    )


def _flat_shape(call: SimpleNamespace) -> Any:
    return getattr(call, "lhs_free_and_double_row_shape", None)


def _target(call: SimpleNamespace) -> Any:
    return getattr(call, "target", None)


def _unflat(shape: tuple, flat: Any) -> tuple:
    """The shape `[.., k, 2, m]` of an operand that arrives as `[.., k, m * 2]`."""
    if flat is None or not plan.is_pair(flat) or not shape:
        return shape
    m, halves = flat
    return (*shape[:-1], halves, m)


def _ints(*sizes: Any) -> list[int]:
    """Sizes that are known; the largest for a symbolic one."""
    return [int(size) if is_count(size, 0) else 128 for size in sizes]


def _out_shape(call: SimpleNamespace, sizes: dict[str, Any], stacked: bool) -> tuple:
    shape = (sizes["m"], sizes["n"])
    shape = shape[::-1] if is_on(call.transpose) else shape
    return (sizes["tiles"], *shape) if stacked else shape


def _odd_tile(call: SimpleNamespace, rank: int, left: Any, right: Any) -> str:
    """The first tile that lies on another axis, or in another memory, than it can."""
    stacked = len(shape_of(right)) > rank
    for name, x in dict(stationary=left, moving=right, psum=call.psum).items():
        if not isinstance(x, MemrefTile):
            continue
        if x.axis != int(stacked):
            rows = "rows of the result" if name == "psum" else "k"
            return f"{name} must lie on axis {int(stacked)}, the {rows}, got {x.axis}"
        if x.buffer != ("psum" if name == "psum" else "sbuf"):
            wanted = "PSUM" if name == "psum" else "SBUF: to_sbuf() copies it there"
            return f"{name} must lie in {wanted}"
    return ""


def is_permutation(indices: Any, count: int) -> bool:
    """Whether integers name each of `range(count)` once."""
    held = integers(indices)
    return held is not None and sorted(held.ravel().tolist()) == list(range(count))


def integers(indices: Any) -> np.ndarray | None:
    """Indices that are known while tracing; None for anything else."""
    if isinstance(indices, tuple | list) or type(indices) is np.ndarray:
        try:
            held = np.asarray(indices)
        except (ValueError, TypeError):
            return None
        return held if held.dtype.kind in "iu" else None
    return None


def example_operands(function: str) -> dict[str, Any]:
    """Operands that keep the rules: two rows, three columns, four positions."""
    middle = (2,) if function == PACKED else ()
    return dict(
        stationary=np.zeros((2, *middle, 3), np.float32),
        moving=np.zeros((2, *middle, 4), np.float32),
    )


def example_tiles(function: str) -> dict[str, Any]:
    """The same, as tiles."""
    given = example_operands(function)
    return {k: MemrefTile.from_tensor(jnp.asarray(x), 0) for k, x in given.items()}
