"""One output against its float64 reference, in NumPy."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.tile import PARTITIONS, nearest_partition_size

# The last distance, in units in the last place, that each column of a histogram holds.
BUCKETS = (0, 1, 2, 4, 16, 64, 1024)


@dataclasses.dataclass(frozen=True)
class Worst:
    """The element of an output that errs most.

    Attributes:
        index: where it stands in the output; in `data` if that is a tile.
        tile: partition and chunk of a tile that holds it; `None` where no tile does.
        got: what the function gives.
        plain: what the plain computation in the operands' dtype gives.
        exact: what the float64 reference gives.
        absolute: `|got - exact|`.
        relative: that over `|exact|`.
        ulps: how many numbers of the output's dtype lie from `exact` to `got`.
    """

    index: tuple[int, ...]
    tile: tuple[int, int] | None
    got: float
    plain: float
    exact: float
    absolute: float
    relative: float
    ulps: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One output, compared.

    Attributes:
        name: of the output.
        shape: of its array.
        dtype: of its array.
        exact_dtype: that of the reference: `float64`, unless the reference casts.
        worst: the element with the largest absolute error; `None` if none errs.
        absolute: the largest absolute error of the function.
        relative: its largest relative error.
        plain_absolute: the largest absolute error of the plain computation.
        allowed: the largest absolute error that the function may have.
        unequal: how many elements differ from the rounded reference.
        misplaced: how many elements are not finite where the reference is, or the
            other way round; for integers, how many differ.
        plain_misplaced: the same of the plain computation.
        ulps: how many elements are that many units in the last place away:
            `{"0": 60, "1": 4, ...}`; empty for integers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    exact_dtype: np.dtype
    worst: Worst | None
    absolute: float
    relative: float
    plain_absolute: float
    allowed: float
    unequal: int
    misplaced: int
    plain_misplaced: int
    ulps: Mapping[str, int]

    def __bool__(self) -> bool:
        """Whether the function errs at most twice what the plain computation does."""
        few = self.misplaced <= 2 * self.plain_misplaced
        return few and self.absolute <= self.allowed


def compare(
    name: str,
    got: np.ndarray,
    plain: np.ndarray,
    exact: np.ndarray,
    *,
    axis: int | None = -1,
) -> Comparison:
    """Compares one output.

    Args:
        name: of the output.
        got: what the function gives.
        plain: what the plain computation gives.
        exact: what the float64 reference gives.
        axis: the axis that lies on the partitions of a tile; `None` for the `data` of
            a tile, whose first axes are partitions and chunks.
    """
    floats = jnp.issubdtype(got.dtype, jnp.floating)
    wide, wide_plain, wide_exact = (_wide(x) for x in (got, plain, exact))
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(got.dtype)
    error, misplaced = _errors(wide, wide_exact, _wide(rounded))
    plain_error, plain_misplaced = _errors(wide_plain, wide_exact, _wide(rounded))
    if not floats:
        misplaced, plain_misplaced = error > 0, plain_error > 0
    relative = _over(error, np.abs(wide_exact))
    distance = ulps(got, rounded) if floats else np.zeros(got.shape, np.uint64)
    values = dict(got=wide, plain=wide_plain, exact=wide_exact)
    values |= dict(absolute=error, relative=relative, ulps=distance)
    plain_absolute = float(plain_error.max(initial=0))
    allowed = math.inf
    if floats:
        allowed = 2 * plain_absolute + _one_rounding(got.dtype, wide_exact)
    return Comparison(
        name=name,
        shape=got.shape,
        dtype=got.dtype,
        exact_dtype=exact.dtype,
        worst=_worst(values, misplaced, axis),
        absolute=float(error.max(initial=0)),
        relative=float(relative.max(initial=0)),
        plain_absolute=plain_absolute,
        allowed=allowed,
        unequal=int(np.sum(distance > 0) if floats else np.sum(misplaced)),
        misplaced=int(misplaced.sum()),
        plain_misplaced=int(plain_misplaced.sum()),
        ulps=histogram(distance) if floats else {},
    )


def _worst(
    values: Mapping[str, np.ndarray], misplaced: np.ndarray, axis: int | None
) -> Worst | None:
    error = np.where(misplaced, np.inf, values["absolute"])
    if not (error > 0).any():
        return None
    index = tuple(map(int, np.unravel_index(np.argmax(error), error.shape)))
    there: dict[str, Any] = {key: x[index].item() for key, x in values.items()}
    return Worst(index=index, tile=tile_of(index, error.shape, axis), **there)


def tile_of(
    index: tuple[int, ...], shape: tuple[int, ...], axis: int | None
) -> tuple[int, int] | None:
    """Partition and chunk of an element; `None` where the axis fills no tile."""
    if axis is None:
        return index[0], index[1]
    if not -len(shape) <= axis < len(shape):
        return None
    size = shape[axis]
    if nearest_partition_size(size) != size:
        return None
    chunks = size // min(size, PARTITIONS)
    return divmod(index[axis], chunks)


def ulps(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How many numbers of the dtype lie from `wanted` to `got`; both zeros are one.

    Two NaN are 0 apart; a NaN and a number as far as can be.
    """
    (sign, size), (other_sign, other_size) = _order(got), _order(wanted)
    lower, upper = np.minimum(size, other_size), np.maximum(size, other_size)
    distance = np.where(sign == other_sign, upper - lower, upper + lower)
    nan, other_nan = np.isnan(_wide(got)), np.isnan(_wide(wanted))
    distance = np.where(nan != other_nan, np.uint64(2**63), distance)
    return np.where(nan & other_nan, np.uint64(0), distance)


def histogram(distance: np.ndarray) -> dict[str, int]:
    """How many elements each range of distances holds."""
    found, low = {}, 0
    for high in BUCKETS:
        label = str(high) if low == high else f"{low}-{high}"
        found[label] = int(np.sum((distance >= low) & (distance <= high)))
        low = high + 1
    found[f">{BUCKETS[-1]}"] = int(np.sum(distance > BUCKETS[-1]))
    return found


def _order(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sign and magnitude of the bits: floats of one sign stand in the bits' order."""
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
    width = np.uint64(8 * x.dtype.itemsize - 1)
    return bits >> width, bits & np.uint64((1 << int(width)) - 1)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _errors(
    got: np.ndarray, exact: np.ndarray, rounded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Absolute errors where both are finite, and where only one of them is.

    A value too large for the dtype is infinite in the rounded reference too.
    """
    same = (got == exact) | (got == rounded) | (np.isnan(got) & np.isnan(exact))
    finite = np.isfinite(got) & np.isfinite(exact)
    both = [np.where(finite, x, 0) for x in (got, exact)]
    return np.abs(both[0] - both[1]), ~finite & ~same


def _over(error: np.ndarray, size: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(error > 0, error / size, 0)


def _one_rounding(dtype: np.dtype, exact: np.ndarray) -> float:
    """One unit in the last place of the largest finite value: luck decides below it."""
    finite = np.abs(exact[np.isfinite(exact)])
    return float(jnp.finfo(dtype).eps) * float(finite.max(initial=0))
