"""Prefill attention, block by block: no temporary has both sequence lengths.

Dao et al. 2022, FlashAttention, algorithm 1, https://arxiv.org/abs/2205.14135; the
running maximum is Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.attention.blocks import (
    Folded,
    clean,
    cut,
    grouped,
    like,
    lowest,
    pad_rows,
    product,
    rows_first,
    unblock,
)
from neuronjax.kernels.attention.dropout import block_weights
from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.attention.segments import (
    block_of,
    cut_rows,
    make_segments,
    visit,
)
from neuronjax.kernels.dtypes import accumulator

Rows = Float[Array, "heads q_seq 1"]


def _differentiate_as(value: jax.Array, same: jax.Array) -> jax.Array:
    """`value`, with all derivatives of `same`: an expression equal to it.

    Both differ by a rounding, so their difference is exact. A rule of its own
    (`jax.custom_jvp`) would be forgotten in a scan that is differentiated in reverse:
    pushed forward afterwards, its second derivative is that of `value`.
    """
    rounding = jnp.where(jnp.isfinite(value), value - same, 0)
    return same + lax.stop_gradient(rounding)


def attention_fwd(
    q: Folded,
    k: Folded,
    v: Folded,
    extras: Extras,
    *,
    name: str,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    static: bool = False,
    block: int = 256,
    **config: object,
) -> tuple[Folded, Rows, Rows]:
    """Returns `out = softmax(z) v`, the negative row max of `z` and 1 / row sum.

    `z = scale * q k^T`, then the soft cap, then the bias; the sink is one more score.
    Batch is folded into the heads; query head `h` uses key head `h // group`. `q` is
    `[heads, q_seq, d]` if `tp_q`, else `[heads, d, q_seq]`; `k` is
    `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`; `out` is
    `[heads, q_seq, value_dim]`, transposed if `tp_out`. `config` holds the fields of
    `Options`. Sums are float32 (float64 for float64 inputs).

    A row that sees no key gets `out = 0`, and without a sink `neg_max = inf`,
    `recip = 1`: the log-sum-exp `-neg_max - log(recip)` is -inf and nothing is divided
    by zero. A non-finite key or value reaches only the rows that see it. `static` takes
    loops of fixed length, which can be transposed; blocks that nobody sees then cost as
    much as others.
    """
    options, rows = Options.of(config), cut_rows(q.shape[-2 if tp_q else -1], block)
    segments = make_segments(rows, k, v, extras, options, block, tp_k)
    acc, dtype, heads = accumulator(q.dtype), q.dtype, k.shape[0]
    q = pad_rows(grouped(rows_first(q, tp_q), heads), rows.block)
    sink = None if extras.sink is None else grouped(extras.sink.astype(acc), heads)
    weights = block_weights(extras, options, heads)

    def query_block(_, i):
        q_block = cut(q, i, rows.block)

        def fold(segment, j, carry, seen):
            k_block = cut(segment.key, j, segment.block)
            z = scores(q_block, k_block, seen, options, acc)
            if segment.bias is not None:
                z = biased(z, block_of(segment.bias, segment, i, j), seen)
            v_block = cut(segment.value, j, segment.block)
            drop = weights(segment, i, j)
            return _fold(carry, z, v_block, seen, drop, options.softmax_dtype)

        carry = _start(q_block, v, sink, acc)
        for segment in segments:
            visited = functools.partial(fold, segment)
            carry = visit(segment, i, visited, carry, static=static)
        return None, _finish(*carry)

    query_block = jax.checkpoint(query_block) if static else query_block
    numbers = jnp.arange(rows.blocks, dtype=jnp.int32)
    _, blocks = lax.scan(query_block, None, numbers)
    out, neg_max, recip = (unblock(x, rows.seq) for x in blocks)
    out = out.astype(dtype)
    return out.mT if tp_out else out, neg_max, recip


def _start(q_block: jax.Array, v: jax.Array, sink: jax.Array | None, acc: jnp.dtype):
    """The fold's carry: product, running max, running sum, and the ties of the max."""
    row = like(jnp.zeros_like(q_block[..., 0], acc), q_block)
    out = jnp.broadcast_to(row[..., None], (*row.shape, v.shape[-1]))
    top = row + lowest(acc)
    if sink is None:
        return out, top, row, row, row
    sink = sink + row
    top = lax.stop_gradient(jnp.maximum(top, sink))
    tied = sink == top
    tie_sum = jnp.where(tied, sink, 0)
    return out, top, jnp.exp(sink - top), tied.astype(acc), tie_sum


