"""The convolutions' equations in float64 NumPy, one product at a time."""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


# Each activation; the derivative is taken of it by the tests.
ACTIVATIONS = {
    None: lambda x: x,
    "SiLU": lambda x: x * _sigmoid(x),
    "GELU": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "GELU_Tanh_Approx": lambda x: (
        0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "Swish": lambda x: x * _sigmoid(1.702 * x),
}


def length(size, taps, stride, padding, dilation=1):
    """`L_out = (L + left + right - dilation * (K - 1) - 1) // stride + 1`."""
    return (size + sum(padding) - dilation * (taps - 1) - 1) // stride + 1


def padded(x, padding):
    """Zeros before and behind the last axis."""
    around = [np.zeros((*x.shape[:-1], size)) for size in padding]
    return np.concatenate([around[0], np.asarray(x, np.float64), around[1]], -1)


def conv1d(x, filters, bias=None, stride=1, padding=(0, 0), dilation=1, act=None):
    """`y[b,o,l] = act(bias[o] + sum filters[k,c,o] xpad[b, c, l*stride + k*dil])`."""
    taps, channels, columns = filters.shape
    xpad, w = padded(x, padding), np.asarray(filters, np.float64)
    count = length(x.shape[-1], taps, stride, padding, dilation)
    out = np.zeros((x.shape[0], columns, count))
    for result, tap, channel in np.ndindex(count, taps, channels):
        read = xpad[:, channel, result * stride + tap * dilation]
        out[:, :, result] += read[:, None] * w[tap, channel]
    if bias is not None:
        out += np.asarray(bias, np.float64)[:, None]
    return ACTIVATIONS[act](out)


def conv1d_grads(d_sums, x, filters, stride=1, padding=(0, 0), dilation=1):
    """The cotangents of `x`, `filters` and `bias`, from that of the sums."""
    taps, channels, _ = filters.shape
    xpad, w = padded(x, padding), np.asarray(filters, np.float64)
    d_xpad, d_w = np.zeros_like(xpad), np.zeros_like(w)
    for result, tap, channel in np.ndindex(d_sums.shape[-1], taps, channels):
        at, seed = result * stride + tap * dilation, d_sums[:, :, result]
        d_xpad[:, channel, at] += seed @ w[tap, channel]
        d_w[tap, channel] += xpad[:, channel, at] @ seed
    left = padding[0]
    return d_xpad[..., left : left + x.shape[-1]], d_w, d_sums.sum((0, 2))


def depthwise(x, filters, stride=1, padding=(0, 0)):
    """`out[n, c, 0, q] = sum over s of filters[c, s] xpad[n, c, q*stride + s]`."""
    xpad, w = padded(x, padding)[:, :, 0], np.asarray(filters, np.float64)[:, 0, 0]
    count = length(x.shape[-1], w.shape[1], stride, padding)
    out = np.zeros((*xpad.shape[:2], count))
    for result, tap in np.ndindex(count, w.shape[1]):
        out[:, :, result] += xpad[:, :, result * stride + tap] * w[:, tap]
    return out[:, :, None]


def depthwise_grads(d_out, x, filters, stride=1, padding=(0, 0)):
    """The cotangents of `x` and `filters`."""
    xpad, w = padded(x, padding)[:, :, 0], np.asarray(filters, np.float64)[:, 0, 0]
    d_xpad, d_w = np.zeros_like(xpad), np.zeros_like(w)
    for result, tap in np.ndindex(d_out.shape[-1], w.shape[1]):
        at, seed = result * stride + tap, d_out[:, :, 0, result]
        d_xpad[:, :, at] += seed * w[:, tap]
        d_w[:, tap] += (seed * xpad[:, :, at]).sum(0)
    left = padding[0]
    d_x = d_xpad[..., left : left + x.shape[-1]]
    return d_x[:, :, None], d_w[:, None, None]
