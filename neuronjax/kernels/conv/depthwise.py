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
# XLA's CPU backend vectorises a sum over the last axis only when it is split in two.
LANES = 32

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
    d_filters = _tap_sums(d_sums, rows, window, taps.shape[-1])
    return d_x.astype(x.dtype)[:, :, None], d_filters.astype(filters.dtype)[
        :, None, None
    ]


def _wide(x: Image, filters: Filters) -> tuple[Rows, Row]:
    """Both without their axes of size 1, in the accumulator's dtype."""
    acc = accumulator(x.dtype)
    return x[:, :, 0].astype(acc), filters[:, 0, 0].astype(acc)


def _is_short(results: int, taps: int) -> bool:
    """Whether a result has fewer positions than the filter, and few enough of them."""
    return results < taps and results <= UNROLLED


def _correlated(x: Rows, taps: Row, window: Window) -> Rows:
    """`out[q] = sum over s of taps[s] * xpad[q*stride + s]`."""
    count, padded = taps.shape[-1], window.padded(x)
    results = window.results(x.shape[-1], count)
    if _is_short(results, count):
        return _listed(
            lambda q: _lane_sum(taps * _part(padded, q * window.stride, count)), results
        )
    read = functools.partial(_read, padded, results, window)
    return _added(lambda s: _part(taps, s, 1) * read(s), count)


def _tap_sums(d_out: Rows, x: Rows, window: Window, count: int) -> Row:
    """`d_taps[s] = sum over n, q of d_out[q] * xpad[q*stride + s]`."""
    padded, results = window.padded(x), d_out.shape[-1]
    if _is_short(results, count):
        return _added(
            lambda q: _part(d_out, q, 1) * _part(padded, q * window.stride, count),
            results,
        ).sum(0)
    read = functools.partial(_read, padded, results, window)
    return _listed(lambda s: _lane_sum(d_out * read(s)).sum(0), count)


def _spread(d_out: Rows, taps: Row, window: Window, width: int) -> Rows:
    """`d_xpad[w] = sum over q*stride + s = w of taps[s] * d_out[q]`; then `d_x`."""
    count, results = taps.shape[-1], d_out.shape[-1]
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


def _read(padded: Rows, results: int, window: Window, tap: Any) -> Rows:
    """What a tap reads for each result."""
    reach = (results - 1) * window.stride + 1
    return lax.slice_in_dim(_part(padded, tap, reach), 0, reach, window.stride, 2)


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


def _listed(term: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """`term(0)` to `term(count - 1)`, along a new last axis."""
    loops = count // CHUNK if count > UNROLLED else 0
    rest = [term(i) for i in range(loops * CHUNK, count)]
    if not loops:
        return jnp.stack(rest, -1)

    def chunk(i: Any) -> jax.Array:
        return jnp.stack([term(i * CHUNK + j) for j in range(CHUNK)], -1)

    chunks = lax.map(chunk, jnp.arange(loops, dtype=jnp.int32))
    first = jnp.moveaxis(chunks, 0, -2)
    first = first.reshape(*first.shape[:-2], loops * CHUNK)
    return jnp.concatenate([first, jnp.stack(rest, -1)], -1) if rest else first


def _sum(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _lane_sum(x: Rows) -> Float[Array, "batch channels"]:
    """The sum over the last axis."""
    turns = x.shape[-1] // LANES
    whole = turns * LANES
    rest = x[..., whole:].sum(-1)
    if not turns:
        return rest
    lanes = x[..., :whole].reshape(*x.shape[:-1], turns, LANES)
    return lanes.sum(-2).sum(-1) + rest
