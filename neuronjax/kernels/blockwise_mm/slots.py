"""The slots of the blocks: which token and expert each serves, and in which order.

Every block has one expert. Blocks are visited expert by expert, so that the weights of
an expert are read once; those without a token are not visited at all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.blockwise_mm.operands import Operands, Options


class Slots(NamedTuple):
    """Attributes:
    token: `[N, B]` int32: the row that a slot serves; `rows`, where there is none.
    affinity: `[N, B]`, in the dtype of sums.
    expert: `[N]` int32.
    """

    token: jax.Array
    affinity: jax.Array
    expert: jax.Array


class Visits(NamedTuple):
    """Attributes:
    block: `[N]`: the blocks, expert by expert, those without a token last.
    first: `[E]`: where the blocks of an expert begin in `block`.
    blocks: `[E]`: how many it has.
    expert: `[E]`: the experts, those without a block last.
    experts: how many have one.
    """

    block: jax.Array
    first: jax.Array
    blocks: jax.Array
    expert: jax.Array
    experts: jax.Array


def slots_of(ops: Operands, opts: Options, dtype: jnp.dtype) -> Slots:
    """The slots that the ids name; affinities in `dtype`."""
    rows, num_experts = ops.hidden.shape[0], ops.gate_up_w.shape[0]
    expert = ops.block_expert.reshape(-1)
    token = ops.token_id.reshape(-1, opts.block_size)
    last = rows if opts.skip_token else rows - 1  # one past the last token
    there = (token >= 0) & (token < last)
    there &= ((expert >= 0) & (expert < num_experts))[:, None]
    if ops.conditions is not None:
        there &= _is_open(ops.conditions, token.shape[0], opts.num_static)[:, None]
    token = jnp.where(there, token, rows)
    if not opts.accumulate:
        token = _last_of_each(token, rows)
    table = ops.affinity.reshape(rows, num_experts).astype(dtype)
    affinity = table.at[token, expert[:, None]].get(mode="fill", fill_value=0)
    return Slots(token, affinity, expert)


def _is_open(conditions: jax.Array, blocks: int, num_static: int) -> jax.Array:
    """Blocks up to the first condition that is 0, and the first `num_static`."""
    open_so_far = jnp.cumsum(conditions.reshape(-1)[:blocks] == 0) == 0
    return open_so_far | (jnp.arange(blocks) < num_static)


def _last_of_each(token: jax.Array, rows: Any) -> jax.Array:
    """Leaves each token the last slot that names it: the others count as empty."""
    flat = token.reshape(-1)
    place = lax.broadcasted_iota(jnp.int32, flat.shape, 0)
    last = jnp.full(rows + 1, -1, jnp.int32).at[flat].max(place)
    return jnp.where(last[flat] == place, flat, rows).reshape(token.shape)


def visits_of(slots: Slots, rows: Any, num_experts: int) -> Visits:
    """The order in which blocks are visited; `rows` may be a symbolic size."""
    busy = (slots.token < rows).any(1)
    key = jnp.where(busy, slots.expert, num_experts)
    count = jnp.zeros(num_experts + 1, jnp.int32).at[key].add(1)[:num_experts]
    block = jnp.argsort(key, stable=True).astype(jnp.int32)
    expert = jnp.argsort(count == 0, stable=True).astype(jnp.int32)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    return Visits(block, first, count, expert, (count > 0).sum(dtype=jnp.int32))
