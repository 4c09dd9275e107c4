"""Which keys each row sees, and the blocks that a block of rows must visit.

Causality, a window, the bounds of a packed sequence, the used part of a prior and the
place of a shard each leave a row an interval of keys. Keys lie in one or two segments,
the prior and the keys themselves, and are never joined. A block that every row sees
whole needs no mask; one that no row sees costs nothing.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.attention.blocks import cut, grouped, pad_rows, rows_first
from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.loop_bounds import least, most

Carry = TypeVar("Carry")
Size = Any  # an int, or a symbolic size while exporting
Index = jax.Array | int


class Rows(NamedTuple):
    """How the rows of one call are cut: static numbers only."""

    seq: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.seq // self.block)


class Segment(NamedTuple):
    """Keys that lie in one array.

    Attributes:
        key: `[kv_heads, whole blocks, d]`.
        value: `[kv_heads, whole blocks, value_dim]`.
        rows: how the rows are cut.
        block: keys of a block.
        size: keys of the array.
        reach: how many of them any row may see; the rest is dropped.
        first: the column of the first key in the bias, the mask and the dropout.
        low: int32 `[rows]`: the first key that a row sees; None for key 0.
        high: int32 `[rows]`: one past the last; None for all.
        mask: `[1 or kv_heads, 1 or group, 1 or rows, 1 or keys]`, or None.
        bias: the same shapes, or None.
        diagonal: row `i` sees keys up to `i` and blocks are square.
    """

    key: jax.Array
    value: jax.Array
    rows: Rows
    block: int
    size: int
    reach: int
    first: int
    low: jax.Array | None
    high: jax.Array | None
    mask: jax.Array | None
    bias: jax.Array | None
    diagonal: bool

    @property
    def blocks(self) -> int:
        return -(-self.reach // self.block)


def cut_rows(q_seq: int, block: int) -> Rows:
    """Equal blocks of at most `block` rows."""
    return Rows(q_seq, _even(q_seq, block))


def make_segments(
    rows: Rows,
    k: jax.Array,
    v: jax.Array,
    extras: Extras,
    options: Options,
    block: int,
    tp_k: bool,
) -> list[Segment]:
    """The prior's segment, if there is one, and that of the keys."""
    found, prior = [], 0
    if extras.k_prior is not None and extras.v_prior is not None:
        prior = extras.v_prior.shape[1]
        low, high = _prior_interval(rows, extras, options, prior)
        cuts = prior, _even(prior, block)
        arrays = rows_first(extras.k_prior, tp_k), extras.v_prior
        found.append(_segment(rows, *arrays, extras, cuts, 0, low, high))
    k, size = rows_first(k, tp_k), v.shape[1]
    aligned = options.is_causal and extras.offset is None and options.stride == 1
    reach = min(rows.seq, size) if aligned else size
    # Causal blocks are square, or there is one.
    square = options.is_causal and reach > block
    cuts = reach, rows.block if square else _even(reach, block)
    low, high = _interval(rows, extras, options, reach)
    segment = _segment(rows, k, v, extras, cuts, prior, low, high)
    plain = aligned and low is None and extras.bound_max is None
    return [*found, segment._replace(diagonal=plain)]


def _segment(rows, k, v, extras, cuts, first, low, high) -> Segment:
    reach, block = cuts
    key, value = (pad_rows(x[:, :reach], block) for x in (k, v))
    ranges = (k.shape[0], rows, block, first, reach)
    mask, bias = (_spread(x, *ranges) for x in (extras.mask, extras.bias))
    size = v.shape[1]
    return Segment(
        *(key, value, rows, block, size, reach, first, low, high, mask, bias), False
    )


def _row_numbers(rows: Rows) -> jax.Array:
    """Int32; rows of padding repeat the last one, so that they widen no block."""
    numbers = jnp.arange(rows.blocks * rows.block, dtype=jnp.int32)
    return jnp.minimum(numbers, rows.seq - 1)


def _interval(rows: Rows, extras: Extras, options: Options, reach: int):
    """What rows see of the keys: `(low, high)`, None where nothing limits them."""
    numbers = _row_numbers(rows)
    positions = extras.positions(numbers, options)
    low = high = None
    if options.is_causal:
        high = positions + 1
    if options.window:
        low = positions - (options.window - 1)
    if extras.bound_min is not None and extras.bound_max is not None:
        least, most = (x[numbers] for x in (extras.bound_min, extras.bound_max))
        low = least if low is None else jnp.maximum(low, least)
        high = most if high is None else jnp.minimum(high, most)
    return _within(low, reach), _within(high, reach)


def _prior_interval(rows: Rows, extras: Extras, options: Options, size: int):
    """What rows see of the prior: it lies just in front of position 0."""
    used, low = extras.used, None
    assert used is not None
    numbers = _row_numbers(rows)
    if options.window:
        low = extras.positions(numbers, options) - (options.window - 1) + used
    high = jnp.zeros_like(numbers) + used
    return _within(low, size), _within(high, size)


