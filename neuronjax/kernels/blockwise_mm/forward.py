"""Feed-forward experts over blocks of slots, each block with one expert.

    x = hidden[token]                               PRE_SCALE: affinity * x
    g = clamp(x @ gate + gate_b);  u = clamp(x @ up + up_b)
    y = (act(g) * u) @ down + down_b
    out[token] += affinity * y                      NO_SCALE, PRE_SCALE: y

aws-neuron/nki-library, `core/moe/moe_cte`. A slot without a token reads zeros and
writes nothing. Two nested loops with run-time bounds visit the experts that have tokens
and their blocks: time follows tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from neuronjax.kernels.blockwise_mm.experts import Expert, Experts, Rows
from neuronjax.kernels.blockwise_mm.forms import experts_of
from neuronjax.kernels.blockwise_mm.narrow import from_bits, put, take_rows, to_bits
from neuronjax.kernels.blockwise_mm.operands import Operands, Options
from neuronjax.kernels.blockwise_mm.slots import Slots, slots_of, visits_of
from neuronjax.kernels.blockwise_mm.swiglu import (
    GateUp,
    clamped,
    gated,
    saturated,
)
from neuronjax.kernels.loop_bounds import most
from neuronjax.kernels.shard_common import settled

Weights = Float[Array, " slots"]


def exchanged(x: jax.Array, opts: Options, shard: str) -> jax.Array:
    """The sum of the cores' partial sums, where the work is divided along `shard`."""
    return lax.psum(x, opts.axis) if opts.shard == shard else x


def scaled_rows(x: Rows, affinity: Weights, opts: Options) -> Rows:
    """The rows that meet the weights: PRE_SCALE multiplies them by the affinity."""
    if opts.scaling != "PRE_SCALE":
        return x
    return x.astype(affinity.dtype) * affinity[:, None]


def block_fwd(
    x: Rows, affinity: Weights, expert: Expert, experts: Experts, opts: Options
) -> tuple[GateUp, Rows]:
    """`gate_up` after the clamp and `y` before the affinity.

    With `on_intermediate` the gated values take the affinity, and `y` has it.
    """
    z = experts.gate_up(scaled_rows(x, affinity, opts), expert)
    z = exchanged(z, opts, "hidden")
    if expert.gate_up_b is not None:
        z = z + expert.gate_up_b
    gate_up = clamped(z.reshape(z.shape[0], 2, -1), opts)
    middle = gated(gate_up, opts)
    if opts.on_intermediate:
        middle = middle * affinity[:, None]
    y = exchanged(experts.down(middle, expert), opts, "intermediate")
    return gate_up, y if expert.down_b is None else y + expert.down_b


def weighed(y: Rows, affinity: Weights, opts: Options) -> Rows:
    """What a block adds to the output."""
    is_after = opts.scaling == "POST_SCALE" and not opts.on_intermediate
    return y * affinity[:, None] if is_after else y


def to_store(
    found: tuple[GateUp, Rows],
    is_token: Bool[Array, " slots"],
    dtype: DTypeLike,
    opts: Options,
) -> list[Array]:
    """What the block stores, in `dtype`.

    What an empty slot stores, that of a row of zeros, is a constant.
    """
    named: dict[str, Array] = dict(zip(("gate_up", "down"), found, strict=True))
    kept = []
    for x in (named[key] for key in opts.stored):
        shown = lax.expand_dims(is_token, range(1, x.ndim))
        kept.append(saturated(jnp.where(shown, x, lax.stop_gradient(x)), dtype))
    return kept


def expert_blocks_fwd(
    hidden: Array, slots: Slots, experts: Experts, opts: Options
) -> tuple[Array, ...]:
    """Returns `out [R, H]` in the dtype of sums, and what `opts.stored` names."""
    rows, blocks = hidden.shape[0], slots.token.shape[0]
    visits = visits_of(slots, rows, experts.count)

    def visit_block(j, carry, index, expert):
        out, *held = carry
        block = visits.block[jnp.minimum(visits.first[index] + j, blocks - 1)]
        is_own = j < visits.blocks[index]
        token = jnp.where(is_own, slots.token[block], rows)
        affinity = slots.affinity[block]
        x = take_rows(hidden, token)
        found = block_fwd(x, affinity, expert, experts, opts)
        y = weighed(found[1], affinity, opts)
        kept = to_store(found, token < rows, hidden.dtype, opts)
        return out.at[token].add(y, mode="drop"), *(
            _store(part, new, block, is_own)
            for part, new in zip(held, kept, strict=True)
        )

    def visit_expert(i, carry):
        index = visits.expert[i]
        expert = experts.fetch(index)
        count = most(visits.blocks[index])
        return lax.fori_loop(
            0, count, lambda j, carry: visit_block(j, carry, index, expert), carry
        )

    one = visits.expert[0]
    first = settled(
        lambda carry: visit_block(0, carry, one, experts.fetch(one)),
        _no_blocks(hidden, slots, experts, opts),
        *(hidden, slots, experts.ops),
    )
    out, *held = lax.fori_loop(0, most(visits.experts), visit_expert, first)
    return out, *turned([from_bits(x, hidden.dtype) for x in held])


