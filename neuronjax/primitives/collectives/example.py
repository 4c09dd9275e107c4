"""Small operands of the collectives, for the transformation table."""

from typing import Any

import jax

from neuronjax.primitives.collectives.names import (
    COLLECTIVES,
    COLUMNS,
    COLUMNS_MIRROR,
    GATHER,
    GATHER_MIRROR,
    MATMUL,
    MATMUL_MIRROR,
    MATMUL_WEIGHT,
)
from neuronjax.primitives.macro import Example

AXIS = "data"
# A size that every number of ranks in the table divides.
_EVEN = 120


def example(name: str, dtype: Any, batch: int) -> Example:
    """Operands of all ranks, joined along the axis over which they are divided.

    A result that every rank has whole is joined along rows.
    """
    rows = 2 * batch
    shapes, split, grows, out_split = {
        MATMUL: (((rows, 3), (3, rows)), (0, 1), (0, 1), 1),
        MATMUL_MIRROR: (((rows, _EVEN), (_EVEN, 3)), (1, 0), (0, None), 0),
        MATMUL_WEIGHT: (((rows, 3), (rows, _EVEN)), (0, 1), (0, 0), 1),
        GATHER: (((rows, 3),), (0,), (0,), 0),
        GATHER_MIRROR: (((rows, _EVEN),), (1,), (0,), 0),
        COLUMNS: (((3, rows),), (1,), (1,), 0),
        COLUMNS_MIRROR: (((_EVEN, rows),), (0,), (1,), 0),
    }[name]
    keys = jax.random.split(jax.random.key(6), len(shapes))
    operands = tuple(
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    config = dict(axis=AXIS, **COLLECTIVES[name]._asdict())
    if name not in (COLUMNS, COLUMNS_MIRROR):
        config |= dict(bidirectional=name in (MATMUL_MIRROR, GATHER))
    return Example(operands, config, split, (out_split,), axis=AXIS, grows=grows)