def _within(bound: jax.Array | None, size: int) -> jax.Array | None:
    return None if bound is None else jnp.clip(bound, 0, size)


def _even(seq: int, block: int) -> int:
    """Spreads `seq` over the fewest blocks, each a multiple of 16."""
    even = math.ceil(seq / math.ceil(seq / block))
    return even if seq <= block else min(block, -(-even // 16) * 16)


def _spread(x, num_kv_heads: Size, rows: Rows, block: int, first: int, reach: int):
    """`[1|heads, 1|q_seq, 1|kv]` to `[1|kv_heads, 1|group, 1|rows, 1|keys]`, padded."""
    if x is None:
        return None
    x = x if x.shape[-1] == 1 else x[..., first : first + reach]
    x = x[None] if x.shape[0] == 1 else grouped(x, num_kv_heads)
    x = x if x.shape[-2] == 1 else pad_rows(x, rows.block)
    return x if x.shape[-1] == 1 else pad_rows(x, block, -1)


def block_of(x: jax.Array, segment: Segment, i: Index, j: Index) -> jax.Array:
    """What rows of block `i` and keys of block `j` read of a spread array."""
    x = x if x.shape[-1] == 1 else cut(x, j, segment.block, -1)
    return x if x.shape[-2] == 1 else cut(x, i, segment.rows.block)


def seen_by(segment: Segment, i: Index, j: Index) -> jax.Array:
    """Boolean `[.., .., rows, keys]`: which keys of block `j` block `i` sees."""
    columns = columns_of(segment, j)
    seen = jnp.broadcast_to(
        columns < segment.reach, (segment.rows.block, segment.block)
    )
    if segment.low is not None:
        seen &= columns >= cut(segment.low, i, segment.rows.block, 0)[:, None]
    if segment.high is not None:
        seen &= columns < cut(segment.high, i, segment.rows.block, 0)[:, None]
    seen = seen[None, None]
    if segment.mask is not None:
        seen = seen & block_of(segment.mask, segment, i, j)
    if segment.bias is not None:
        seen = seen & (block_of(segment.bias, segment, i, j) != -jnp.inf)
    return seen


def columns_of(segment: Segment, j: Index) -> jax.Array:
    """The keys of block `j`, int32, counted from the segment's first."""
    start = jnp.asarray(j, jnp.int32) * segment.block
    return start + jnp.arange(segment.block, dtype=jnp.int32)


def visit(
    segment: Segment,
    i: Index,
    fold: Callable[[Index, Carry, jax.Array | None], Carry],
    carry: Carry,
    *,
    static: bool,
) -> Carry:
    """Folds the key blocks that query block `i` sees: `fold(j, carry, seen)`.

    Blocks that every row sees whole get `seen=None`. The loops' lengths are dynamic,
    unless `static` asks for ones that can be transposed.
    """

    def masked(j, carry):
        return fold(j, carry, seen_by(segment, i, j))

    def whole(j, carry):
        return fold(j, carry, None)

    if static:
        return lax.fori_loop(0, segment.blocks, jax.checkpoint(masked), carry)
    start, inner, outer, end = _ranges(segment, i)
    if segment.mask is not None or segment.bias is not None:
        return _loop(start, end, masked, carry)
    carry = _loop(start, inner, masked, carry)
    carry = _loop(inner, outer, whole, carry)
    if segment.diagonal:  # the one block on it: written out, not looped over
        return masked(outer, carry)
    return _loop(outer, end, masked, carry)


def _ranges(segment: Segment, i: Index) -> tuple[Index, Index, Index, Index]:
    """Blocks `[start, end)` are seen; `[inner, outer)` of them by every row, whole."""
    size, last = segment.block, segment.blocks - 1
    start = inner = 0
    outer, end = segment.reach // size, segment.blocks
    if segment.diagonal:
        outer = jnp.minimum(i, last) if last else 0
        return 0, 0, outer, outer + 1
    if segment.high is not None:
        high = cut(segment.high, i, segment.rows.block, 0)
        outer, end = least(high) // size, -(-most(high) // size)
    if segment.low is not None:
        low = cut(segment.low, i, segment.rows.block, 0)
        start, inner = least(low) // size, -(-most(low) // size)
        # Where rows differ so much that no block is whole, all are masked.
        inner = jnp.clip(inner, start, jnp.maximum(start, end))
        outer = jnp.maximum(outer, inner)
    return start, inner, outer, end


def _loop(start: Index, end: Index, body: Callable, carry: Carry) -> Carry:
    if isinstance(start, int) and isinstance(end, int) and end - start < 2:
        return body(start, carry) if end > start else carry
    return lax.fori_loop(start, end, body, carry)
