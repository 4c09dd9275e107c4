"""A convolution over all channels, and its cotangents, as products of one sample each.

With the windows of a sample as the rows of a matrix:

    sums[b, o, l] = sum over k, c of filters[(k, c), o] * windows[b, (k, c), l]
    d_filters[(k, c), o] = sum over b, l of windows[b, (k, c), l] * d_sums[b, o, l]
    d_windows[b, (k, c), l] = sum over o of filters[(k, c), o] * d_sums[b, o, l]

and each row of `d_windows` is added where its tap had read. In the backward the windows
of one sample exist at a time: two products, which stay in the processor's cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.conv.window import Window
from neuronjax.kernels.shard_common import is_divided, uniform

# XLA's transposed convolutions are faster where a product has fewer columns or rows.
COLUMNS, RESULTS = 64, 256
# Elements of one sample's windows: 64 MB of float32.
WINDOWS = 2**24


def by_products(
    x: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    window: Window,
    *,
    at_once: bool = False,
) -> bool:
    """Whether products are the fast form here: large enough, and on one device.

    The windows of a sample must fit, or `at_once` those of all, in half of that.
    A loop over samples that a mesh divides would bring all of them to every device.
    """
    taps, channels, columns = filters.shape
    sizes = (*x.shape, *filters.shape)
    if not all(isinstance(size, int) for size in sizes) or not x.shape[0]:
        return False
    results = window.results(x.shape[-1], taps)
    large = columns >= COLUMNS and results >= RESULTS
    rows = taps * channels * (2 * x.shape[0] if at_once else 1)
    return large and rows * results <= WINDOWS and not is_divided(x)


def products_fwd(
    x: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    *,
    window: Window,
) -> Float[Array, "batch d_out out"]:
    """The sums of the convolution: one product a sample, stored where it belongs."""
    taps, channels, columns = filters.shape
    weights = filters.reshape(taps * channels, columns).T
    windows = jax.vmap(lambda rows: windows_of(rows, taps, window))(x)
    return jnp.broadcast_to(weights, (x.shape[0], *weights.shape)) @ windows


def products_bwd(
    d_sums: Float[Array, "batch d_out out"],
    x: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    *,
    window: Window,
) -> tuple[Float[Array, "batch d_in length"], Float[Array, "taps d_in d_out"]]:
    """The cotangents of `x` and `filters`."""
    taps, channels, columns = filters.shape
    weights = filters.reshape(taps * channels, columns)

    def one(total: jax.Array, sample: Any) -> tuple[jax.Array, jax.Array]:
        rows, seed = sample
        total = total + windows_of(rows, taps, window) @ seed.T
        return total, added_back(weights @ seed, rows.shape[-1], taps, window)

    first = uniform(jnp.zeros_like(weights), x, d_sums, filters)[0]
    if x.shape[0] == 1:
        d_filters, d_x = one(first, (x[0], d_sums[0]))
        return d_x[None], d_filters.reshape(filters.shape)
    d_filters, d_x = lax.scan(one, first, (x, d_sums))
    return d_x, d_filters.reshape(filters.shape)


def windows_of(
    x: Float[Array, "d_in length"], taps: int, window: Window
) -> Float[Array, "rows out"]:
    """For each tap, and below it each channel, what it reads for every result."""
    padded, results = window.padded(x), window.results(x.shape[-1], taps)
    return jnp.concatenate([window.tap(padded, k, results) for k in range(taps)])


def added_back(
    d_windows: Float[Array, "rows out"], length: int, taps: int, window: Window
) -> Float[Array, "d_in length"]:
    """The transpose of `windows_of`: a row is added to the positions it came from."""
    rows, results = d_windows.shape
    channels, left = rows // taps, window.padding[0]
    reach = (results - 1) * window.stride + 1
    total = None
    for k in range(taps):
        before = k * window.dilation - left
        spread = (before, length - before - reach, window.stride - 1)
        part = lax.slice_in_dim(d_windows, k * channels, (k + 1) * channels)
        part = lax.pad(part, jnp.zeros((), part.dtype), [(0, 0, 0), spread])
        total = part if total is None else total + part
    assert total is not None
    return total
