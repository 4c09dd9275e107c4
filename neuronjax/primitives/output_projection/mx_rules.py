"""The rules of block-scaled output projections: one row each."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.contracts import Contract, Size, add
from neuronjax.primitives.output_projection.mx_facts import BLOCK
from neuronjax.primitives.output_projection.rules import EMITTER, PREFILL, SCALES
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_CALLS = (PREFILL, EMITTER)


def _row(rule: str, message: str, violated, example, **more: Any) -> None:
    more.setdefault("stage", 1)
    name, text = f"output_projection.mx_{rule}", "{function}: " + message
    add(Contract(name, _CALLS, text, violated, example=example, **more))


def _blocks(heads: int = 2, head_dim: int = 64, **changes: Any):
    """Arguments of a block-scaled call that keep the rules but for `changes`."""

    def build(function: str) -> dict[str, Any]:
        rows = heads * head_dim
        given: dict[str, Any] = dict(
            attention=np.zeros((1, heads, head_dim, 3), np.float32),
            weight=np.zeros((rows // 4, 6), jnp.uint16),
            quantization_type="MX",
            weight_scale=np.zeros((rows // BLOCK, 6), jnp.uint8),
        )
        names = dict(zip(SCALES[EMITTER], SCALES[function], strict=True))
        return {names.get(key, key): x for key, x in (given | changes).items()}

    return build


_row(
    "shapes",
    "MX packs four rows to a container and scales 32: {mx_unlike}",
    lambda c: c.mx_unlike,
    _blocks(weight_scale=np.zeros((4, 6), np.float32)),
)
_row(
    "blocks",
    "MX scales blocks of 32 rows: N*D must be a multiple of 32 for attention, got "
    "{attention_shape}",
    None,
    _blocks(2, 24),
    size=Size("N*D", lambda c: c.mx_rows, multiple=BLOCK),
)
_row(
    "tiles",
    "MX takes tensors: packed weights lie on their partitions as they are",
    lambda c: c.is_mx and c.tiled,
    lambda function: {
        key: MemrefTile.from_tensor(x, 2 if key == "attention" else 1)
        if hasattr(x, "ndim")
        else x
        for key, x in _blocks()(function).items()
    },
)
_row(
    "chip_rows",
    "the chip takes N*D in multiples of 128 for MX, got {attention_shape}",
    None,
    _blocks(2, 16),
    size=Size("N*D", lambda c: c.mx_rows if c.is_mx else 128, multiple=PARTITIONS),
    tag="hw",
    stage=3,
)
