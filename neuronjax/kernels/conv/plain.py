"""Both convolutions straight from their equations, for bisecting a model."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.conv.window import Window, gathered
from neuronjax.kernels.dtypes import accumulator

ACTIVATIONS = {
    "SiLU": jax.nn.silu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "GELU_Tanh_Approx": lambda x: jax.nn.gelu(x, approximate=True),
    "Swish": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def before(x, filters, bias, *, stride, padding, dilation, **settings: Any):
    """What the activation meets, in the accumulator's dtype."""
    acc, window = accumulator(x.dtype), Window(stride, padding, dilation)
    taps = gathered(x.astype(acc), filters.shape[0], window)
    z = jnp.einsum("bckl,kco->bol", taps, filters.astype(acc))
    return z if bias is None else z + bias.astype(acc)[:, None]


def conv1d_plain(x, filters, bias=None, *, name: str, returned=False, **config: Any):
    """What `conv1d_fwd` returns."""
    z = before(x, filters, bias, **config)
    act = config["activation"]
    y = z if act is None else ACTIVATIONS[act](z)
    outs = (y, z) if returned else (y,)
    return tuple(out.astype(x.dtype) for out in outs)


def conv1d_plain_bwd(x, filters, bias, z, d_y, d_z=None, *, name: str, **config: Any):
    """What `conv1d_bwd` returns, by JAX's derivative of both halves."""
    operands = (x, filters) if bias is None else (x, filters, bias)
    sums, pull = jax.vjp(
        lambda *ops: before(*ops, *([None] if bias is None else []), **config),
        *operands,
    )
    d_sums = d_y.astype(sums.dtype)
    if config["activation"] is not None:
        act = ACTIVATIONS[config["activation"]]
        d_sums = jax.vjp(act, z.astype(sums.dtype))[1](d_sums)[0]
    return pull(d_sums if d_z is None else d_sums + d_z.astype(sums.dtype))


def depthwise_plain(x, filters, *, name: str, stride, padding, **hints: Any):
    """What `depthwise_fwd` returns."""
    acc, window = accumulator(x.dtype), Window(stride, padding)
    taps = gathered(x[:, :, 0].astype(acc), filters.shape[-1], window)
    out = jnp.einsum("ncsq,cs->ncq", taps, filters[:, 0, 0].astype(acc))
    return (out.astype(x.dtype)[:, :, None],)


def depthwise_plain_bwd(x, filters, d_out, *, name: str, **config: Any):
    """What `depthwise_bwd` returns, by JAX's derivative."""

    def run(x, filters):
        return depthwise_plain(x, filters, name=name, **config)

    return jax.vjp(run, x, filters)[1]((d_out,))
