"""The backward of the blockwise experts, from what the forward stored.

With `D = d_out[token]`, `y = down` and `m = act(g) * u` of a block with one expert:

    d_affinity = sum_h D * y;  dY = affinity * D    NO_SCALE, PRE_SCALE: dY = D
    d_down  += m^T dY
    dM       = dY @ down^T
    dU, dG   = dM * act(g), dM * u * act'(g)        zero where clamped
    d_gate_up += x^T [dG, dU]
    d_hidden[token] += [dG, dU] @ gate_up^T         PRE_SCALE: times the affinity

Four products a block, and none of the forward's again unless it stored nothing. The
gradient of a weight is summed over the blocks of its expert and written once; an expert
without a token gets exactly zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from neuronjax.kernels.blockwise_mm.experts import Expert, Experts
from neuronjax.kernels.blockwise_mm.forms import experts_of
from neuronjax.kernels.blockwise_mm.forward import (
    block_fwd,
    scaled_rows,
    serves_nobody,
)
from neuronjax.kernels.blockwise_mm.narrow import (
    from_bits,
    put,
    take,
    take_rows,
    to_bits,
)
from neuronjax.kernels.blockwise_mm.operands import Operands, Option, Options
from neuronjax.kernels.blockwise_mm.slots import Slots, slots_of, visits_of
from neuronjax.kernels.blockwise_mm.swiglu import (
    clamped_bwd,
    gated,
    gated_bwd,
    saturated,
)
from neuronjax.kernels.loop_bounds import most
from neuronjax.kernels.shard_common import settled

WEIGHTS = ("gate_up_w", "down_w", "gate_up_b", "down_b")
Grads = dict[str, jax.Array]


class Given(NamedTuple):
    """What the backward takes beside the operands.

    Attributes:
        gate_up: `[N, 2, I, B]`, or None: it is computed again.
        down: `[N, B, H]`, or None.
        d_out: `[R, H]`.
        d_gate_up: the cotangent of `gate_up`, or None.
        d_down: that of `down`, or None.
    """

    gate_up: Option
    down: Option
    d_out: jax.Array
    d_gate_up: Option
    d_down: Option

    @property
    def by_block(self) -> tuple[Option, ...]:
        """Gate and up as rows `[N, B, 2, I]`, down, and the cotangents of both."""
        gate_up, d_gate_up = (
            None if x is None else x.transpose(0, 3, 1, 2)
            for x in (self.gate_up, self.d_gate_up)
        )
        return gate_up, self.down, d_gate_up, self.d_down


class BlockGrads(NamedTuple):
    """The gradients of one block: of its rows, their affinities, and the weights."""

    hidden: jax.Array
    affinity: jax.Array
    weights: Grads


class Rows(NamedTuple):
    """The rows of one block; an empty slot may have stored anything."""

    x: Float[Array, "slots d_model"]
    d_out: Float[Array, "slots d_model"]
    affinity: Float[Array, " slots"]
    is_token: Bool[Array, " slots"]


def block_bwd(
    rows: Rows, held: tuple, expert: Expert, experts: Experts, opts: Options, wrt: tuple
) -> BlockGrads:
    """The gradients of one block; `held` is its part of `Given.by_block`."""
    x, column = rows.x, rows.affinity[:, None]
    gate_up, down, d_gate_up, d_down = held
    if gate_up is None:
        found = block_fwd(x, rows.affinity, expert, experts, opts)
        gate_up, down = (saturated(z, x.dtype) for z in found)
    d = rows.d_out.astype(experts.acc)
    is_after = opts.scaling == "POST_SCALE" and not opts.on_intermediate
    dy = _plus(d * column if is_after else d, d_down, rows)
    known = jnp.where(rows.is_token[:, None, None], gate_up, 0)
    fed = middle = gated(known.astype(experts.acc), opts)
    if opts.on_intermediate:
        fed = middle * column
    d_middle = experts.down_back(dy, fed, expert)
    d_affinity = (d * down.astype(d.dtype)).sum(1) if is_after else None
    if opts.shard == "hidden":
        d_middle, d_affinity = _summed(d_middle, d_affinity, opts)
    if opts.on_intermediate:
        d_affinity, d_middle = (d_middle * middle).sum(1), d_middle * column
    dz = _plus(gated_bwd(d_middle, known, opts), d_gate_up, rows)
    dz = lax.collapse(clamped_bwd(dz, known, opts), 1)
    scaled = scaled_rows(x, rows.affinity, opts)
    dx = experts.gate_up_back(dz, scaled, expert)
    if opts.scaling == "PRE_SCALE":
        d_affinity = (dx * x.astype(dx.dtype)).sum(1)
        dx = dx * column
    if d_affinity is None:
        d_affinity = jnp.zeros_like(rows.affinity)
    find = dict(
        gate_up_w=lambda: experts.weight_grad(scaled, dz),
        down_w=lambda: experts.weight_grad(fed, _own_columns(dy, x, opts)),
        gate_up_b=lambda: dz.sum(0),
        down_b=lambda: dy.sum(0),
    )
    return BlockGrads(dx, d_affinity, {key: find[key]() for key in wrt})


def _plus(dx: jax.Array, d_stored: Option, rows: Rows) -> jax.Array:
    """`dx` and the cotangent of what was stored, of which an empty slot has none."""
    if d_stored is None:
        return dx
    is_token = lax.expand_dims(rows.is_token, range(1, dx.ndim))
    return dx + jnp.where(is_token, d_stored, 0).astype(dx.dtype)


def _summed(d_middle: jax.Array, d_affinity: Option, opts: Options) -> tuple:
    """Both sums over H, whose parts the cores hold, in one exchange."""
    if d_affinity is None:
        return lax.psum(d_middle, opts.axis), None
    both = jnp.concatenate([d_middle, d_affinity[:, None]], 1)
    both = lax.psum(both, opts.axis)
    return both[:, :-1], both[:, -1]


def _own_columns(dy: jax.Array, x: jax.Array, opts: Options) -> jax.Array:
    """The columns of `dy` that are this core's, as those of `x` are."""
    if opts.shard != "columns":
        return dy
    width = x.shape[1]
    first = lax.axis_index(opts.axis) * width
    return lax.dynamic_slice_in_dim(dy, first, width, axis=1)


