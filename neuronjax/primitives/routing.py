"""Routing to blocks: what `moe_cte` takes, from what `router_topk` returns."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from neuronjax.kernels.routing import Blocks, masked_affinities, route_to_blocks_fwd
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.options import FLOATS

# The block sizes that `block_size_for` gives.
SMALLEST, LARGEST = 1, 128


def most_blocks(tokens: int, k: int, num_experts: int, block_size: int) -> int:
    """How many blocks the worst routing fills: one token to all experts but one.

    That is `ceil((T k - (E - 1)) / B) + E - 1`, at least 1.
    """
    return max(-(-(tokens * k - (num_experts - 1)) // block_size) + num_experts - 1, 1)


def block_size_for(tokens: int, k: int, num_experts: int) -> int:
    """A block size for an even load: about half of an expert's tokens.

    A power of two. Larger blocks would mostly be padding, smaller ones read an expert's
    weights more often than its tokens need.
    """
    share = tokens * k // (2 * num_experts)
    return min(max(1 << max(share.bit_length() - 1, 0), SMALLEST), LARGEST)


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    shape = np.shape(call.expert_index)
    index_dtype = getattr(call.expert_index, "dtype", None)
    affinities: Any = getattr(call, "expert_affinities", None)
    return dict(
        shape=shape,
        tokens=shape[0] if shape else 0,
        integer=index_dtype is not None and jnp.issubdtype(index_dtype, jnp.integer),
        mask_shape=np.shape(call.token_mask),
        mask_dtype=getattr(call.token_mask, "dtype", None),
        affinities_shape=np.shape(affinities),
        affinities_dtype=getattr(affinities, "dtype", None),
    )


def _block_facts(call: SimpleNamespace) -> dict[str, Any]:
    facts = _facts(call)
    sizes = (call.num_experts, call.capacity or call.block_size, call.multiple)
    least = 0
    if len(facts["shape"]) == 2 and all(map(is_count, sizes)):
        tokens, k = facts["shape"]
        least = most_blocks(tokens, min(k, sizes[0]), *sizes[:2])
    return facts | dict(least=least)


@contracts.contracted(_block_facts)
def route_to_blocks(
    expert_index: Integer[Array, "tokens k"],
    num_experts: int,
    block_size: int | None = None,
    *,
    num_blocks: int | None = None,
    capacity: int | None = None,
    skip_token: bool = False,
    token_mask: Bool[Array, " tokens"] | None = None,
    multiple: int = 1,
) -> Blocks:
    r"""Sorts tokens into blocks of `B` slots, each of which has one expert.

    Dropless unless `capacity` is given: every expert gets the blocks that its tokens
    need, and

    $$N = \left\lceil \frac{T k - (E - 1)}{B} \right\rceil + E - 1$$

    blocks (at least one) are enough for any routing. Experts come in order, and the
    tokens of an expert in ascending order; an expert without tokens has no block.
    Blocks that are left belong to the last expert and hold padding alone.

    With `capacity` every expert has one block of that many slots, block `e` for expert
    `e`. Its first tokens get them; tokens beyond are dropped.

    An index outside `[0, E)`, which is what `router_topk` gives padding, takes no slot,
    and a token that names an expert twice takes one.

    Args:
        expert_index: `[T, k]` integers, the experts of each token. `T` may be 0.
        num_experts: `E`.
        block_size: `B`, slots of a block; `None` with `capacity`.
        num_blocks: `N`, if more than are needed are wanted.
        capacity: slots of an expert: `N = E` and `B = capacity`, and tokens may be
            dropped.
        skip_token: an empty slot has the id -1, for hidden states of `T` rows;
            otherwise `T`, for hidden states with a row of zeros at the end.
        token_mask: `[T]`, True = keep; padding tokens take no slot.
        multiple: round `N` up to a multiple of this: 2 for blocks on two cores.

    Returns:
        A named tuple of int32 arrays: `token_position_to_id [N * B]`, `block_to_expert
        [N]` and `conditions [N + 2]`, which is 1 up to the last block that holds a
        token and 0 after.

    Raises:
        ValueError: `expert_index` or `token_mask` has another shape or dtype, a size is
            no positive integer, or `num_blocks` is too small for some routing.
        NotImplementedError: `T` is symbolic, or an explicit mesh divides `T`.

    Source:
        aws-neuron/nki-library, the inputs of `moe_cte`; Gale et al. 2022, MegaBlocks,
        https://arxiv.org/abs/2211.15841, section 5.

    Example:
        >>> import jax.numpy as jnp
        >>> blocks = route_to_blocks(jnp.array([[0, 2], [2, 0], [2, 3]]), 4, 2)
        >>> blocks.token_position_to_id.reshape(-1, 2).tolist()
        [[0, 1], [0, 1], [2, 3], [2, 3], [3, 3]]
        >>> blocks.block_to_expert.tolist(), blocks.conditions.tolist()
        ([0, 2, 2, 3, 3], [1, 1, 1, 1, 0, 0, 0])
    """
    tokens, k = expert_index.shape
    if not isinstance(tokens, int):
        raise NotImplementedError(
            f"route_to_blocks: the number of blocks follows T, which must be known, "
            f"got {tokens}"
        )
    size = block_size if capacity is None else capacity
    assert size is not None
    # A NumPy integer is one too; kernels take Python's.
    size, num_experts, multiple = map(int, (size, num_experts, multiple))
    count = num_experts if capacity else most_blocks(tokens, k, num_experts, size)
    count = int(num_blocks or -(-count // multiple) * multiple)
    return route_to_blocks_fwd(
        _index("route_to_blocks", expert_index, num_experts),
        None if token_mask is None else jnp.asarray(token_mask),
        num_experts=num_experts,
        block_size=size,
        num_blocks=count,
        one_block_each=capacity is not None,
        padding_id=-1 if skip_token else tokens,
    )


@contracts.contracted(_facts)
def mask_affinities(
    expert_affinities: Float[Array, "tokens num_experts"],
    expert_index: Integer[Array, "tokens k"],
    *,
    skip_token: bool = False,
    token_mask: Bool[Array, " tokens"] | None = None,
) -> Float[Array, "pairs 1"]:
    r"""The affinities of `router_topk` as `moe_cte` takes them.

    $$m_{tE + e} = a_{te} \, [e \in \mathrm{idx}_t]$$

    Args:
        expert_affinities: `[T, E]`; they may be dense.
        expert_index: `[T, k]`; an index outside `[0, E)` names no expert.
        skip_token: return `T` rows of experts; otherwise one more of zeros, for the
            padding token.
        token_mask: `[T]`, True = keep; padding tokens have zeros.

    Returns:
        `expert_affinities_masked`, `[(T + 1) E, 1]` or `[T E, 1]`, token by token:
        exactly 0 where a token does not name an expert, and no gradient there.

    Raises:
        ValueError: shapes or dtypes do not fit.
        NotImplementedError: an explicit mesh divides `T`.

    Source:
        aws-neuron/nki-library, `expert_affinities_masked` of `moe_cte`.

    Example:
        >>> import jax.numpy as jnp
        >>> dense = jnp.array([[0.5, 0.25, 0.125]])
        >>> mask_affinities(dense, jnp.array([[2, 0]])).ravel().tolist()
        [0.5, 0.0, 0.125, 0.0, 0.0, 0.0]
    """
    affinities = jnp.asarray(expert_affinities)
    affinities = _whole("mask_affinities", "expert_affinities", affinities)
    return masked_affinities(
        affinities,
        _index("mask_affinities", expert_index, affinities.shape[1]),
        None if token_mask is None else jnp.asarray(token_mask),
        padding_row=not skip_token,
    )


def _index(function: str, index: Any, num_experts: int) -> Array:
    """As JAX holds it: without x64 it would wrap what NumPy holds wide.

    A number that names no expert would then name another.
    """
    if isinstance(index, np.ndarray):
        outside = (index < 0) | (index >= num_experts)
        index = np.where(outside, num_experts, index.astype(np.int64)).astype(np.int32)
    return _whole(function, "expert_index", jnp.asarray(index))


def _whole(function: str, argument: str, x: Array) -> Array:
    """`x`, refused where an explicit mesh divides it."""
    if any(jax.typeof(x).sharding.spec):
        raise NotImplementedError(
            f"{function}: blocks are made of all tokens, so an explicit mesh cannot "
            f"divide {argument}: call it inside jax.shard_map, on each device's own "
            "tokens, or on jax.reshard of it"
        )
    return x


_INDEX = np.zeros((3, 2), np.int32)


def _arguments(**changes: Any):
    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(expert_index=_INDEX)
        if function == "route_to_blocks":
            given |= dict(num_experts=4, block_size=2)
        else:
            given["expert_affinities"] = np.zeros((3, 4), np.float32)
        return given | changes

    return build


_BOTH = ("route_to_blocks", "mask_affinities")
_BLOCKS = ("route_to_blocks",)
contracts.add(
    *only_flags("route_to_blocks", "mask_affinities"),
    Contract(
        "routing.index",
        _BOTH,
        "{function}: expert_index must be integers of shape [T, k], got {shape}",
        lambda c: len(c.shape) != 2 or c.shape[1] < 1 or not c.integer,
        example=_arguments(expert_index=np.zeros((3, 2), np.float32)),
    ),
    Contract(
        "routing.mask",
        _BOTH,
        "{function}: token_mask must be bool of shape [T] = ({tokens},), got "
        "{mask_dtype} of shape {mask_shape}",
        lambda c: (
            c.token_mask is not None
            and (c.mask_shape != (c.tokens,) or c.mask_dtype != jnp.dtype(bool))
        ),
        example=_arguments(token_mask=np.ones(2, bool)),
    ),
    Contract(
        "routing.affinities",
        ("mask_affinities",),
        "{function}: expert_affinities must be floating, of shape [T, E] with T = "
        "{tokens}, got {affinities_dtype} of shape {affinities_shape}",
        lambda c: (
            len(c.affinities_shape) != 2
            or c.affinities_shape[0] != c.tokens
            or c.affinities_dtype not in FLOATS
        ),
        example=_arguments(expert_affinities=np.zeros((2, 4), np.float32)),
    ),
    Contract(
        "routing.experts",
        _BLOCKS,
        "{function}: num_experts must be a positive integer, got {num_experts!r}",
        lambda c: not is_count(c.num_experts),
        example=_arguments(num_experts=0),
    ),
    Contract(
        "routing.capacity",
        _BLOCKS,
        "{function}: capacity must be a positive integer, got {capacity!r}",
        lambda c: c.capacity is not None and not is_count(c.capacity),
        example=_arguments(block_size=None, capacity=0),
    ),
    Contract(
        "routing.block_size",
        _BLOCKS,
        "{function}: block_size must be a positive integer (with capacity: None or "
        "that capacity), got {block_size!r}",
        lambda c: (
            not is_count(c.block_size)
            if c.capacity is None
            else c.block_size not in (None, c.capacity)
        ),
        example=_arguments(block_size=0),
    ),
    Contract(
        "routing.multiple",
        _BLOCKS,
        "{function}: multiple must be a positive integer, got {multiple!r}",
        lambda c: not is_count(c.multiple),
        example=_arguments(multiple=0),
    ),
    Contract(
        "routing.num_blocks",
        _BLOCKS,
        "{function}: num_blocks must be a multiple of {multiple} and at least {least}, "
        "which the worst routing fills, got {num_blocks!r}",
        lambda c: (
            c.num_blocks is not None
            and c.capacity is None
            and (
                not is_count(c.num_blocks)
                or c.num_blocks < c.least
                or c.num_blocks % c.multiple
            )
        ),
        example=_arguments(num_blocks=4),
        stage=2,
    ),
    Contract(
        "routing.num_blocks_of_capacity",
        _BLOCKS,
        "{function}: num_blocks must be None with capacity, which gives every expert "
        "one block, got {num_blocks}",
        lambda c: c.capacity is not None and c.num_blocks is not None,
        example=_arguments(block_size=None, capacity=2, num_blocks=4),
    ),
)
