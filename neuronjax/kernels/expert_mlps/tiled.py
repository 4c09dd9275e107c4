"""A decode step's experts on tiles `[partition, chunk, *other axes]`.

Products contract over `(partition, chunk)` of the tiles as they lie: no hidden state
and no weight is laid out again. What lies on tokens, which nothing contracts, is read
as rows. Blocks that hold tokens come first, and the loop ends behind them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from neuronjax.kernels.blockwise_mm import operands as blocks
from neuronjax.kernels.blockwise_mm.narrow import from_bits, to_bits
from neuronjax.kernels.blockwise_mm.swiglu import clamped, gated
from neuronjax.kernels.dtypes import accumulator, is_differentiable, promoted
from neuronjax.kernels.expert_mlps.operands import Operands
from neuronjax.kernels.loop_bounds import most
from neuronjax.kernels.shard_common import settled

_EXPERT_AXIS = 2
Tokens = Float[Array, "p c tokens"]


class Slots(NamedTuple):
    """The slots of the blocks.

    Attributes:
        token: `[N, B]`; the number of tokens, where a slot is empty.
        affinity: `[N, B]`, or None: each is 1.
        expert: `[N]`.
    """

    token: Int[Array, "blocks slots"]
    affinity: blocks.Option
    expert: Int[Array, " blocks"]


def tiled_blocks(
    ops: Operands, slots: Slots, opts: blocks.Options, *, is_static: bool
) -> Tokens:
    """The sum over the slots of each token, in the dtype of sums."""
    experts = _Experts(ops, opts, is_static)
    first = jnp.zeros(ops.hidden.shape, experts.acc)

    def visit(out: Tokens, slot: Slots) -> Tokens:
        y = experts.block(slot.token, slot.expert)
        if slot.affinity is not None:
            y = y * slot.affinity.astype(y.dtype)
        return out.at[:, :, slot.token].add(y, mode="drop")

    zeroth = jax.tree.map(lambda x: x[0], slots)
    first = settled(lambda out: visit(out, zeroth), first, ops, slots)
    if is_static:
        return lax.scan(lambda out, slot: (visit(out, slot), None), first, slots)[0]
    busy = (slots.token < ops.hidden.shape[-1]).any(1).sum(dtype=jnp.int32)

    def turn(i: Any, out: Tokens) -> Tokens:
        return visit(out, jax.tree.map(lambda x: x[i], slots))

    return lax.fori_loop(0, most(busy), turn, first)


class _Experts:
    """The experts' weights on tiles; `is_static` reads none of floats as bits."""

    def __init__(self, ops: Operands, opts: blocks.Options, is_static: bool):
        self.ops, self.opts, self.is_static = ops, opts, is_static
        dtypes = [x.dtype for x in ops if x is not None]
        floats = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
        self.acc = accumulator(*floats)
        weights = ops.gate_up_w.dtype, ops.down_w.dtype
        self.factor = promoted(ops.hidden.dtype, *weights)

    def block(self, token: jax.Array, expert: jax.Array) -> Tokens:
        """What one expert makes of the tokens of a block, `[p, c, B]`."""
        ops, opts = self.ops, self.opts
        x = ops.hidden.at[:, :, token].get(mode="fill", fill_value=0)
        gate_up_w = self._of(ops.gate_up_w, expert)
        z = self._product("pcsi,pcb->isb", gate_up_w, x)
        on_i = ops.down_w.shape[:2]
        z = z.reshape(*on_i, *z.shape[1:])
        z = self._scaled(z, ops.gate_up_scale, ops.gate_up_b, expert)
        middle = gated(clamped(lax.collapse(z, 0, 2), opts), opts)
        middle = middle.reshape(*on_i, middle.shape[-1])
        y = self._product("pch,pcb->hb", self._of(ops.down_w, expert), middle)
        y = y.reshape(*ops.hidden.shape[:2], y.shape[-1])
        return self._scaled(y, ops.down_scale, ops.down_b, expert)

    def _of(self, x: Shaped[Array, "p c experts ..."], expert: jax.Array) -> jax.Array:
        """The part of one expert."""
        if self.is_static and is_differentiable(x.dtype):
            return lax.dynamic_index_in_dim(x, expert, _EXPERT_AXIS, keepdims=False)
        # As in `narrow.take`: XLA on a CPU would widen the whole array in the loop.
        held, expert = lax.optimization_barrier((x, expert))
        part = lax.dynamic_index_in_dim(
            to_bits(held), expert, _EXPERT_AXIS, keepdims=False
        )
        return from_bits(part, x.dtype)

    def _product(self, spec: str, w: jax.Array, x: jax.Array) -> jax.Array:
        factors = w.astype(self.factor), x.astype(self.factor)
        return jnp.einsum(spec, *factors, preferred_element_type=self.acc)

    def _scaled(
        self, y: jax.Array, scale: blocks.Option, bias: blocks.Option, expert: jax.Array
    ) -> jax.Array:
        """`y * scale + bias`, a value of both for each column of the expert."""
        if scale is not None:
            y = y * self._of(scale, expert)[..., None].astype(y.dtype)
        if bias is not None:
            y = y + self._of(bias, expert)[..., None].astype(y.dtype)
        return y