class _Walk:
    """The turns of both loops: over experts, and over the blocks of one."""

    def __init__(
        self, ops: Operands, given: Given, slots: Slots, experts: Experts, opts: Options
    ):
        self.ops, self.d_out, self.by_block = ops, given.d_out, given.by_block
        self.slots, self.experts, self.opts = slots, experts, opts
        self.visits = visits_of(slots, ops.hidden.shape[0], experts.count)

    def block(self, j, carry: BlockGrads, index, expert: Expert) -> BlockGrads:
        """Adds block `j` of an expert; `carry.weights` are the sums of that expert."""
        visits, rows = self.visits, self.ops.hidden.shape[0]
        last = self.slots.token.shape[0] - 1
        block = visits.block[jnp.minimum(visits.first[index] + j, last)]
        is_own = j < visits.blocks[index]
        token = jnp.where(is_own, self.slots.token[block], rows)
        x, d_out = take_rows(self.ops.hidden, token), take_rows(self.d_out, token)
        own = Rows(x, d_out, self.slots.affinity[block], token < rows)
        held = tuple(None if x is None else take(x, block) for x in self.by_block)
        wrt = tuple(carry.weights)
        found = block_bwd(own, held, expert, self.experts, self.opts, wrt)
        old = lax.dynamic_index_in_dim(carry.affinity, block, keepdims=False)
        affinity = jnp.where(is_own, found.affinity, old)
        return BlockGrads(
            carry.hidden.at[token].add(found.hidden, mode="drop"),
            put(carry.affinity, affinity, block),
            {key: x + found.weights[key] for key, x in carry.weights.items()},
        )

    def expert(self, i, carry: BlockGrads, sums: Grads, dtypes: dict) -> BlockGrads:
        """Adds an expert's blocks, from zero `sums`, and writes its weights' once."""
        index = self.visits.expert[i]
        expert = self.experts.fetch(index)
        found = lax.fori_loop(
            0,
            most(self.visits.blocks[index]),
            lambda j, carry: self.block(j, carry, index, expert),
            carry._replace(weights=sums),
        )
        parts = {key: x.astype(dtypes[key]) for key, x in found.weights.items()}
        totals = {key: put(x, parts[key], index) for key, x in carry.weights.items()}
        return found._replace(weights=totals)


