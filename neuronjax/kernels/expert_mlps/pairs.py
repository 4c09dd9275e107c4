"""Which token meets which expert in a decode step, and the blocks that this makes.

A block has one expert and slots that hold tokens. With all experts a block is the whole
batch. Otherwise the pairs of token and expert are sorted by expert and cut into blocks;
a token that names an expert twice has two slots there.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.expert_mlps.operands import Operands, Options
from neuronjax.kernels.indices import columns_from
from neuronjax.kernels.router_topk import chosen_experts
from neuronjax.kernels.shard_common import uniform

# Slots of a block where the number of tokens is not known, and the largest one.
SOME, LARGEST = 8, 128
Blocks = tuple[Int[Array, " slots"], Int[Array, " blocks"]]


def first_expert(ops: Operands, num_experts: int) -> Int[Array, ""]:
    """The number of the first of `num_experts` local experts."""
    if ops.rank is None:
        return jnp.int32(0)
    return ops.rank.reshape(()) * jnp.int32(num_experts)


def local_affinities(
    ops: Operands, opts: Options, num_experts: int
) -> Float[Array, "tokens experts"]:
    """The affinities of the local experts; an expert that is not there has zeros."""
    table = ops.affinities
    if opts.mask:
        named = chosen_experts(ops.index, table.shape[1])
        table = jnp.where(named, table, jnp.zeros((), table.dtype))
    if ops.rank is None:
        return table
    return columns_from(table, first_expert(ops, num_experts), num_experts)


def local_index(ops: Operands, num_experts: int) -> Int[Array, "tokens k"]:
    """The local expert of each pair; the number of experts where there is none."""
    local = ops.index - first_expert(ops, num_experts)
    is_here = (ops.index >= 0) & (local >= 0) & (local < num_experts)
    return jnp.where(is_here, local, jnp.int32(num_experts))


def all_pairs(num_experts: int, tokens: Any) -> Blocks:
    """A block of all tokens for each expert."""
    token = jnp.broadcast_to(lax.iota(jnp.int32, tokens)[None], (num_experts, tokens))
    return token.reshape(-1), jnp.arange(num_experts, dtype=jnp.int32)


def active_pairs(active: Bool[Array, "tokens experts"], block_size: int) -> Blocks:
    """Blocks of the pairs that are active."""
    num_experts = active.shape[1]
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    index = jnp.where(active, expert, jnp.int32(num_experts))
    return sorted_pairs(index, num_experts, block_size)


def block_size_of(tokens: Any, k: int, num_experts: int) -> int:
    """Slots of a block: a power of two, about twice an expert's share of the pairs.

    Two at least: XLA on a CPU widens a narrow matrix for one row and not for two.
    """
    if not isinstance(tokens, int):
        return SOME
    share = -(-2 * tokens * k // num_experts)
    return min(max(1 << (share - 1).bit_length(), 2), LARGEST)


def sorted_pairs(
    index: Int[Array, "tokens k"], num_experts: int, block_size: int
) -> Blocks:
    """Blocks of the pairs `(t, index[t, j])`; an index that is no expert makes none.

    There are as many blocks as any index may need. Those that are left, and the slots
    that are left in others, hold -1.
    """
    tokens, k = index.shape
    pairs = tokens * k
    number = uniform(lax.iota(jnp.int32, pairs), index)[0]
    expert, order = lax.sort((index.reshape(-1), number), num_keys=1, is_stable=True)
    every = jnp.arange(num_experts + 1, dtype=jnp.int32)
    # Sums of comparisons: a binary search would need to know how many pairs there are.
    start = jnp.sum(expert[:, None] < every, axis=0, dtype=jnp.int32)
    needed = -(-(start[1:] - start[:-1]) // block_size)
    last = lax.cumsum(needed)
    first = jnp.concatenate([last - needed, last[-1:]])
    place = number - start[expert]
    slot = (first[expert] + place // block_size) * block_size + place % block_size
    blocks = _most_blocks(pairs, num_experts, block_size)
    # The pairs without an expert are the last: their slots are put out of range.
    slot = jnp.where(expert < num_experts, slot, blocks * block_size)
    empty = uniform(jnp.full((blocks * block_size,), -1, jnp.int32), index)[0]
    token_id = empty.at[slot].set(order // k, mode="drop")
    block = lax.iota(jnp.int32, blocks)
    owner = jnp.sum(last <= block[:, None], axis=1, dtype=jnp.int32)
    return token_id, jnp.minimum(owner, num_experts - 1)


def _most_blocks(pairs: Any, num_experts: int, block_size: int) -> Any:
    """How many blocks there may be: all experts but one hold one pair too many."""
    busy = min(num_experts, pairs) if isinstance(pairs, int) else num_experts
    return (pairs - busy) // block_size + busy