def _no_blocks(hidden: Array, slots: Slots, experts: Experts, opts: Options) -> tuple:
    """Zeros for `out`, and bits of zeros for what is stored, gate and up as rows."""
    (blocks, size), bits = slots.token.shape, to_bits(hidden[:0]).dtype
    shapes = (blocks, size, 2, experts.d_ff), (blocks, size, hidden.shape[1])
    held = (jnp.zeros(shape, bits) for shape in shapes[: len(opts.stored)])
    return jnp.zeros(hidden.shape, experts.acc), *held


def turned(stored: list) -> list:
    """What is stored with gate and up turned, `[N, 2, I, B]`.

    They are written as rows and turned at once: turned block by block they took 40 ms
    of the 130 ms of 8 experts of 512 x 1024 and 4096 slots.
    """
    return [x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for x in stored]


def _store(held: jax.Array, x: jax.Array, block: jax.Array, is_own: jax.Array):
    """`held` with the block's values; a mapped loop passes over blocks of others."""
    old = lax.dynamic_index_in_dim(held, block, keepdims=False)
    return put(held, jnp.where(is_own, to_bits(x), old), block)


def expert_blocks_static(
    hidden: Array, slots: Slots, experts: Experts, opts: Options
) -> tuple[Array, ...]:
    """The same, block after block: this form can be differentiated both ways."""
    rows = hidden.shape[0]

    def visit(out, slot):
        token, affinity, index = slot
        x = hidden.at[token].get(mode="fill", fill_value=0)
        found = block_fwd(x, affinity, experts.fetch(index), experts, opts)
        out = out.at[token].add(weighed(found[1], affinity, opts), mode="drop")
        kept = to_store(found, token < rows, hidden.dtype, opts)
        return out, [jnp.where((token < rows).any(), x, 0) for x in kept]

    index = jnp.clip(slots.expert, 0, experts.count - 1)
    turns = (slots.token, slots.affinity, index)
    zeroth = tuple(x[0] for x in turns)
    first = settled(
        lambda out: visit(out, zeroth)[0],
        jnp.zeros(hidden.shape, experts.acc),
        *(hidden, slots, experts.ops),
    )
    out, held = lax.scan(visit, first, turns)
    return out, *turned(held)


def serves_nobody(ops: Operands) -> bool:
    """Whether there is no row or no slot at all: nothing to loop over."""
    return 0 in (ops.hidden.shape[0], ops.token_id.shape[0])


def _of_no_token(ops: Operands, experts: Experts, opts: Options) -> tuple[Array, ...]:
    size, width = opts.block_size, ops.hidden.shape[1]
    blocks = ops.token_id.shape[0] // size
    shapes = (blocks, 2, experts.d_ff, size), (blocks, size, width)
    held = (jnp.zeros(shape, ops.hidden.dtype) for shape in shapes)
    return jnp.zeros(ops.hidden.shape, experts.acc), *(
        part for part, _ in zip(held, opts.stored, strict=False)
    )


def run_blocks(
    ops: Operands, opts: Options, *, is_static: bool = False
) -> tuple[Array, ...]:
    """`out [R, H]` in the dtype of sums, and what `opts.stored` names."""
    experts = experts_of(ops, opts, is_static=is_static)
    if serves_nobody(ops):
        return _of_no_token(ops, experts, opts)
    slots = slots_of(ops, opts, experts.acc)
    run = expert_blocks_static if is_static else expert_blocks_fwd
    return run(ops.hidden, slots, experts, opts)


def blockwise_mm_fwd(
    *operands: Any, name: str, is_static: bool = False, **config: Any
) -> tuple[Array, ...]:
    """Returns `out [R, H]`, and what is stored, `gate_up` and `down`.

    They are `[N, 2, I, B]`, after the clamp, and `[N, B, H]`, before the affinity, in
    the dtype of `hidden`; a block without a token has zeros. Sums are float32 at least.
    """
    ops, opts = Operands(*operands), Options.of(config)
    out, *stored = run_blocks(ops, opts, is_static=is_static)
    return out.astype(ops.hidden.dtype), *stored


def blockwise_mm_static(*operands: Any, name: str, **config: Any) -> tuple[Array, ...]:
    """`blockwise_mm_fwd` with static loop bounds."""
    return blockwise_mm_fwd(*operands, name=name, is_static=True, **config)
