"""A convolution over all channels, with bias and activation, and its derivative.

    z[b, o, l] = bias[o] + sum over k, c of
                 filters[k, c, o] * xpad[b, c, l*stride + k*dilation]
    y = act(z)

It is a cross-correlation: no tap is flipped. Sums, bias and activation are float32, or
float64; `y` is rounded once.

The form "fast" is XLA's convolution with channels last. Where it is large it is one
product a sample, whose results need no transpose: 17 ms on two cores for 4 x 64 to 256
channels, 4096 positions, 5 taps (16 to 20 channels last), of which the arithmetic takes
14; backward two products a sample (32 ms against 53 of XLA's transposed convolutions).
"stacked" runs the matmuls of the K-replication plan, and so does "fast" where an
explicit mesh divides the output channels: a convolution has no type for that. All add
the same products.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.activation import activation as activated
from neuronjax.kernels.activation import activation_grad
from neuronjax.kernels.conv.products import by_products, products_bwd, products_fwd
from neuronjax.kernels.conv.stacked import stacked_bwd, stacked_fwd
from neuronjax.kernels.conv.window import Window
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import shards

Input = Float[Array, "batch d_in length"]
Filters = Float[Array, "taps d_in d_out"]
Bias = Float[Array, " d_out"]
Output = Float[Array, "batch d_out out"]


def conv1d_fwd(
    x: Input,
    filters: Filters,
    bias: Bias | None = None,
    *,
    name: str,
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    activation: str | None,
    form: str,
    cores: int,
    returned: bool = False,
    **hints: Any,
) -> tuple[Output, ...]:
    """Returns `(y,)`, with `returned` `(y, z)`, all in the dtype of `x`."""
    acc, window = accumulator(x.dtype), Window(stride, padding, dilation)
    wide = x.astype(acc), filters.astype(acc)
    z = _sums(*wide, window, form, cores)
    z = z if bias is None else z + bias.astype(acc)[:, None]
    y = z if activation is None else activated(z, activation)
    outs = (y, z) if returned else (y,)
    return tuple(out.astype(x.dtype) for out in outs)


def conv1d_bwd(
    x: Input,
    filters: Filters,
    bias: Bias | None,
    z: Output | None,
    d_y: Output,
    d_z: Output | None = None,
    *,
    name: str,
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    activation: str | None,
    form: str,
    cores: int,
    **settings: Any,
) -> tuple[Array, ...]:
    """Returns `(d_x, d_filters)` and, with a bias, `d_bias`.

    `z` is what the activation met, and `d_z` a cotangent of its own, if it has one.
    """
    acc, window = accumulator(x.dtype), Window(stride, padding, dilation)
    d_sums = d_y.astype(acc)
    if activation is not None:
        d_sums = d_sums * activation_grad(z.astype(acc), activation)[1]
    if d_z is not None:
        d_sums = d_sums + d_z.astype(acc)
    wide = x.astype(acc), filters.astype(acc)
    d_x, d_filters = _pulled(d_sums, *wide, window, form, cores)
    grads = (d_x.astype(x.dtype), d_filters.astype(filters.dtype))
    if bias is None:
        return grads
    return (*grads, d_sums.sum((0, 2)).astype(bias.dtype))


def _sums(x, filters, window: Window, form: str, cores: int):
    if form == "stacked" or shards(filters, 2) > 1:
        return stacked_fwd(x, filters, window=window, cores=cores)
    if by_products(x, filters, window, at_once=True):
        return products_fwd(x, filters, window=window)
    return _channels_last(x, filters, window)


def _pulled(d_sums, x, filters, window: Window, form: str, cores: int):
    """The cotangents of `x` and `filters`, given that of the sums."""
    if form == "stacked" or shards(filters, 2) > 1:
        return stacked_bwd(d_sums, x, filters, window=window, cores=cores)
    if by_products(x, filters, window):
        return products_bwd(d_sums, x, filters, window=window)
    # The sums themselves are dead code; their transposes are two convolutions.
    _, pull = jax.vjp(lambda x, w: _channels_last(x, w, window), x, filters)
    return pull(d_sums)


def _channels_last(x: Input, filters: Filters, window: Window) -> Output:
    """XLA's convolution; its operands come wide, so that it can be transposed."""
    out = lax.conv_general_dilated(
        x.swapaxes(1, 2),
        filters,
        (window.stride,),
        [window.padding],
        rhs_dilation=(window.dilation,),
        dimension_numbers=("NHC", "HIO", "NHC"),
    )
    return out.swapaxes(1, 2)