def expert_blocks_bwd(
    ops: Operands,
    given: Given,
    slots: Slots,
    experts: Experts,
    opts: Options,
    wrt: tuple,
) -> BlockGrads:
    """The gradients of all rows, slots and experts.

    Those of rows and slots are in the dtype of sums, as are those of the biases.
    """
    walk = _Walk(ops, given, slots, experts, opts)
    shapes = _shapes(ops, experts, wrt)
    dtypes = {key: _dtype(ops, key, experts) for key in shapes}
    sums = {key: jnp.zeros(shape[1:], experts.acc) for key, shape in shapes.items()}
    none, one = _no_rows(ops, slots, experts), walk.visits.expert[0]
    first = settled(
        lambda carry: walk.block(0, carry, one, experts.fetch(one)),
        BlockGrads(*none, sums),
        *(ops, given, slots),
    )
    turn = functools.partial(walk.expert, sums=first.weights, dtypes=dtypes)
    totals = {
        key: jnp.zeros(shape, to_bits(jnp.zeros((), dtypes[key])).dtype)
        for key, shape in shapes.items()
    }
    first = first._replace(weights=totals)
    first = settled(lambda carry: turn(0, carry), first, ops, given, slots)
    found = lax.fori_loop(0, most(walk.visits.experts), turn, first)
    weights = {key: from_bits(x, dtypes[key]) for key, x in found.weights.items()}
    return found._replace(weights=weights)


def expert_blocks_bwd_static(
    ops: Operands,
    given: Given,
    slots: Slots,
    experts: Experts,
    opts: Options,
    wrt: tuple,
) -> BlockGrads:
    """The same, block after block: this form can be differentiated both ways."""

    def visit(carry: BlockGrads, turn) -> tuple[BlockGrads, None]:
        token, affinity, block, index, held = turn
        x, d_out = (
            x.at[token].get(mode="fill", fill_value=0)
            for x in (ops.hidden, given.d_out)
        )
        expert = experts.fetch(index)
        is_token = token < ops.hidden.shape[0]
        own = Rows(x, d_out, affinity, is_token)
        found = block_bwd(own, held, expert, experts, opts, wrt)
        return BlockGrads(
            carry.hidden.at[token].add(found.hidden, mode="drop"),
            carry.affinity.at[block].set(found.affinity),
            {k: x.at[index].add(found.weights[k]) for k, x in carry.weights.items()},
        ), None

    shapes = _shapes(ops, experts, wrt)
    totals = {key: jnp.zeros(shape, experts.acc) for key, shape in shapes.items()}
    first = BlockGrads(*_no_rows(ops, slots, experts), totals)
    block = jnp.arange(slots.token.shape[0], dtype=jnp.int32)
    index = jnp.clip(slots.expert, 0, experts.count - 1)
    turns = (slots.token, slots.affinity, block, index, given.by_block)
    zeroth = jax.tree.map(lambda x: x[0], turns)
    first = settled(lambda carry: visit(carry, zeroth)[0], first, ops, given, slots)
    return lax.scan(visit, first, turns)[0]


