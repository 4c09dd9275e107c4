"""Prefill attention on tiles: every contraction runs over partitions and chunks.

A tile of a tensor on an axis of size `128 * C` is `[p, c, *other axes]`, where index
`p * C + c` of the axis lies in partition `p`, chunk `c`. Queries and keys lie on the
head dimension, values on their sequence; outputs and statistics on the queries'.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.attention.blocks import clean, product, unseen
from neuronjax.kernels.dtypes import accumulator

Tile = Float[Array, "partitions chunks _ _"]


def attention_tiled_fwd(
    q: Float[Array, "d_partitions d_chunks heads q_seq"],
    k: Float[Array, "d_partitions d_chunks kv_heads kv_seq"],
    v: Float[Array, "kv_partitions kv_chunks kv_heads value_dim"],
    *,
    name: str,
    scale: float,
    is_causal: bool,
    block: int = 128,
    **_hints: object,
) -> tuple[Tile, Tile, Tile]:
    """Returns the tiles `out` `[p, c, heads, value_dim]`, `neg_max` and `recip`.

    Up to `block` queries (whole partitions) are attended at a time: their scores
    against all keys are all that is held. There is no mask, so every row sees a key.
    """
    kv_heads, q_seq, acc = k.shape[2], q.shape[3], accumulator(q.dtype)
    partitions = min(q_seq, 128)
    chunks = q_seq // partitions
    # A power of two divides the 128 partitions; with one chunk a block is all of them.
    lines = (
        partitions if chunks == 1 else 2 ** max(0, (block // chunks).bit_length() - 1)
    )
    rows = lines * chunks
    q = q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q_seq)

    def query_block(_, start):
        part = lax.dynamic_slice_in_dim(q, start, rows, 4)
        seen = jnp.arange(k.shape[3]) <= start + jnp.arange(rows)[:, None]
        seen = seen if is_causal else jnp.ones_like(seen)
        return None, _attend(part, k, v, seen, scale, acc)

    starts = jnp.arange(partitions // lines) * rows
    _, (out, neg_max, recip) = lax.scan(jax.checkpoint(query_block), None, starts)
    out, neg_max, recip = (
        _as_tile(x, lines, chunks) for x in (out.astype(q.dtype), neg_max, recip)
    )
    return out, neg_max, recip


def _attend(q, k, v, seen, scale, acc):
    """Softmax attention of some rows to all keys, `[kv_heads, group, rows, width]`."""
    (q, q_poison), (k, k_poison) = _clean(q, acc), _clean(k, acc)
    z = product("pcngq,pcnk->ngqk", q, k, acc) * scale
    z = z + q_poison[..., None] + k_poison[:, None, None]
    z = jnp.where(seen, z, unseen(acc))
    top = z.max(-1, keepdims=True)
    p = jnp.exp(z - top)
    recip = 1 / p.sum(-1, keepdims=True)
    # The keys' axis is split like the values': (partition, chunk).
    weights = (p * recip).astype(v.dtype).reshape(*p.shape[:3], *v.shape[:2])
    v, poison = clean(v, acc)
    out = product("ngqpc,pcnd->ngqd", weights, v, acc)
    blemish = jnp.moveaxis(poison, 2, 0).reshape(v.shape[2], 1, 1, -1)
    out = out + jnp.where(seen, blemish, 0).sum(-1, keepdims=True)
    return out, -top, recip


def _clean(x: jax.Array, acc: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Like `clean`, for columns that lie on (partition, chunk)."""
    finite = jnp.isfinite(x)
    poison = jnp.where(finite.all((0, 1)), 0, jnp.nan).astype(acc)
    return jnp.where(finite, x, 0), poison


def _as_tile(x: jax.Array, lines: int, chunks: int) -> jax.Array:
    """`[blocks, kv_heads, group, lines * chunks, width]` to `[p, c, heads, width]`."""
    x = x.reshape(*x.shape[:3], lines, chunks, x.shape[4])
    x = jnp.transpose(x, (0, 3, 4, 1, 2, 5))
    return lax.collapse(lax.collapse(x, 0, 2), 2, 4)
