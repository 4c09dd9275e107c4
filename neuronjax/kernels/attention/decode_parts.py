"""What a decode step reads: cache and new tokens as two parts, and who sees what.

The two are never joined into one array, and a cache of blocks is gathered in the order
of its table, no further than the slots that count.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer, Shaped

from neuronjax.kernels.attention.decode_masks import as_int32, between
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.kv_cache import block_indices
from neuronjax.kernels.shard_common import uniform

Cached = Shaped[Array, "rows num_kv_heads _ _"]


class Part(NamedTuple):
    """Keys, values, and which each query sees: `[b, n, g, t, s]`, some axes 1."""

    key: jax.Array
    value: jax.Array
    seen: jax.Array
    transposed: bool  # keys are [b, n, d, s]

    @property
    def scores(self) -> str:
        return f"bngtd,{'bnds' if self.transposed else 'bnsd'}->bngts"

    @property
    def back_to_query(self) -> str:
        return f"bngts,{'bnds' if self.transposed else 'bnsd'}->bngtd"

    @property
    def back_to_key(self) -> str:
        return f"bngts,bngtd->{'bnds' if self.transposed else 'bnsd'}"


class Visible(NamedTuple):
    """The operands that say what a query sees, each there or `None`.

    With `lengths`, `mask` covers the new tokens alone; else cache slots and new tokens.
    """

    mask: jax.Array | None
    lengths: jax.Array | None
    starts: jax.Array | None
    table: jax.Array | None


def make_parts(cached, visible, q, prior_slots, tp_k_prior) -> list[Part]:
    """The cache's part, and that of the new tokens if there are any."""
    k_active, v_active, k_prior, v_prior = cached
    (batch, _, seq, _), groups, table = q.shape, k_prior.shape[1], visible.table
    if table is not None:
        keys, values = (gather_blocks(x, table, prior_slots) for x in cached[2:])
    else:
        keys = k_prior[:batch, :, :prior_slots] if tp_k_prior else k_prior[:batch]
        keys = keys if tp_k_prior else keys[..., :prior_slots]
        values = v_prior[:batch, :, :prior_slots]
    by_query = None
    if visible.mask is not None:
        by_query = grouped(jnp.moveaxis(visible.mask.astype(bool), 0, -1), groups)
    if visible.lengths is not None:
        seen = _window(values.shape[2], visible.starts, visible.lengths)
    else:
        assert by_query is not None
        seen, by_query = by_query[..., :prior_slots], by_query[..., prior_slots:]
    if table is not None:
        blocks = v_prior.shape[0], v_prior.shape[2]
        seen = seen & _listed(table, *blocks, prior_slots)[:, None, None, None]
    parts = [_part(q, keys, values, seen, table is None and not tp_k_prior)]
    if k_active is not None:
        causal = (jnp.arange(seq)[:, None] >= jnp.arange(seq))[None, None, None]
        active = causal if by_query is None else by_query
        parts.append(_part(q, k_active, v_active, active, False))
    return parts


def _part(q, key, value, seen, transposed):
    """fp8 values enter as they are: weights rounded to fp8 would err by a sixteenth."""
    if not is_differentiable(key.dtype):
        key, value = key.astype(q.dtype), value.astype(q.dtype)
    return Part(key, value, seen, transposed)


def grouped(x, num_kv_heads):
    """`[batch, heads, ...]` to `[batch, num_kv_heads, group, ...]`."""
    group = x.shape[1] // num_kv_heads
    return x.reshape(x.shape[0], num_kv_heads, group, *x.shape[2:])


def flat(x):
    """The inverse of `grouped`."""
    return lax.collapse(x, 1, 3)


def _window(slots, starts, ends):
    """`[batch, 1, 1, queries, slots]`: the slots from start to end, or all before it.

    They are compared as int32, which no count of another dtype wraps to.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)
    ends = _by_query(ends)
    if starts is None:
        return slot < ends
    return between(slot, _by_query(starts), ends)


def _by_query(x):
    """`[batch]` or `[batch, seq]` to `[batch, 1, 1, 1 or seq, 1]`."""
    x = as_int32(x)
    x = x[:, None] if x.ndim == 1 else x
    return x[:, None, None, :, None]


def _listed(table, num_blocks, block_len, slots) -> Bool[Array, "batch slots"]:
    """Which slots lie in a block: those of an entry out of range are never seen."""
    known = block_indices(table, num_blocks)[:, : -(-slots // block_len)] < num_blocks
    spread = jnp.broadcast_to(known[:, :, None], (*known.shape, block_len))
    return lax.collapse(spread, 1, 3)[:, :slots]


def _places(table, cache, slots):
    """Block and head of each `[batch, head, entry]` that the first `slots` need."""
    index = block_indices(table, cache.shape[0])[:, : -(-slots // cache.shape[2])]
    return index[:, None], jnp.arange(cache.shape[1], dtype=jnp.int32)[:, None]


def gather_blocks(
    cache: Cached, table: Integer[Array, "batch blocks"], slots: int
) -> Shaped[Array, "batch num_kv_heads slots width"]:
    """The first `slots` slots of each sequence; zeros where no block is listed."""
    is_fp8 = not is_differentiable(cache.dtype)
    # As bytes: XLA on a CPU would turn the whole fp8 cache to float16 first.
    raw = lax.bitcast_convert_type(cache, jnp.uint8) if is_fp8 else cache
    picked = raw.at[_places(table, cache, slots)].get(
        mode="fill", fill_value=0, out_sharding=_gathered_sharding(table, cache)
    )
    picked = lax.bitcast_convert_type(picked, cache.dtype) if is_fp8 else picked
    return lax.collapse(picked, 2, 4)[:, :, :slots]


def _gathered_sharding(table, cache):
    """On an explicit mesh, whose gathers name their result: batch as table, heads."""
    batch, heads = jax.typeof(table).sharding, jax.typeof(cache).sharding
    if AxisType.Explicit not in batch.mesh.axis_types:
        return None
    spec = PartitionSpec(batch.spec[0], heads.spec[1], None, None, None)
    return NamedSharding(batch.mesh, spec)


def scatter_blocks(
    grad: Float[Array, "batch num_kv_heads slots width"],
    cache: Cached,
    table: Integer[Array, "batch blocks"],
) -> Float[Array, "rows num_kv_heads block_len width"]:
    """The gradient of a cache whose blocks were gathered; a shared block's are summed.

    Blocks that no table lists, and slots that nobody sees, get zero.
    """
    slots, block_len = grad.shape[2], cache.shape[2]
    grad = jnp.pad(grad, [(0, 0), (0, 0), (0, -slots % block_len), (0, 0)])
    grad = grad.reshape(*grad.shape[:2], -1, block_len, grad.shape[3])
    empty = uniform(jnp.zeros(cache.shape, grad.dtype), grad)[0]
    explicit = _gathered_sharding(table, cache) is not None
    total = empty.at[_places(table, cache, slots)].add(
        grad, mode="drop", out_sharding=jax.typeof(cache).sharding if explicit else None
    )
    return total.astype(cache.dtype)


def pad_cache(
    grad: Float[Array, "batch num_kv_heads _ _"], cache: Cached, slots: int
) -> Float[Array, "rows num_kv_heads _ _"]:
    """The gradient of a flat cache: zero for slots and rows that were left out.

    `slots` is the slots' axis.
    """
    widths = [(0, 0)] * grad.ndim
    for i in (0, slots):
        widths[i] = (0, cache.shape[i] - grad.shape[i])
    return jnp.pad(grad.astype(cache.dtype), widths)
