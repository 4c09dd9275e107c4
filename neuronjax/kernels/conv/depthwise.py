"""A convolution of each channel with its own filter, and its derivative.

    out[n, c, 0, q] = sum over s of filters[c, 0, 0, s] * xpad[n, c, q*stride + s]

Nothing is summed over channels, so there is no product of matrices in it: shifted
copies are scaled and added, tap by tap. A filter that is longer than the result, which
has few positions, is scaled and summed position by position instead. Sums are float32,
or float64, and rounded once.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.conv.window import Window
from neuronjax.kernels.dtypes import accumulator

# Terms that are written out; more of them are added in a loop, CHUNK at each turn.
UNROLLED, CHUNK = 32, 16
# XLA's CPU backend does not vectorise a sum over the last axis. A loop that adds blocks
# of this many positions does: 8 ms against 32 for the 4 taps of 1024 channels, 4096
# positions. Splitting the axis by a reshape does not: XLA joins it again.
LANES = 128

Image = Float[Array, "batch channels 1 width"]
Filters = Float[Array, "channels 1 1 taps"]
Output = Float[Array, "batch channels 1 out"]
Rows = Float[Array, "batch channels _"]
Row = Float[Array, "channels _"]


def depthwise_fwd(
    x: Image,
    filters: Filters,
    *,
    name: str,
    stride: int,
    padding: tuple[int, int],
    **hints: Any,
) -> tuple[Output]:
    """Returns `(out,)` in the dtype of `x`."""
    rows, taps = _wide(x, filters)
    out = _correlated(rows, taps, Window(stride, padding))
    return (out.astype(x.dtype)[:, :, None],)


def depthwise_bwd(
    x: Image,
    filters: Filters,
    d_out: Output,
    *,
    name: str,
    stride: int,
    padding: tuple[int, int],
    **settings: Any,
) -> tuple[Image, Filters]:
    """Returns `(d_x, d_filters)`; what no window reads has a zero."""
    rows, taps = _wide(x, filters)
    window, d_sums = Window(stride, padding), d_out[:, :, 0].astype(rows.dtype)
    d_x = _spread(d_sums, taps, window, rows.shape[-1])
    d_taps = _tap_sums(d_sums, rows, window, taps.shape[-1])
    d_filters = d_taps.astype(filters.dtype)[:, None, None]
    return d_x.astype(x.dtype)[:, :, None], d_filters


def _wide(x: Image, filters: Filters) -> tuple[Rows, Row]:
    """Both without their axes of size 1, in the accumulator's dtype."""
    acc = accumulator(x.dtype)
    return x[:, :, 0].astype(acc), filters[:, 0, 0].astype(acc)


def _is_short(results: int, taps: int) -> bool:
    """Whether a result has fewer positions than the filter, and few enough of them."""
    return results < taps and results <= UNROLLED


def _correlated(x: Rows, taps: Row, window: Window) -> Rows:
    """`out[q] = sum over s of taps[s] * xpad[q*stride + s]`."""
    count, results = taps.shape[-1], window.results(x.shape[-1], taps.shape[-1])
    if window.stride == 1 and count <= UNROLLED:
        return _shifted_sum(x, taps, window.padding[0], results)
    padded = window.padded(x)
    if _is_short(results, count):

        def read(q, at, size):
            return _part(padded, q * window.stride + at, size)

        return _sums(taps, read, results)
    return _added(
        lambda s: _part(taps, s, 1) * _read(padded, s, results, window), count
    )


def _tap_sums(d_out: Rows, x: Rows, window: Window, count: int) -> Row:
    """`d_taps[s] = sum over n, q of d_out[q] * xpad[q*stride + s]`."""
    padded, results = window.padded(x), d_out.shape[-1]
    if _is_short(results, count):
        return _added(
            lambda q: _part(d_out, q, 1) * _part(padded, q * window.stride, count),
            results,
        ).sum(0)

    def read(s, at, size):
        return _read(padded, s + at * window.stride, size, window)

    return _sums(d_out, read, count).sum(0)


