"""The rules of double rows: one row each."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.context import TARGETS
from neuronjax.primitives.contracts import told
from neuronjax.primitives.kinds import described, is_count
from neuronjax.primitives.probes.facts import (
    PACKED,
    integers,
    is_permutation,
    operands_of,
    shape_of,
)
from neuronjax.primitives.probes.plan import is_pair
from neuronjax.primitives.probes.rules import changed, row

PERF_MODE = "double_row_gen3"
LANES = 32
_ONLY = (PACKED,)


def _is_of(words: Any, value: Any) -> bool:
    """Whether a setting is None or one of `words`."""
    return value is None or (isinstance(value, str) and value in words)


def _odd_index(call: SimpleNamespace) -> tuple[str, Any] | None:
    """The first source whose rows no access pattern reads, and its index."""
    for name in ("stationary_index", "moving_index"):
        index = getattr(call, name)
        if index is None or not is_count(call.k):
            continue
        held = integers(index)
        if held is None or held.shape != (call.k,) or not is_permutation(held, call.k):
            shown = described(index)
            return name, shown if len(shown) < 60 else f"{shown[:60]}.."
    return None


def _unaligned(call: SimpleNamespace) -> bool:
    """Whether a source of many partitions is read otherwise than lane by lane."""
    for name in ("stationary", "moving"):
        held = integers(getattr(call, f"{name}_index"))
        if held is None or held.ndim != 1 or held.size <= LANES:
            continue
        if not np.array_equal(held, np.arange(held.size)):
            vars(call).update(src=name, index=_first(held))
            return True
    return False


def _first(held: np.ndarray) -> str:
    shown = ", ".join(map(str, held[:4].tolist()))
    return f"[{shown}, ...]"


def _bad_flat(call: SimpleNamespace) -> str:
    """A split of the flat axis that does not fit the operand, described."""
    flat = call.lhs_free_and_double_row_shape
    if flat is None:
        return ""
    left, right = map(shape_of, operands_of(call))
    whole = is_pair(flat) and left[-1:] == (flat[0] * flat[1],)
    return "" if whole and len(left) == len(right) - 1 else described(flat)


row(
    "double_rank",
    _ONLY,
    "stationary must have shape [k, 2, m] or [num_channels, k, 2, m] and moving [k, 2, "
    "n] or [num_channels, k, 2, n], got {left_shape} and {right_shape}",
    lambda c: not c.ranked and not _bad_flat(c),
    example=changed(moving=(1, 2, 4)),
)
row(
    "double_row",
    _ONLY,
    "first F dim of LHS and RHS of the double_row matmult must be 2",
    lambda c: c.ranked and c.halves != (2, 2),
    example=lambda function: (
        changed()(function) | dict(moving=np.zeros((2, 3, 4), np.float32))
    ),
    literal=True,
)
row(
    "target",
    _ONLY,
    f"target must be None or one of {', '.join(TARGETS)}, got {{shown_target}}",
    told(
        "shown_target",
        lambda c: "" if _is_of(TARGETS, c.target) else described(c.target),
    ),
    example=changed(target="gen1"),
)
row(
    "perf_mode",
    _ONLY,
    f"perf_mode must be '{PERF_MODE}', or None for a pass each half, got "
    "{shown_mode}",
    told(
        "shown_mode",
        lambda c: "" if _is_of((PERF_MODE,), c.perf_mode) else described(c.perf_mode),
    ),
    example=changed(perf_mode="double_column"),
)
row(
    "generation",
    _ONLY,
    "perf_mode=double_row_gen3 is not supported on {generation}",
    lambda c: (
        c.perf_mode is not None
        and _is_of((PERF_MODE,), c.perf_mode)
        and _is_of(("gen2",), c.generation)
    ),
    example=changed(target="gen2"),
    literal=True,
)
row(
    "flat",
    _ONLY,
    "lhs_free_and_double_row_shape must be (m, 2), whose product is the last axis of a "
    "stationary of one axis less than moving, got {shown_flat} for {left_shape} and "
    "{right_shape}",
    told("shown_flat", _bad_flat),
    example=changed(lhs_free_and_double_row_shape=(2, 2)),
)
row(
    "channels",
    _ONLY,
    "num_channels must be None or {tiles}, the products that the operands hold, got "
    "{shown_channels}",
    told(
        "shown_channels",
        lambda c: (
            ""
            if c.num_channels is None
            or (is_count(c.num_channels) and c.num_channels == c.tiles)
            else described(c.num_channels)
        ),
    ),
    example=changed(num_channels=2),
    stage=2,
)
row(
    "indices_size",
    _ONLY,
    "Unexpected double row index size",
    lambda c: (
        (held := integers(c.double_row_indices)) is not None and held.shape != (c.k, 2)
    ),
    example=changed(double_row_indices=((0, 1), (2, 3), (4, 5))),
    literal=True,
    stage=2,
)
row(
    "indices",
    _ONLY,
    "double_row_indices must be integers [k, 2], known while tracing, that name each "
    "of the 2k logical rows once, got {shown_indices}",
    told(
        "shown_indices",
        lambda c: (
            described(c.double_row_indices)
            if c.double_row_indices is not None
            and not is_permutation(c.double_row_indices, 2 * c.k)
            else ""
        ),
    ),
    example=changed(double_row_indices=((0, 1), (2, 2))),
    stage=3,
)
row(
    "lanes",
    _ONLY,
    "{src} must have indexing i * 32 + j at partition dimension for src tensor with "
    "more than 32 partitions but got {index}",
    _unaligned,
    example=changed(
        stationary=(64, 3), moving=(64, 4), moving_index=tuple(range(63, -1, -1))
    ),
    literal=True,
    stage=2,
)
row(
    "index",
    _ONLY,
    "{odd_index[0]} must name each of the k = {k} partitions of its source once, as "
    "integers known while tracing, got {odd_index[1]}",
    told("odd_index", _odd_index),
    example=changed(stationary_index=(0, 0)),
    stage=2,
)
