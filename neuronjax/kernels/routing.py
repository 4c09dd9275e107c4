"""From the experts of each token to blocks of tokens that share an expert.

Pairs (token, place) are sorted by expert and then by position: one sort of `T k`
integers, whatever the number of experts. Blocks then read their slots from the sorted
list, so nothing of size tokens times experts exists beside the affinities.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from neuronjax.kernels.router_topk import chosen_experts

_LARGEST = 2**31 - 1


class Blocks(NamedTuple):
    """Which token each slot holds, and which expert each block has.

    Attributes:
        token_position_to_id: `[N * B]` int32, the token of each slot; the padding id
            where a slot is empty.
        block_to_expert: `[N]` int32.
        conditions: `[N + 2]` int32, 1 up to the last block that holds a token, 0 after.
    """

    token_position_to_id: Int[Array, " slots"]
    block_to_expert: Int[Array, " blocks"]
    conditions: Int[Array, " conditions"]


def experts_of_pairs(
    expert_index: Integer[Array, "tokens k"],
    token_mask: Bool[Array, " tokens"] | None,
    num_experts: int,
) -> Int[Array, "tokens k"]:
    """The expert of each pair as int32; `num_experts` for a pair that names none.

    Those are the pairs of padding tokens and those whose index is out of range.
    """
    held = expert_index.astype(jnp.int32)
    # Judged before the cast where it would wrap.
    wide = expert_index if expert_index.dtype.itemsize >= 4 else held
    names = (wide >= 0) & (wide < num_experts)
    if token_mask is not None:
        names = names & token_mask[:, None]
    return jnp.where(names, held, jnp.int32(num_experts))


def named_once(
    experts: Int[Array, "tokens k"], num_experts: int
) -> Int[Array, "tokens k"]:
    """Each token's experts in ascending order, `num_experts` for one named before."""
    rows = lax.sort(experts, dimension=1, is_stable=False)
    again = jnp.pad(rows[:, 1:] == rows[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(again, jnp.int32(num_experts), rows)


def sorted_pairs(
    experts: Int[Array, " pairs"], num_experts: int
) -> tuple[Int[Array, " pairs"], Int[Array, " pairs"]]:
    """The pairs ordered by expert, then by position: experts and positions."""
    count = experts.shape[0]
    position = jnp.arange(count, dtype=jnp.int32)
    if (num_experts + 1) * count > _LARGEST:
        held, order = lax.sort((experts, position), num_keys=1, is_stable=True)
        return held, order
    # One key is sorted five times as fast as a key with a value.
    keys = lax.sort(experts * jnp.int32(count) + position, is_stable=False)
    return keys // max(count, 1), keys % max(count, 1)


def route_to_blocks_fwd(
    expert_index: Integer[Array, "tokens k"],
    token_mask: Bool[Array, " tokens"] | None,
    *,
    num_experts: int,
    block_size: int,
    num_blocks: int,
    one_block_each: bool,
    padding_id: int,
) -> Blocks:
    """Fills `num_blocks` blocks, the experts in order, an expert's tokens in order.

    An expert has as many blocks as its tokens need, or with `one_block_each` exactly
    one, and its later tokens have no slot. Blocks that are left belong to the last
    expert and are empty.
    """
    k = expert_index.shape[1]
    pairs = experts_of_pairs(expert_index, token_mask, num_experts)
    pairs = named_once(pairs, num_experts).reshape(-1)
    experts, order = sorted_pairs(pairs, num_experts)
    every = jnp.arange(num_experts + 1, dtype=jnp.int32)
    start = jnp.searchsorted(experts, every).astype(jnp.int32)
    count = start[1:] - start[:-1]
    needed = jnp.ones_like(count) if one_block_each else -(-count // block_size)
    count = jnp.minimum(count, needed * block_size)
    end = jnp.cumsum(needed, dtype=jnp.int32)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    expert = jnp.sum(block[:, None] >= end, axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, jnp.int32(num_experts - 1))
    # The place of a slot among its expert's tokens.
    first = (block - (end - needed)[expert]) * block_size
    place = first[:, None] + jnp.arange(block_size, dtype=jnp.int32)
    real = place < count[expert][:, None]
    token = _token_at(order, start[expert][:, None] + place, k)
    ids = jnp.where(real, token, jnp.int32(padding_id)).reshape(-1)
    used = jnp.max(jnp.where(real[:, :1], block[:, None] + 1, 0), initial=0)
    conditions = jnp.arange(num_blocks + 2, dtype=jnp.int32) < used
    return Blocks(ids, expert, conditions.astype(jnp.int32))


def _token_at(order: jax.Array, place: jax.Array, k: int) -> jax.Array:
    """The tokens of places in the sorted list; any token for a place past its end."""
    if not order.shape[0]:
        return jnp.zeros_like(place)
    return jnp.take(order, place, mode="clip") // k


def masked_affinities(
    affinities: Float[Array, "tokens num_experts"],
    expert_index: Integer[Array, "tokens k"],
    token_mask: Bool[Array, " tokens"] | None,
    *,
    padding_row: bool,
) -> Float[Array, "pairs 1"]:
    """The affinities at the experts that a token names and 0 elsewhere, as a column."""
    tokens, num_experts = affinities.shape
    pairs = experts_of_pairs(expert_index, token_mask, num_experts)
    chosen = chosen_experts(pairs, num_experts)
    kept = jnp.where(chosen, affinities, jnp.zeros((), affinities.dtype))
    if padding_row:
        kept = jnp.pad(kept, ((0, 1), (0, 0)))
    return kept.reshape(-1, 1)