def _spread(d_out: Rows, taps: Row, window: Window, width: int) -> Rows:
    """`d_xpad[w] = sum over q*stride + s = w of taps[s] * d_out[q]`; then `d_x`."""
    count, results = taps.shape[-1], d_out.shape[-1]
    if window.stride == 1 and count <= UNROLLED:
        before = count - 1 - window.padding[0]
        return _shifted_sum(d_out, taps[:, ::-1], before, width)
    length = width + sum(window.padding)
    if _is_short(results, count):

        def placed(q):
            behind = length - q * window.stride - count
            zeros = [(0, 0, 0), (0, 0, 0), (q * window.stride, behind, 0)]
            return lax.pad(taps * _part(d_out, q, 1), jnp.zeros((), taps.dtype), zeros)

        d_padded = _added(placed, results)
    else:
        # Zeros between the positions for the stride, and as far around as taps reach.
        reach = (results - 1) * window.stride + 1
        zeros = (count - 1, length - reach, window.stride - 1)
        around = [(0, 0, 0), (0, 0, 0), zeros]
        spaced = lax.pad(d_out, jnp.zeros((), d_out.dtype), around)
        d_padded = _added(
            lambda s: _part(taps, s, 1) * _part(spaced, count - 1 - s, length), count
        )
    return _part(d_padded, window.padding[0], width)


def _shifted_sum(x: Rows, taps: Row, before: int, results: int) -> Rows:
    """`out[q] = sum over s of taps[s] * x[q + s - before]`, zeros around `x`.

    XLA reads each shifted copy in place. It would store `x` with the zeros around it,
    which all taps read: a copy that takes as long as all the arithmetic.
    """
    zero = jnp.zeros((), x.dtype)

    def term(s: int) -> jax.Array:
        first = before - s
        around = [(0, 0, 0), (0, 0, 0), (first, results - x.shape[-1] - first, 0)]
        return _part(taps, s, 1) * lax.pad(x, zero, around)

    return _sum([term(s) for s in range(taps.shape[-1])])


def _read(padded: Rows, first: Any, results: int, window: Window) -> Rows:
    """What a tap reads for that many results, from position `first` on."""
    reach = (results - 1) * window.stride + 1
    return lax.slice_in_dim(_part(padded, first, reach), 0, reach, window.stride, 2)


def _part(x: jax.Array, first: Any, size: int) -> jax.Array:
    """`size` entries of the last axis."""
    if isinstance(first, int):
        return lax.slice_in_dim(x, first, first + size, axis=x.ndim - 1)
    return lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1)


def _added(term: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """The sum of `term(0)` to `term(count - 1)`."""
    loops = count // CHUNK if count > UNROLLED else 0

    def chunk(i: Any) -> jax.Array:
        return _sum([term(i * CHUNK + j) for j in range(CHUNK)])

    rest = [term(i) for i in range(loops * CHUNK, count)]
    if not loops:
        return _sum(rest)
    total = lax.fori_loop(1, loops, lambda i, total: total + chunk(i), chunk(0))
    return _sum([total, *rest])


def _sums(
    left: jax.Array, right: Callable[[Any, Any, int], jax.Array], count: int
) -> jax.Array:
    """`sum over p of left[p] * right(i)[p]` for `i < count`, along a new last axis.

    `right(i, first, size)` gives the entries `first` to `first + size` of `right(i)`.
    """
    length = left.shape[-1]

    def some(first: Any, size: int) -> jax.Array:
        def block(at: Any, width: int) -> list[jax.Array]:
            part = _part(left, at, width)
            return [part * right(first + i, at, width) for i in range(size)]

        return jnp.stack(_block_sums(block, length), -1)

    loops = count // CHUNK if count > UNROLLED else 0
    starts = range(loops * CHUNK, count, CHUNK)
    parts = [some(first, min(CHUNK, count - first)) for first in starts]
    if loops:
        turns = jnp.arange(loops, dtype=jnp.int32)
        chunks = jnp.moveaxis(lax.map(lambda i: some(i * CHUNK, CHUNK), turns), 0, -2)
        parts = [chunks.reshape(*chunks.shape[:-2], loops * CHUNK), *parts]
    return jnp.concatenate(parts, -1)


def _block_sums(
    block: Callable[[Any, int], list[jax.Array]], length: int
) -> list[jax.Array]:
    """The sums over the last axis of arrays that come in blocks of its positions."""
    loops = length // LANES
    if not loops:
        return [x.sum(-1) for x in block(0, length)]

    def add(i: Any, totals: list[jax.Array]) -> list[jax.Array]:
        return list(map(operator.add, totals, block(i * LANES, LANES)))

    totals = [x.sum(-1) for x in lax.fori_loop(1, loops, add, block(0, LANES))]
    if length == loops * LANES:
        return totals
    rest = [x.sum(-1) for x in block(loops * LANES, length - loops * LANES)]
    return list(map(operator.add, totals, rest))


def _sum(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)
