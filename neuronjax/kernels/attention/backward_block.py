"""One block of query rows of the attention backward: its part of every gradient."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.attention.blocks import (
    clean,
    cut,
    like,
    lowest,
    product,
    unseen,
)
from neuronjax.kernels.attention.options import Options
from neuronjax.kernels.attention.prefill import biased, rounded
from neuronjax.kernels.attention.segments import Index, Segment, block_of, visit


class Row(NamedTuple):
    """What the backward reads of each query row, `[kv_heads, group, rows, ..]`.

    `shift` is what the backward of a softmax subtracts from `dP`; `tie` is the
    cotangent of the score that is a row's maximum, None where nothing used it.
    """

    q: jax.Array
    d_out: jax.Array | None
    neg_max: jax.Array
    recip: jax.Array
    shift: jax.Array
    tie: jax.Array | None


class Totals(NamedTuple):
    """The gradients of one segment as they grow; that of the bias is spread like it."""

    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


class Factor(NamedTuple):
    """A factor of the block products in both orientations, so that none transposes.

    `rows` is `[kv_heads, group, rows, width]`, `columns` `[kv_heads, width, group,
    rows]`. `poison` is None, or NaN for each row that had a non-finite entry, which was
    zeroed.
    """

    rows: jax.Array
    columns: jax.Array
    poison: jax.Array | None = None


class Scores(NamedTuple):
    """The scores of one block, keys first: `[kv_heads, keys, group, rows]`.

    `slope` is the derivative of the soft cap, None without one; `size` is that of the
    terms that were added up, whose rounding `z` carries.
    """

    z: jax.Array
    slope: jax.Array | None
    size: jax.Array | float = 0.0


def block_gradients(
    segments: Sequence[Segment],
    i: Index,
    row: Row,
    sink: jax.Array | None,
    totals: Sequence[Totals],
    d_sink: jax.Array | None,
    *,
    options: Options,
    weights: Callable[[Segment, Index, Index], jax.Array | None],
    static: bool,
):
    """Adds query block `i` to the totals; returns `((totals, d_sink), dq)`.

    `dq` and the totals of the keys lack the scale.
    """
    acc, factors = row.neg_max.dtype, _row_factors(row)

    def score(segment, j, seen):
        k = _keys(segment.key, segment, j, seen, acc)
        z = _scores(factors[seen is not None][0], k, seen, options, acc)
        return k, z if segment.bias is None else _biased(z, segment, i, j, seen)

    shares = _shares(segments, i, row, sink, score, static)

    def fold(segment, j, carry, seen):
        dq, total = carry
        k, z = score(segment, j, seen)
        q, d_out = factors[seen is not None]
        v = _keys(segment.value, segment, j, seen, acc)
        turned, drop = _keys_first(seen), _keys_first(weights(segment, i, j))
        dz, dv = _score_gradient(row, z, d_out, v, turned, drop, shares)
        total = _add_bias(total, dz, segment, i, j)
        dz = dz if z.slope is None else dz * z.slope
        dz = dz.astype(q.rows.dtype)
        dq = dq + product("ndk,nkgq->ndgq", k.columns[:, :, 0], dz, acc)
        dk = product("nkgq,ngqd->nkd", dz, q.rows, acc)
        return dq, _add_keys(total, segment, j, dk, dv)

    dq = like(jnp.zeros_like(factors[False][0].columns, acc), row.q)
    grown = []
    for segment, total in zip(segments, totals, strict=True):
        visited = functools.partial(fold, segment)
        dq, total = visit(segment, i, visited, (dq, total), static=static)
        grown.append(total)
    if d_sink is not None and sink is not None:
        d_sink = d_sink + _sink_gradient(row, sink, shares)
    return (grown, d_sink), jnp.moveaxis(dq, 1, -1)


def _row_factors(row: Row) -> dict[bool, Any]:
    """`q` and `d_out`, plain for the blocks that every row sees whole, else guarded."""
    acc, rows = row.neg_max.dtype, (row.q, row.d_out)
    return {
        guarded: tuple(None if x is None else _factor(x, guarded, acc) for x in rows)
        for guarded in (False, True)
    }


def _keys_first(x: jax.Array | None) -> jax.Array | None:
    """`[.., .., rows, keys]` as the scores lie here."""
    return None if x is None else jnp.moveaxis(x, -1, 1)


def _factor(x: jax.Array, guarded: bool, acc: jnp.dtype) -> Factor:
    x, poison = clean(x, acc) if guarded else (x, None)
    return Factor(x, jnp.moveaxis(x, -1, 1), poison)


def _keys(x: jax.Array, segment: Segment, j: Index, seen, acc: jnp.dtype) -> Factor:
    return _factor(cut(x, j, segment.block)[:, None], seen is not None, acc)


def _scores(q: Factor, k: Factor, seen, options: Options, acc: jnp.dtype) -> Scores:
    """Without the bias; the sentinel where unseen."""
    z = product("nkd,ndgq->nkgq", k.rows[:, 0], q.columns, acc)
    z = rounded(z, options.mm_out_dtype) * options.scale
    slope, size = None, 0.0
    if options.soft_cap:
        squashed = jnp.tanh(z / options.soft_cap)
        z, slope = options.soft_cap * squashed, 1 - squashed**2
        size = jnp.abs(z)
    if seen is None:
        return Scores(z, slope, size)
    assert q.poison is not None and k.poison is not None
    z = z + q.poison[:, None] + k.poison[:, 0, :, None, None]
    z = jnp.where(jnp.moveaxis(seen, -1, 1), z, lowest(acc))
    return Scores(z, slope, size)


def _biased(z: Scores, segment: Segment, i: Index, j: Index, seen) -> Scores:
    assert segment.bias is not None
    bias, seen = block_of(segment.bias, segment, i, j), jnp.moveaxis(seen, -1, 1)
    bias = jnp.moveaxis(bias, -1, 1)
    size = jnp.abs(z.z) + jnp.abs(jnp.where(seen, bias, 0)).astype(z.z.dtype)
    return z._replace(z=biased(z.z, bias, seen), size=size)


def _shares(segments, i, row: Row, sink, score, static):
    """Each row's maximum, and the part of `row.tie` that one tie of it gets."""
    if row.tie is None:
        return None
    start = jnp.zeros_like(row.recip)
    carry = start + lowest(start.dtype), start
    if sink is not None:
        top = jnp.maximum(carry[0], sink)
        carry = top, _is_top(sink, top).astype(start.dtype)
    carry = lax.stop_gradient(carry)

    def find(segment, j, carry, seen):
        z = lax.stop_gradient(score(segment, j, seen)[1])
        return _fold_ties(z, _keys_first(seen), *carry)

    for segment in segments:
        visited = functools.partial(find, segment)
        carry = visit(segment, i, visited, carry, static=static)
    top, ties = carry
    return top, row.tie / jnp.maximum(ties, 1)


