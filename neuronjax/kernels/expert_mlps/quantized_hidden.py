"""Hidden states that come in blocks already: they are not rounded again.

Rounding twice is not rounding once: a block whose largest value is 1.875 times a power
of two, as codes may have it, would saturate at 1.75 times that.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.blockwise_mm.experts import Expert
from neuronjax.kernels.blockwise_mm.mx import BlockScaled
from neuronjax.kernels.expert_mlps.operands import Operands
from neuronjax.kernels.mx.formats import E4M3FN
from neuronjax.kernels.mx.layout import (
    HIDDEN,
    PARTITIONS,
    TILE,
    dequantized,
    from_blocks,
    to_blocks,
)
from neuronjax.kernels.mx.product import product_fwd


def rows_of(ops: Operands) -> Float[Array, "tokens d_model"]:
    """The float32 rows that containers `[128, H/512, T]` hold."""
    blocks = dequantized(ops.hidden, ops.hidden_scale, E4M3FN)
    width = ops.hidden.shape[0] * ops.hidden.shape[1] * (TILE // PARTITIONS)
    return from_blocks(jnp.moveaxis(blocks, -1, 0), HIDDEN, width)


class Rounded(BlockScaled):
    """Block-scaled experts of rows that are values of the format."""

    def gate_up(self, x: jax.Array, expert: Expert) -> jax.Array:
        """`x @ gate_up`, `[B, 2 I]`, without the bias."""
        left, (packed, scale) = to_blocks(x, HIDDEN), expert.gate_up
        parts = [
            product_fwd(left, packed[:, side], scale[:, side], kind=self.kind)
            for side in (0, 1)
        ]
        return jnp.concatenate(parts, axis=1).astype(self.acc)
