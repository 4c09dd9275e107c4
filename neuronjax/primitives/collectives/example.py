"""Small operands of the collectives, for the transformation table."""

from typing import Any, NamedTuple

import jax

from neuronjax.primitives.collectives import names
from neuronjax.primitives.macro import Example

AXIS = "data"
# What ranks divide in turn. A number of them that does not divide it is refused by
# `shard_map`; those of the table are 1, 2, 3, 5 and 8.
_EVEN = 120


class _Layout(NamedTuple):
    """The operands of all ranks, joined along the axes `split`.

    `grows` are the axes whose size follows the batch, `out_split` that along which the
    result is joined.
    """

    shapes: tuple[tuple[int, int], ...]
    split: tuple[int, ...]
    grows: tuple[int | None, ...]
    out_split: int
    bidirectional: bool | None = False


def _layouts(rows: int) -> dict[str, _Layout]:
    """By NAME; `bidirectional` is None where there is no ring.

    A result that every rank has whole is joined along rows.
    """
    lhs, scattered = (rows, 3), (rows, _EVEN)
    return {
        names.MATMUL: _Layout((lhs, (3, rows)), (0, 1), (0, 1), 1),
        names.MATMUL_MIRROR: _Layout(
            (scattered, (_EVEN, 3)), (1, 0), (0, None), 0, bidirectional=True
        ),
        names.MATMUL_WEIGHT: _Layout((lhs, scattered), (0, 1), (0, 0), 1),
        names.GATHER: _Layout((lhs,), (0,), (0,), 0, bidirectional=True),
        names.GATHER_MIRROR: _Layout((scattered,), (1,), (0,), 0),
        names.COLUMNS: _Layout(((3, rows),), (1,), (1,), 0, bidirectional=None),
        names.COLUMNS_MIRROR: _Layout(
            ((_EVEN, rows),), (0,), (1,), 0, bidirectional=None
        ),
    }


def example(name: str, dtype: Any, batch: int) -> Example:
    """Operands of one NAME."""
    layout = _layouts(2 * batch)[name]
    keys = jax.random.split(jax.random.key(6), len(layout.shapes))
    operands = tuple(
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, layout.shapes, strict=True)
    )
    config = dict(axis=AXIS, **names.COLLECTIVES[name]._asdict())
    if layout.bidirectional is not None:
        config |= dict(bidirectional=layout.bidirectional)
    split, out_split = layout.split, (layout.out_split,)
    return Example(operands, config, split, out_split, axis=AXIS, grows=layout.grows)
