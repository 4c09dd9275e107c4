"""The transformation table, as families know it: its columns, and what fills one.

`neuronjax.tools.transformations` runs the cells.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# The columns of the transformation table.
TRANSFORMATIONS = (
    "jit",
    "plain()",
    "grad",
    "jvp",
    "hvp",
    "grad of grad",
    "vmap (0, 0, ..)",
    "vmap (0, None, ..)",
    "vmap (None, 0, ..)",
    "vmap (1, 0, ..)",
    "vmap of size 1",
    "vmap of vmap",
    "vmap of grad",
    "grad of vmap",
    "scan",
    "remat",
    "shard_map over 1",
    "shard_map over 2",
    "shard_map over 3",
    "shard_map over 5",
    "shard_map over 8",
    "explicit sharding",
    "export inline",
    "export composite",
    "export, symbolic batch",
    "bfloat16",
    "x64",
    "donation",
)
# The transformations that a family without derivatives refuses.
DERIVATIVES = (
    "grad",
    "jvp",
    "hvp",
    "grad of grad",
    "vmap of grad",
    "grad of vmap",
    "remat",
)


@dataclasses.dataclass(frozen=True)
class Example:
    """Small operands of one NAME, from which the transformation table is generated.

    Attributes:
        operands: what the family is called with (pytrees; `None` for an absent option).
        config: the config bag.
        split: for each array of `operands`, in order, the axis that a batch-parallel
            mesh may split, or `None` for one that every device holds whole.
        out_split: the same for each output.
        axis: the mesh axis over which cores cooperate in the leaf: the operands are
            those of all ranks, and `split` says how that axis divides them.
        grows: for each array of `operands` the axis whose size follows `batch`; that
            of `split` unless given.
    """

    operands: tuple[Any, ...]
    config: Mapping[str, Any]
    split: tuple[int | None, ...]
    out_split: tuple[int | None, ...]
    axis: str | None = None
    grows: tuple[int | None, ...] | None = None