def scores(q, k, seen, options: Options, acc: jnp.dtype):
    """The scores of one block but for the bias; the sentinel where unseen."""
    if seen is None:
        return _scored(q, k, options, acc)
    (q, q_poison), (k, k_poison) = clean(q, acc), clean(k, acc)
    z = _scored(q, k, options, acc) + q_poison[..., None] + k_poison[:, None, None]
    return jnp.where(seen, z, lowest(acc))


def _scored(q, k, options: Options, acc: jnp.dtype):
    z = rounded(product("ngqd,nkd->ngqk", q, k, acc), options.mm_out_dtype)
    return capped(z * options.scale, options.soft_cap)


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """`x` rounded to `dtype`, which is wider or float32 where nothing is to be done."""
    return x if dtype == "float32" else x.astype(dtype).astype(x.dtype)


def capped(z: jax.Array, soft_cap: float) -> jax.Array:
    """`c * tanh(z / c)`; `z` without a cap."""
    return soft_cap * jnp.tanh(z / soft_cap) if soft_cap else z


def biased(z: jax.Array, bias: jax.Array, seen: jax.Array) -> jax.Array:
    """`z + bias` where seen, and no lower than the lowest score."""
    total = z + jnp.where(seen, bias, 0).astype(z.dtype)
    return jnp.where(seen & (total < lowest(z.dtype)), lowest(z.dtype), total)


def _fold(carry, z, v, seen, drop, softmax_dtype: str):
    """Adds one block of scores and values to the carry.

    The running max is held constant in derivatives: the output doesn't depend on it.
    Its own derivative, the mean over its ties, comes from the last two of the carry,
    which XLA drops where nobody asks for it.
    """
    out, top, total, ties, tie_sum = carry
    new = lax.stop_gradient(jnp.maximum(top, z.max(-1)))
    p, decay = jnp.exp(z - new[..., None]), jnp.exp(top - new)
    p = rounded(p if seen is None else jnp.where(seen, p, 0), softmax_dtype)
    kept = (p if drop is None else p * drop).astype(v.dtype)
    if seen is None:
        pv = product("ngqk,nkd->ngqd", kept, v, out.dtype)
    else:
        v, poison = clean(v, out.dtype)
        pv = product("ngqk,nkd->ngqd", kept, v, out.dtype)
        poison = jnp.where(seen, poison[:, None, None], 0).sum(-1)
        pv = pv + poison[..., None]
    tied, same = z == new[..., None], top == new
    tied = tied if seen is None else tied & seen
    ties = jnp.where(same, ties, 0) + tied.sum(-1, dtype=ties.dtype)
    tie_sum = jnp.where(same, tie_sum, 0) + jnp.where(tied, z, 0).sum(-1)
    total = total * decay + p.sum(-1)
    return out * decay[..., None] + pv, new, total, ties, tie_sum


def _finish(out, top, total, ties, tie_sum):
    seen = total != 0  # NaN is seen
    total = jnp.where(seen, total, 1)
    top = _differentiate_as(top, tie_sum / jnp.maximum(ties, 1))
    out = out * (1 / total)[..., None]
    recip = 1 / (total * jnp.exp(lax.stop_gradient(top) - top))
    return out, jnp.where(seen, -top, jnp.inf)[..., None], recip[..., None]