def _no_rows(ops: Operands, slots: Slots, experts: Experts) -> tuple[Array, Array]:
    d_hidden = jnp.zeros(ops.hidden.shape, experts.acc)
    return d_hidden, jnp.zeros(slots.token.shape, experts.acc)


def _shapes(ops: Operands, experts: Experts, wrt: tuple) -> dict[str, tuple[int, ...]]:
    """The shapes in which gradients of weights are summed."""
    count, width, d_ff = experts.count, ops.hidden.shape[1], experts.d_ff
    shapes = dict(
        gate_up_w=(count, width, 2 * d_ff),
        down_w=(count, d_ff, width),
        gate_up_b=(count, 2 * d_ff),
        down_b=(count, ops.down_w.shape[-1]),
    )
    return {key: shape for key, shape in shapes.items() if key in wrt}


def _dtype(ops: Operands, key: str, experts: Experts) -> Any:
    """The dtype of a gradient: that of its operand, for an absent bias that of sums."""
    x = getattr(ops, key)
    return experts.acc if x is None else x.dtype


def blockwise_mm_bwd(*operands: Any, name: str, **config: Any) -> tuple[Array, ...]:
    """Returns the gradients that `grads` names, in that order.

    Takes the operands of `blockwise_mm_fwd`, then those of `Given`. The gradient of a
    bias needs no value of it where gate and up are stored.
    """
    return _run(operands, config, is_static=False)


def blockwise_mm_bwd_static(
    *operands: Any, name: str, **config: Any
) -> tuple[Array, ...]:
    """`blockwise_mm_bwd` with static loop bounds."""
    return _run(operands, config, is_static=True)


def _run(
    operands: tuple, config: dict[str, Any], *, is_static: bool
) -> tuple[Array, ...]:
    count = len(Operands._fields)
    ops, given = Operands(*operands[:count]), Given(*operands[count:])
    opts, wrt = Options.of(config), config["grads"]
    experts = experts_of(ops, opts, is_static=is_static)
    weights = tuple(key for key in wrt if key in WEIGHTS)
    if serves_nobody(ops):
        return _of_no_token(ops, experts, wrt)
    slots = slots_of(ops, opts, experts.acc)
    run = expert_blocks_bwd_static if is_static else expert_blocks_bwd
    found = run(ops, given, slots, experts, opts, weights)
    if opts.shard == "intermediate":
        found = found._replace(hidden=lax.psum(found.hidden, opts.axis))
    affinity = found.affinity
    if _is_partial(opts):
        affinity = lax.psum(affinity, opts.axis)
    table = jnp.zeros((ops.hidden.shape[0], experts.count), affinity.dtype)
    index = slots.token, slots.expert[:, None]
    table = table.at[index].add(affinity, mode="drop")
    grads = dict(hidden=found.hidden, affinity=table, **found.weights)
    return tuple(_like(grads[key], ops, key, experts) for key in wrt)


def _of_no_token(ops: Operands, experts: Experts, wrt: tuple) -> tuple[Array, ...]:
    shapes = _shapes(ops, experts, wrt)
    shapes |= dict(hidden=ops.hidden.shape, affinity=ops.affinity.shape)
    none = {key: jnp.zeros(shapes[key], experts.acc) for key in wrt}
    return tuple(_like(none[key], ops, key, experts) for key in wrt)


def _is_partial(opts: Options) -> bool:
    """Whether the cores hold parts of the sum that an affinity's gradient is."""
    if opts.scaling == "PRE_SCALE":
        return opts.shard is not None
    return opts.on_intermediate and opts.shard == "intermediate"


def _like(grad: jax.Array, ops: Operands, key: str, experts: Experts) -> jax.Array:
    """A gradient in the shape and dtype of its operand."""
    if key == "gate_up_b":
        grad = experts.bias_grad(grad)
    x = getattr(ops, key)
    if x is None:
        return grad
    # By "columns" that of the down weight is narrower than its operand.
    shape = grad.shape if key == "down_w" else x.shape
    return grad.reshape(shape).astype(x.dtype)
