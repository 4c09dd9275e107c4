"""Experts of block-scaled weights: activations are rounded to blocks of 32 first.

Columns of `hidden` are swizzled. The gated values are laid out in tiles of 512; a last
tile of fewer is filled up to whole blocks, and what fills it has the bias that its
places have: it meets weights of zero, but its magnitude counts in the scale of a block.
Roundings pass a cotangent straight through, zero where a value saturates.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.blockwise_mm.experts import Expert, Gated, Pairs, Rows
from neuronjax.kernels.blockwise_mm.operands import Operands, Option, Options, sum_dtype
from neuronjax.kernels.blockwise_mm.swiglu import clamped, gated
from neuronjax.kernels.mx.formats import E4M3FN, FORMATS
from neuronjax.kernels.mx.layout import (
    BLOCK,
    HIDDEN,
    INTERMEDIATE,
    bias_to_row,
    from_blocks,
    grouped,
    row_to_bias,
    to_blocks,
)
from neuronjax.kernels.mx.linear import rounded, rounded_bwd
from neuronjax.kernels.mx.product import product_bwd, product_fwd
from neuronjax.kernels.mx.quantize import round_blocks, straight_through

Weight = tuple[jax.Array, jax.Array]


class BlockScaled:
    """Weights in containers with a power of two a block.

    An `Expert` holds `gate_up` and `down` as pairs of containers and scales; `fill` is
    `[4, Ip, tiles]`. An affinity on the gated values leaves it as it is.
    """

    def __init__(self, ops: Operands, opts: Options):
        self.ops, self.opts, self.acc = ops, opts, sum_dtype(ops)
        self.kind = FORMATS[opts.weight_format]
        self.count, self.d_ff = ops.gate_up_w.shape[0], ops.gate_up_w.shape[-1]

    def fetch(self, index: jax.Array) -> Expert:
        """Reads one expert."""

        def part(x: Option) -> Any:
            if x is None:
                return None
            return lax.dynamic_index_in_dim(x, index, keepdims=False)

        ops = self.ops
        row, fill = None, None
        if ops.gate_up_b is not None:
            bias = part(ops.gate_up_b).astype(self.acc).swapaxes(0, 1)
            row = jnp.concatenate([bias_to_row(x, self.d_ff) for x in bias])
            fill = self._fill(bias)
        down_b = None if ops.down_b is None else part(ops.down_b).astype(self.acc)
        gate_up = part(ops.gate_up_w), part(ops.gate_up_scale)
        down = part(ops.down_w), part(ops.down_scale)
        return Expert(gate_up, down, row, down_b, fill=fill)

    def _fill(self, bias: jax.Array) -> jax.Array:
        """The gated values of all places `[4, Ip, tiles]` were there no product."""
        places = bias.transpose(0, 3, 1, 2)  # [2, 4, Ip, tiles]
        rows = clamped(places.reshape(1, 2, -1), self.opts)
        return gated(rows, self.opts).reshape(places.shape[1:])

    def gate_up(self, x: Rows, expert: Expert) -> Pairs:
        """`x @ gate_up`, without the bias."""
        left = rounded(x.astype(self.acc), HIDDEN)
        weights = _gate_and_up(expert.gate_up)
        parts = [product_fwd(left, w, scale, kind=self.kind) for w, scale in weights]
        return jnp.concatenate(parts, axis=1).astype(self.acc)

    def _in_blocks(
        self, middle: Gated, expert: Expert
    ) -> Float[Array, "slots 4 p tiles"]:
        """The gated values in blocks, filled up."""
        blocks = to_blocks(middle, INTERMEDIATE)
        if expert.fill is None:
            return blocks
        is_there = to_blocks(jnp.ones(self.d_ff, middle.dtype), INTERMEDIATE) > 0
        return jnp.where(is_there, blocks, expert.fill)

    def down(self, middle: Gated, expert: Expert) -> Rows:
        """`middle @ down`, without the bias."""
        blocks = self._in_blocks(middle, expert)
        left = round_blocks(grouped(blocks), axes=BLOCK, kind=E4M3FN)
        left = left.reshape(blocks.shape)
        packed, scale = expert.down
        return product_fwd(left, packed, scale, kind=self.kind).astype(self.acc)

    def down_back(self, dy: Rows, middle: Gated, expert: Expert) -> Gated:
        """The cotangent of `middle`."""
        packed, scale = expert.down
        d_blocks = product_bwd(dy, packed, scale, kind=self.kind)
        blocks = self._in_blocks(middle, expert)
        passed = straight_through(grouped(d_blocks), grouped(blocks), BLOCK)
        return from_blocks(passed.reshape(blocks.shape), INTERMEDIATE, self.d_ff)

    def gate_up_back(self, dz: Pairs, x: Rows, expert: Expert) -> Rows:
        """The cotangent of `x`."""
        halves = dz[:, : self.d_ff], dz[:, self.d_ff :]
        pairs = zip(halves, _gate_and_up(expert.gate_up), strict=True)
        d_gate, d_up = (product_bwd(dy, *w, kind=self.kind) for dy, w in pairs)
        return rounded_bwd(d_gate + d_up, x.astype(self.acc), HIDDEN)

    def weight_grad(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """None: packed weights are constants."""
        raise TypeError("block-scaled weights are constants: they have no gradient")

    def bias_grad(self, total: jax.Array) -> jax.Array:
        """The gradient of `gate_up_b`, `[E, Ip, 2, tiles, 4]`, from `[E, 2 I]`."""
        rows = total.reshape(self.count, 2, self.d_ff)
        return jax.vmap(jax.vmap(row_to_bias))(rows).swapaxes(1, 2)


def _gate_and_up(weight: Any) -> tuple[Weight, Weight]:
    packed, scale = weight
    return (packed[:, 0], scale[:, 0]), (packed[:, 1], scale[:, 1])
