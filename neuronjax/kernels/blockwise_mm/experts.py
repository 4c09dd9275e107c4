"""The weights of the experts: one expert at a time, and the products with them.

    dense       w
    scaled      fp8 codes with a float32 scale a column, folded in after the product

Sums are float32, or float64 where an operand is. Block-scaled weights are in `mx.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.blockwise_mm.narrow import take
from neuronjax.kernels.blockwise_mm.operands import (
    Operands,
    Option,
    Options,
    factor_dtype,
    sum_dtype,
)
from neuronjax.kernels.blockwise_mm.swiglu import gated
from neuronjax.kernels.dtypes import is_differentiable


class Expert(NamedTuple):
    """The parts of one expert; columns of gate stand before those of up.

    Attributes:
        gate_up: `[H, 2 I]`.
        down: `[I, H]`.
        gate_up_b: `[2 I]`.
        down_b: `[H]`.
        gate_up_scale: `[2 I]`.
        down_scale: `[H]`.
    """

    gate_up: jax.Array
    down: jax.Array
    gate_up_b: Option
    down_b: Option
    gate_up_scale: Option
    down_scale: Option


class Dense:
    """Weights of floats: wide ones, or fp8 codes with scales.

    With `is_static` nothing that has a derivative is read as bits.
    """

    def __init__(self, ops: Operands, opts: Options, *, is_static: bool):
        self.ops, self.opts, self.is_static = ops, opts, is_static
        self.factor, self.acc = factor_dtype(ops, opts), sum_dtype(ops)
        self.count, self.d_ff = ops.gate_up_w.shape[0], ops.down_w.shape[1]

    def fetch(self, index: jax.Array) -> Expert:
        """Reads one expert."""
        ops = self.ops

        def row(x: Option) -> Option:
            if x is None:
                return None
            at = index if x.shape[0] == self.count else 0
            part = lax.dynamic_index_in_dim(x, at, keepdims=False)
            return part.reshape(-1).astype(self.acc)

        def weight(w: jax.Array) -> jax.Array:
            if self.is_static and is_differentiable(w.dtype):
                return lax.dynamic_index_in_dim(w, index, keepdims=False)
            return take(w, index)

        return Expert(
            lax.collapse(weight(ops.gate_up_w), 1).astype(self.factor),
            weight(ops.down_w).astype(self.factor),
            *map(row, (ops.gate_up_b, ops.down_b)),
            *map(row, (ops.gate_up_scale, ops.down_scale)),
        )

    def gate_up(self, x: jax.Array, expert: Expert) -> jax.Array:
        """`x @ gate_up`, `[B, 2 I]`, scaled and without the bias."""
        return _scaled(self._dot(x, expert.gate_up), expert.gate_up_scale)

    def middle(self, gate_up: jax.Array, expert: Expert) -> jax.Array:
        """The gated values `[B, I]` from `[B, 2, I]` after the clamp."""
        return gated(gate_up, self.opts)

    def down(self, middle: jax.Array, expert: Expert) -> jax.Array:
        """`middle @ down`, `[B, H]`, scaled and without the bias."""
        return _scaled(self._dot(middle, expert.down), expert.down_scale)

    def down_back(self, dy: jax.Array, gate_up: jax.Array, expert: Expert) -> jax.Array:
        """The cotangent of `middle`, `[B, I]`, from that of `down`'s result."""
        return self._dot_back(_scaled(dy, expert.down_scale), expert.down)

    def gate_up_back(self, dz: jax.Array, x: jax.Array, expert: Expert) -> jax.Array:
        """The cotangent of `x`, `[B, H]`, from that of `gate_up`'s result."""
        return self._dot_back(_scaled(dz, expert.gate_up_scale), expert.gate_up)

    def weight_grad(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """The cotangent of the weight in `x @ weight`, in the dtype of sums."""
        x = x.astype(self.factor).T
        if self.factor.itemsize == 2:
            # XLA on a CPU is slow at a 16-bit left factor that it must transpose, and
            # in jax 0.12 fails at it when the product is mapped.
            x = lax.optimization_barrier(x)
        return jnp.dot(x, dy.astype(self.factor), preferred_element_type=self.acc)

    def bias_grad(self, total: jax.Array) -> jax.Array:
        """The gradient of `gate_up_b`, `[E, 2, I]`, from `[E, 2 I]`."""
        return total.reshape(self.count, 2, self.d_ff)

    def _dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x.astype(self.factor), w, preferred_element_type=self.acc)

    def _dot_back(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(
            dy.astype(self.factor),
            w,
            (((1,), (1,)), ((), ())),
            preferred_element_type=self.acc,
        )


def _scaled(y: jax.Array, scale: Option) -> jax.Array:
    return y if scale is None else y * scale.astype(y.dtype)
