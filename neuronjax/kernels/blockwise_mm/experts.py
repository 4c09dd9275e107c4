"""The weights of the experts: one expert at a time, and the products with them.

    dense       w
    scaled      fp8 codes with a float32 scale a column, folded in after the product

Sums are float32, or float64 where an operand is. Block-scaled weights are in `mx.py`.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.blockwise_mm.narrow import take
from neuronjax.kernels.blockwise_mm.operands import (
    Operands,
    Option,
    Options,
    factor_dtype,
    sum_dtype,
)
from neuronjax.kernels.dtypes import is_differentiable

Rows = Float[Array, "slots d_model"]
Pairs = Float[Array, "slots gate_and_up"]  # 2 I columns, those of gate first
Gated = Float[Array, "slots d_ff"]


class Expert(NamedTuple):
    """The parts of one expert; columns of gate stand before those of up.

    Attributes:
        gate_up: `[H, 2 I]`.
        down: `[I, H]`.
        gate_up_b: `[2 I]`.
        down_b: `[H]`.
        gate_up_scale: `[2 I]`.
        down_scale: `[H]`.
        fill: what fills the last tile of block-scaled gated values.
    """

    gate_up: Any
    down: Any
    gate_up_b: Option = None
    down_b: Option = None
    gate_up_scale: Option = None
    down_scale: Option = None
    fill: Option = None


@runtime_checkable
class Experts(Protocol):
    """The experts of a call, whatever the form of their weights.

    Attributes:
        ops: the operands of the call.
        acc: the dtype of sums.
        count: `E`.
        d_ff: `I`.
    """

    ops: Operands
    acc: jnp.dtype
    count: int
    d_ff: int

    def fetch(self, index: jax.Array) -> Expert:
        """Reads one expert."""
        ...

    def gate_up(self, x: Rows, expert: Expert) -> Pairs:
        """`x @ gate_up`, without the bias."""
        ...

    def down(self, middle: Gated, expert: Expert) -> Rows:
        """`middle @ down`, without the bias."""
        ...

    def down_back(self, dy: Rows, middle: Gated, expert: Expert) -> Gated:
        """The cotangent of `middle` from that of what `down` gives."""
        ...

    def gate_up_back(self, dz: Pairs, x: Rows, expert: Expert) -> Rows:
        """The cotangent of `x` from that of what `gate_up` gives."""
        ...

    def weight_grad(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """The cotangent of the weight in `x @ weight`; quantized ones have none."""
        ...

    def bias_grad(self, total: jax.Array) -> jax.Array:
        """The gradient of `gate_up_b` in its layout, from `[E, 2 I]`."""
        ...


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

    def gate_up(self, x: Rows, expert: Expert) -> Pairs:
        """`x @ gate_up`, scaled and without the bias."""
        return _scaled(self._dot(x, expert.gate_up), expert.gate_up_scale)

    def down(self, middle: Gated, expert: Expert) -> Rows:
        """`middle @ down`, scaled and without the bias."""
        return _scaled(self._dot(middle, expert.down), expert.down_scale)

    def down_back(self, dy: Rows, middle: Gated, expert: Expert) -> Gated:
        """The cotangent of `middle`."""
        return self._dot_back(_scaled(dy, expert.down_scale), expert.down)

    def gate_up_back(self, dz: Pairs, x: Rows, expert: Expert) -> Rows:
        """The cotangent of `x`."""
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