def _fold_ties(z: Scores, seen, top: jax.Array, ties: jax.Array):
    """The running max of each row and how many scores share it."""
    new = jnp.maximum(top, z.z.max(1))
    equal = _is_top(z.z, new[:, None], z.size)
    equal = equal if seen is None else equal & seen
    kept = jnp.where(_is_top(top, new), ties, 0)
    return new, kept + equal.sum(1, dtype=ties.dtype)


def _is_top(z: jax.Array, top: jax.Array, size: jax.Array | float = 0.0) -> jax.Array:
    """Whether `z` is the maximum, but for the rounding of what was added up to it.

    The pass that finds the maximum and the one that uses it are two loops. Both form
    the same products, but may round a soft cap and a bias apart.
    """
    return z >= top - 4 * float(jnp.finfo(z.dtype).eps) * size


def _score_gradient(row: Row, scores: Scores, d_out, v: Factor, seen, drop, shares):
    """`dz` of a block, and what it adds to `dv`; None without `d_out`."""
    z, acc, low = scores.z, scores.z.dtype, row.q.dtype
    p, dp, dv = _weights(row, z, seen), jnp.zeros((), acc), None
    if d_out is not None:
        kept = p
        dp = product("nkd,ndgq->nkgq", v.rows[:, 0], d_out.columns, acc)
        if seen is not None:
            assert v.poison is not None and d_out.poison is not None
            dp = dp + v.poison[:, 0, :, None, None] + d_out.poison[:, None]
            kept = jnp.where(seen, p + d_out.poison[:, None], 0)
        if drop is not None:
            kept, dp = kept * drop, dp * drop
        dv = product("nkgq,ngqd->nkd", kept.astype(low), d_out.rows, acc)
    dz = p * (dp - row.shift[:, None])
    if shares is not None:
        top, share = shares
        tied = _is_top(z, top[:, None], scores.size)
        dz = dz + jnp.where(tied, share[:, None], 0)
    return dz if seen is None else jnp.where(seen, dz, 0), dv


def _weights(row: Row, z, seen):
    """The softmax from its stored statistics; unseen scores give exactly 0."""
    z = z + row.neg_max[:, None]
    z = z if seen is None else jnp.where(seen, z, unseen(z.dtype))
    # Not exp(z + log(1 / sum)): beside a maximum of 1e6 the logarithm would round away.
    return jnp.exp(z) * row.recip[:, None]


def _sink_gradient(row: Row, sink: jax.Array, shares) -> jax.Array:
    """Summed over the rows, `[kv_heads, group]`: the sink is a score without a key."""
    blank = row.neg_max == jnp.inf  # a row that sees neither key nor sink
    z = jnp.where(blank, unseen(sink.dtype), sink + jnp.where(blank, 0, row.neg_max))
    dz = -jnp.exp(z) * row.recip * row.shift
    if shares is not None:
        top, share = shares
        dz = dz + jnp.where(_is_top(sink, top), share, 0)
    return dz.sum(-1)


def _add_keys(total: Totals, segment: Segment, j: Index, dk, dv) -> Totals:
    def add(x, part):
        if part is None:
            return x
        part = part + cut(x, j, segment.block)
        return lax.dynamic_update_slice_in_dim(x, part, j * segment.block, 1)

    return total._replace(key=add(total.key, dk), value=add(total.value, dv))


def _add_bias(total: Totals, dz, segment: Segment, i: Index, j: Index) -> Totals:
    """Adds `dz`, summed over the axes on which the bias has size 1."""
    bias = total.bias
    if bias is None:
        return total
    part = jnp.moveaxis(dz, 1, -1)
    summed = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
    part = part.sum(summed, keepdims=True) + block_of(bias, segment, i, j)
    at: list[Any] = [0, 0, 0, 0]
    if bias.shape[2] > 1:
        at[2] = i * segment.rows.block
    if bias.shape[3] > 1:
        at[3] = j * segment.block
    at = [jnp.asarray(x, jnp.int32) for x in at]
    return total._replace(bias=lax.dynamic_update_slice(bias, part, at))
