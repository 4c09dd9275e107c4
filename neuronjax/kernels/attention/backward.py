"""The backward of prefill attention, block by block from the stored statistics.

Dao 2023, FlashAttention-2, algorithm 2, https://arxiv.org/abs/2307.08691. Scores are
formed transposed, keys as rows, and queries and cotangents are held in both
orientations: then no product transposes a block of scores. On XLA:CPU that is 0.72 of
the time of the form with one orientation (8 heads of 64, 2048 positions, float32).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.attention.backward_block import Row, Totals, block_gradients
from neuronjax.kernels.attention.blocks import (
    Folded,
    cut,
    grouped,
    like,
    pad_rows,
    row_products,
    rows_first,
    unblock,
    unseen,
)
from neuronjax.kernels.attention.dropout import block_weights
from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.attention.segments import Rows, Segment, cut_rows, make_segments
from neuronjax.kernels.dtypes import accumulator

Statistic = Float[Array, "heads q_seq 1"]


def attention_bwd(
    q: Folded,
    k: Folded,
    v: Folded,
    extras: Extras,
    out: Folded,
    neg_max: Statistic,
    recip: Statistic,
    d_out: Folded | None,
    d_neg_max: Statistic | None,
    d_recip: Statistic | None,
    *,
    name: str,
    tp_q: bool,
    tp_k: bool,
    tp_out: bool,
    static: bool = False,
    block: int = 256,
    **config: object,
) -> tuple[Array, ...]:
    """Returns the gradients of the float operands that are there, in their order.

    Each is laid out as its operand. `p = exp(z + neg_max) * recip` comes from the
    stored statistics and `dz = p * (d_out v^T - rowsum(d_out * out))`; dk and dv are
    float32 sums over a group's query heads, the bias's gradient over the axes on which
    it has size 1, the sink's over the rows. The cotangents of `neg_max` and `recip`
    count with the true derivative of a maximum, shared evenly by ties; where both are
    None the pass that finds the ties is skipped, and without `d_out` so are its
    products. `config` holds the fields of `Options`.
    """
    options, rows = Options.of(config), cut_rows(q.shape[-2 if tp_q else -1], block)
    segments = make_segments(rows, k, v, extras, options, block, tp_k)
    acc, dtype, heads = accumulator(q.dtype), q.dtype, k.shape[0]
    q, out = rows_first(q, tp_q), rows_first(out, not tp_out)
    if d_out is not None:
        d_out = rows_first(d_out.astype(dtype), not tp_out)
    pulled = _row_terms(out, recip, d_out, d_neg_max, d_recip, acc)
    whole = _whole_rows(q, d_out, (neg_max, recip), pulled, heads, rows)
    sink = None if extras.sink is None else grouped(extras.sink.astype(acc), heads)
    settings: dict[str, Any] = dict(options=options, static=static)
    settings["weights"] = block_weights(extras, options, heads)

    def query_block(sums, i):
        row = jax.tree.map(lambda x: cut(x, i, rows.block, 2), whole)
        return block_gradients(segments, i, row, sink, *sums, **settings)

    start = [_zeros(segment, acc, whole.q) for segment in segments]
    d_sink = None if sink is None else jnp.zeros_like(whole.recip[..., 0])
    query_block = jax.checkpoint(query_block) if static else query_block
    numbers = jnp.arange(rows.blocks, dtype=jnp.int32)
    (totals, d_sink), dq = lax.scan(query_block, (start, d_sink), numbers)
    dq = (unblock(dq, rows.seq) * options.scale).astype(dtype)
    keys = [
        _key_gradients(segment, total, options.scale, tp_k)
        for segment, total in zip(segments, totals, strict=True)
    ]
    more = _extra_gradients(extras, segments, totals, rows, d_sink)
    prior = [] if extras.k_prior is None else keys[0]
    return (dq if tp_q else dq.mT, *keys[-1], *more, *prior)


def _extra_gradients(extras: Extras, segments, totals, rows: Rows, d_sink):
    """Those of the bias and the sink that are there."""
    grads = []
    if extras.bias is not None:
        grads.append(_bias_gradient(extras.bias, segments, totals, rows))
    if extras.sink is not None:
        d_sink = lax.collapse(d_sink, 0, 2)[:, None]
        grads.append(d_sink.astype(extras.sink.dtype))
    return grads


def _whole_rows(q, d_out, statistics, pulled: tuple, heads, rows: Rows) -> Row:
    """The rows of every block, padded."""

    def spread(x, fill: float = 0) -> Any:
        x = pad_rows(grouped(x, heads), rows.block)
        if fill and x.shape[2] > rows.seq:
            return jnp.where(jnp.arange(x.shape[2])[:, None] < rows.seq, x, fill)
        return x

    # A padded row weighs nothing: its weight is far below any exponent's range.
    neg_max, recip = statistics
    neg_max = spread(neg_max, unseen(neg_max.dtype))[..., 0]
    d_out = None if d_out is None else spread(d_out)
    terms: Any = (x if x is None else spread(x)[..., 0] for x in pulled)
    return Row(spread(q), d_out, neg_max, spread(recip)[..., 0], *terms)


def _row_terms(out, recip, d_out, d_neg_max, d_recip, acc) -> tuple[Any, Any]:
    """`(shift, tie)`, `[heads, q_seq, 1]`.

    With `m` the maximum, `d recip = -recip * sum(p dz) + recip * dm` and
    `d neg_max = -dm`.
    """
    shift = jnp.zeros_like(recip)
    if d_out is not None:
        shift = row_products(out, d_out, acc)
    if d_recip is None and d_neg_max is None:
        return shift, None
    pull = 0 if d_recip is None else d_recip * recip
    return shift + pull, pull - (0 if d_neg_max is None else d_neg_max)


def _zeros(segment: Segment, acc: jnp.dtype, *others: jax.Array) -> Totals:
    """Varying over every mesh axis that an operand varies over."""

    def zeros(x: jax.Array) -> jax.Array:
        return like(jnp.zeros_like(x, acc), x, *others)

    bias = None if segment.bias is None else zeros(segment.bias)
    return Totals(zeros(segment.key), zeros(segment.value), bias)


def _key_gradients(segment: Segment, total: Totals, scale: float, tp_k: bool):
    """Those of keys and values: the padding cut off, zeros where no row can see."""

    def fill(x):
        rest = segment.size - segment.reach
        return jnp.pad(x[:, : segment.reach], [(0, 0), (0, rest), (0, 0)])

    dk = fill(total.key * scale).astype(segment.key.dtype)
    return [dk if tp_k else dk.mT, fill(total.value).astype(segment.value.dtype)]


def _bias_gradient(bias: jax.Array, segments, totals, rows: Rows) -> jax.Array:
    """Over all columns, in the shape and dtype of the bias."""
    parts = []
    for segment, total in zip(segments, totals, strict=True):
        part = lax.collapse(total.bias, 0, 2)
        part = part if bias.shape[1] == 1 else part[:, : rows.seq]
        if bias.shape[2] > 1:
            part = part[..., : segment.reach]
            rest = segment.size - segment.reach
            part = jnp.pad(part, [(0, 0), (0, 0), (0, rest)])
        parts.append(part)
    whole = (
        sum(parts[1:], parts[0]) if bias.shape[2] == 1 else jnp.concatenate(parts, 2)
    )
    return whole.astype(bias.dtype)
