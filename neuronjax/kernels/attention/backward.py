"""The backward of prefill attention, block by block from the stored statistics.

Dao 2023, FlashAttention-2, algorithm 2, https://arxiv.org/abs/2307.08691. Scores are
formed transposed, keys as rows, and queries and cotangents are held in both
orientations: then no product transposes a block of scores. On XLA:CPU that is 0.72 of
the time of the form with one orientation (8 heads of 64, 2048 positions, float32).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.attention.blocks import (
    Folded,
    Mask,
    Plan,
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

Statistic = Float[Array, "heads q_seq 1"]


class Rows(NamedTuple):
    """What the backward reads of each query row, `[kv_heads, group, rows, ..]`.

    `log_weight` is `neg_max + log(recip)`; `shift` is what the backward of a softmax
    subtracts from `dP`; `tie` is the cotangent of the score that is a row's maximum,
    None where nothing used it.
    """

    q: jax.Array
    d_out: jax.Array | None
    log_weight: jax.Array
    shift: jax.Array
    tie: jax.Array | None


class Factor(NamedTuple):
    """A factor of the block products in both orientations, so that none transposes.

    `rows` is `[kv_heads, group, rows, width]`, `columns` `[kv_heads, width, group,
    rows]`. `poison` is None, or NaN for each row that had a non-finite entry, which was
    zeroed.
    """

    rows: jax.Array
    columns: jax.Array
    poison: jax.Array | None = None


def attention_bwd(
    q: Folded,
    k: Folded,
    v: Folded,
    mask: Mask | None,
    out: Folded,
    neg_max: Statistic,
    recip: Statistic,
    d_out: Folded | None,
    d_neg_max: Statistic | None,
    d_recip: Statistic | None,
    *,
    name: str,
    scale: float,
    is_causal: bool,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    static: bool = False,
    block: int = 256,
    **_hints: object,
) -> tuple[Folded, Folded, Folded]:
    """Returns `(dq, dk, dv)`, each laid out as its operand.

    `p = exp(z + neg_max) * recip` comes from the stored statistics and
    `dz = p * (d_out v^T - rowsum(d_out * out))`; dk and dv are float32 sums over a
    group's query heads. The cotangents of `neg_max` and `recip` count with the true
    derivative of a maximum, shared evenly by ties; where both are None the pass that
    finds the ties is skipped, and without `d_out` so are its products.
    """
    plan = make_plan(is_causal, q.shape[-2 if tp_q else -1], v.shape[-2], block)
    q, k, out = rows_first(q, tp_q), rows_first(k, tp_k), rows_first(out, not tp_out)
    if d_out is not None:
        d_out = rows_first(d_out.astype(q.dtype), not tp_out)
    acc = accumulator(q.dtype)
    shift, tie = _row_terms(out, recip, d_out, d_neg_max, d_recip, acc)
    # A padded row weighs nothing: its weight is far below any exponent's range.
    log_weight: Any = neg_max + jnp.log(recip)
    log_weight = _rows(log_weight, k, plan, fill=unseen(acc))[..., 0]
    terms: list[Any] = [
        None if x is None else _rows(x, k, plan)[..., 0] for x in (shift, tie)
    ]
    d_out = None if d_out is None else _rows(d_out, k, plan)
    whole = Rows(_rows(q, k, plan), d_out, log_weight, *terms)
    keys, values = (pad_rows(x[:, : plan.kv_seq], plan.kv_block) for x in (k, v))
    sweep = functools.partial(_query_block, plan, keys, values, scale, static)
    mask = prepare_mask(mask, plan, k.shape[0])

    def query_block(totals, i):
        row = jax.tree.map(lambda x: cut(x, i, plan.q_block, 2), whole)
        dq, *totals = sweep(row, mask, i, *totals)
        return tuple(totals), dq

    zeros = tuple(like(jnp.zeros_like(x, acc), x, q) for x in (keys, values))
    query_block = jax.checkpoint(query_block) if static else query_block
    (dk, dv), dq = lax.scan(query_block, zeros, jnp.arange(plan.q_blocks))
    dq, dk, dv = unblock(dq, plan.q_seq), _fill(dk, k, plan), _fill(dv, v, plan)
    dq, dk, dv = (x.astype(q.dtype) for x in (dq * scale, dk * scale, dv))
    return dq if tp_q else dq.mT, dk if tp_k else dk.mT, dv


def _rows(x: jax.Array, k: jax.Array, plan: Plan, fill: float = 0) -> jax.Array:
    """`[heads, q_seq, width]` to `[kv_heads, group, whole blocks, width]`."""
    x = pad_rows(grouped(x, k.shape[0]), plan.q_block)
    if fill and x.shape[2] > plan.q_seq:
        return jnp.where(jnp.arange(x.shape[2])[:, None] < plan.q_seq, x, fill)
    return x


def _row_terms(out, recip, d_out, d_neg_max, d_recip, acc) -> tuple[Any, Any]:
    """`(shift, tie)`, `[heads, q_seq, 1]`.

    With `m` the maximum, `d recip = -recip * sum(p dz) + recip * dm` and
    `d neg_max = -dm`.
    """
    shift = jnp.zeros_like(recip)
    if d_out is not None:
        shift = (out.astype(acc) * d_out.astype(acc)).sum(-1)[..., None]
    if d_recip is None and d_neg_max is None:
        return shift, None
    pull = 0 if d_recip is None else d_recip * recip
    return shift + pull, pull - (0 if d_neg_max is None else d_neg_max)


def _fill(total: jax.Array, x: jax.Array, plan: Plan) -> jax.Array:
    """Cuts the padding off, and adds the zeros of keys that no row can see."""
    total = total[:, : plan.kv_seq]
    return jnp.pad(total, [(0, 0), (0, x.shape[1] - plan.kv_seq), (0, 0)])


def _factor(x: jax.Array, guarded: bool, acc: jnp.dtype) -> Factor:
    x, poison = clean(x, acc) if guarded else (x, None)
    return Factor(x, jnp.moveaxis(x, -1, 1), poison)


def _query_block(plan, keys, values, scale, static, row, mask, i, dk, dv):
    """Adds one query block to `dk` and `dv`; returns its `dq` before them."""
    acc = dk.dtype
    sweep = functools.partial(visit, plan, mask, i, static=static)
    # One set for the blocks that every row sees whole, one for the others.
    factors: dict[bool, Any] = {
        guarded: tuple(
            None if x is None else _factor(x, guarded, acc) for x in (row.q, row.d_out)
        )
        for guarded in (False, True)
    }

    def parts(j, seen):
        k, v = (cut(x, j, plan.kv_block)[:, None] for x in (keys, values))
        k, v = (_factor(x, seen is not None, acc) for x in (k, v))
        seen = None if seen is None else jnp.moveaxis(seen, -1, 1)
        q, d_out = factors[seen is not None]
        return q, d_out, k, v, seen, _scores(q, k, seen, scale, acc)

    def find(j, carry, seen):
        return _fold_ties(lax.stop_gradient(parts(j, seen)[-1]), *carry)

    zero = like(jnp.zeros_like(factors[False][0].columns, acc), row.q)
    shares = None
    if row.tie is not None:
        start = zero[:, 0]
        top, ties = sweep(find, (start + unseen(acc) / 2, start))
        shares = top, row.tie / jnp.maximum(ties, 1)

    def fold(j, carry, seen):
        dq, *totals = carry
        dq_part, *updates = _gradients(row, *parts(j, seen), shares)
        at = j * plan.kv_block
        for n, (total, update) in enumerate(zip(totals, updates, strict=True)):
            if update is not None:
                update += cut(total, j, plan.kv_block)
                totals[n] = lax.dynamic_update_slice_in_dim(total, update, at, 1)
        return dq + dq_part, *totals

    dq, dk, dv = sweep(fold, (zero, dk, dv))
    return jnp.moveaxis(dq, 1, -1), dk, dv


def _scores(q: Factor, k: Factor, seen, scale, acc):
    """`scale * k q^T`, `[kv_heads, keys, group, rows]`; the sentinel where unseen."""
    z = product("nkd,ndgq->nkgq", k.rows[:, 0], q.columns, acc) * scale
    if seen is None:
        return z
    z = z + q.poison[:, None] + k.poison[:, 0, :, None, None]
    return jnp.where(seen, z, unseen(acc))


def _fold_ties(z: jax.Array, top: jax.Array, ties: jax.Array):
    """The running max of each row and how many scores share it."""
    new = jnp.maximum(top, z.max(1))
    equal = (z == new[:, None]).sum(1, dtype=ties.dtype)
    return new, jnp.where(new == top, ties, 0) + equal


def _gradients(row: Rows, q, d_out, k, v, seen, z, shares):
    """What a block of keys adds: `dq^T` and `dk` without the scale, and `dv`."""
    acc, low = z.dtype, q.rows.dtype
    p, dp, dv = _weights(row, z, seen), 0.0, None
    if d_out is not None:
        weights = p
        dp = product("nkd,ndgq->nkgq", v.rows[:, 0], d_out.columns, acc)
        if seen is not None:
            dp = dp + v.poison[:, 0, :, None, None] + d_out.poison[:, None]
            weights = jnp.where(seen, p + d_out.poison[:, None], 0)
        dv = product("nkgq,ngqd->nkd", weights.astype(low), d_out.rows, acc)
    dz = p * (dp - row.shift[:, None])
    dz = dz if seen is None else jnp.where(seen, dz, 0)
    if shares is not None:
        top, share = shares
        dz = dz + jnp.where(z == top[:, None], share[:, None], 0)
    dz = dz.astype(low)
    dq = product("ndk,nkgq->ndgq", k.columns[:, :, 0], dz, acc)
    return dq, product("nkgq,ngqd->nkd", dz, q.rows, acc), dv


def _weights(row: Rows, z, seen):
    """The softmax from its stored statistics; unseen scores give exactly 0."""
    z = z + row.log_weight[:, None]
    return jnp.exp(z if seen is None else jnp.where(seen, z, unseen(z.dtype)))
