"""Prefill attention, block by block: no temporary has both sequence lengths.

Dao et al. 2022, FlashAttention, algorithm 1, https://arxiv.org/abs/2205.14135; the
running maximum is Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.attention.blocks import (
    Folded,
    Mask,
    clean,
    cut,
    grouped,
    like,
    make_plan,
    pad_rows,
    prepare_mask,
    product,
    rows_first,
    unblock,
    unseen,
    visit,
)
from neuronjax.kernels.dtypes import accumulator

Rows = Float[Array, "heads q_seq 1"]


@jax.custom_jvp
def _differentiate_as(value: jax.Array, same: jax.Array) -> jax.Array:
    """`value`, with the derivative of `same`: an expression equal to it."""
    return value


@_differentiate_as.defjvp
def _(primals, tangents):
    return _differentiate_as(*primals), tangents[1]  # again: for higher derivatives


def attention_fwd(
    q: Folded,
    k: Folded,
    v: Folded,
    mask: Mask | None,
    *,
    name: str,
    scale: float,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    static: bool = False,
    block: int = 256,
    **_hints: object,
) -> tuple[Folded, Rows, Rows]:
    """Returns `out = softmax(scale * q k^T) v`, its negative row max and 1 / row sum.

    Batch is folded into the heads; query head `h` uses key head `h // group`. `q` is
    `[heads, q_seq, d]` if `tp_q`, else `[heads, d, q_seq]`; `k` is
    `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`; `out` is
    `[heads, q_seq, value_dim]`, transposed if `tp_out`. Causal when `name` says so,
    with row 0 at key 0. Sums are float32 (float64 for float64 inputs).

    A row that sees no key gets `out = 0`, `neg_max = inf`, `recip = 1`: the log-sum-exp
    `-neg_max - log(recip)` is -inf and nothing is divided by zero. A non-finite key or
    value reaches only the rows that see it. `static` takes loops of fixed length, which
    can be transposed; blocks that nobody sees then cost as much as others.
    """
    plan = make_plan("Causal" in name, q.shape[-2 if tp_q else -1], v.shape[-2], block)
    q, k = rows_first(q, tp_q), rows_first(k, tp_k)
    num_kv_heads, acc = k.shape[0], accumulator(q.dtype)
    q = pad_rows(grouped(q, num_kv_heads), plan.q_block)
    k, v = (pad_rows(x[:, : plan.kv_seq], plan.kv_block) for x in (k, v))
    mask = prepare_mask(mask, plan, num_kv_heads)

    def query_block(_, i):
        q_block = cut(q, i, plan.q_block)

        def fold(j, carry, seen):
            k_block, v_block = (cut(x, j, plan.kv_block) for x in (k, v))
            z = _scores(q_block, k_block, seen, scale, acc)
            return _fold(carry, z, v_block, seen)

        carry = visit(plan, mask, i, fold, _start(q_block, v, acc), static=static)
        return None, _finish(*carry)

    query_block = jax.checkpoint(query_block) if static else query_block
    _, blocks = lax.scan(query_block, None, jnp.arange(plan.q_blocks))
    out, neg_max, recip = (unblock(x, plan.q_seq) for x in blocks)
    out = out.astype(q.dtype)
    return out.mT if tp_out else out, neg_max, recip


def _start(q_block: jax.Array, v: jax.Array, acc: jnp.dtype):
    """The fold's carry: product, running max, running sum, and the ties of the max."""
    row = like(jnp.zeros_like(q_block[..., 0], acc), q_block)
    out = jnp.broadcast_to(row[..., None], (*row.shape, v.shape[-1]))
    return out, row + unseen(acc) / 2, row, row, row


def _scores(q, k, seen, scale, acc):
    """`scale * q k^T` where `seen`, elsewhere the sentinel."""
    if seen is None:
        return product("ngqd,nkd->ngqk", q, k, acc) * scale
    (q, q_poison), (k, k_poison) = clean(q, acc), clean(k, acc)
    z = product("ngqd,nkd->ngqk", q, k, acc) * scale
    z = z + q_poison[..., None] + k_poison[:, None, None]
    return jnp.where(seen, z, unseen(acc))


def _fold(carry, z, v, seen):
    """Adds one block of scores and values to the carry.

    The running max is held constant in derivatives: the output doesn't depend on it.
    Its own derivative, the mean over its ties, comes from the last two of the carry,
    which XLA drops where nobody asks for it.
    """
    out, top, total, ties, tie_sum = carry
    new = lax.stop_gradient(jnp.maximum(top, z.max(-1)))
    p, decay = jnp.exp(z - new[..., None]), jnp.exp(top - new)
    if seen is None:
        pv = product("ngqk,nkd->ngqd", p.astype(v.dtype), v, out.dtype)
    else:
        v, poison = clean(v, out.dtype)
        pv = product("ngqk,nkd->ngqd", p.astype(v.dtype), v, out.dtype)
        poison = jnp.where(seen, poison[:, None, None], 0).sum(-1)
        pv = pv + poison[..., None]
    tied, kept = z == new[..., None], top == new
    ties = jnp.where(kept, ties, 0) + tied.sum(-1, dtype=ties.dtype)
    tie_sum = jnp.where(kept, tie_sum, 0) + jnp.where(tied, z, 0).sum(-1)
    total = total * decay + p.sum(-1)
    return out * decay[..., None] + pv, new, total, ties, tie_sum


def _finish(out, top, total, ties, tie_sum):
    seen = total != 0  # NaN is seen
    total = jnp.where(seen, total, 1)
    top = _differentiate_as(top, tie_sum / jnp.maximum(ties, 1))
    out = out * (1 / total)[..., None]
    recip = 1 / (total * jnp.exp(lax.stop_gradient(top) - top))
    return out, jnp.where(seen, -top, jnp.inf)[..., None], recip[..., None]
