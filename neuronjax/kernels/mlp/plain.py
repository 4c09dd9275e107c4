"""The feed-forward block straight from its equations, for bisecting a model."""

import jax
import jax.numpy as jnp

from neuronjax.kernels.feature import wide
from neuronjax.kernels.mlp.dense import Operands, Options
from neuronjax.kernels.dtypes import accumulator

ACTIVATIONS = {
    "SiLU": jax.nn.silu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "GELU_Tanh_Approx": lambda x: jax.nn.gelu(x, approximate=True),
    "Swish": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def _normalised(x: jax.Array, ops: Operands, opts: Options) -> jax.Array:
    if opts.norm == "none":
        return x
    if opts.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + opts.eps)
    if ops.gamma is not None and opts.norm != "rms_skip_gamma":
        y = y * ops.gamma.astype(y.dtype).reshape(-1)
    if ops.beta is not None and opts.norm == "layer":
        y = y + ops.beta.astype(y.dtype).reshape(-1)
    return y


def _linear(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    acc = accumulator(x.dtype, w.dtype)
    dtype = x.dtype if x.dtype == w.dtype else acc
    y = jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=acc)
    return y if bias is None else y + bias.astype(acc).reshape(-1)


def mlp_plain(*operands, name: str, **config) -> tuple[jax.Array, ...]:
    """What `mlp_fwd` returns, in plain `jax.numpy`."""
    ops, opts = Operands(*operands), Options(**config)
    dtype, x0 = ops.hidden.dtype, wide(ops.hidden)
    if opts.fused_add == "prologue":
        x0 = x0 + ops.addend.astype(x0.dtype)
    x = _normalised(x0, ops, opts).astype(dtype)
    up = _linear(x, ops.up_w, ops.up_b)
    stored, act = (up,), ACTIVATIONS[opts.activation]
    clipped = jnp.clip(up, *opts.up_limits)
    if opts.skip_gate:
        middle = act(clipped)
    else:
        gate = _linear(x, ops.gate_w, ops.gate_b)
        stored = gate, up
        middle = act(jnp.clip(gate, *opts.gate_limits)) * clipped
    out = _linear(middle.astype(dtype), ops.down_w, ops.down_b)
    if opts.fused_add == "epilogue":
        out = out + ops.residual.astype(out.dtype)
    out_dtype = opts.out_dtype or dtype
    added = (x0.astype(out_dtype),) if opts.store_fused_add else ()
    return out.astype(out_dtype), *added, *(z.astype(dtype) for z in stored)


def _untile(data: jax.Array | None, axis: int) -> jax.Array | None:
    """A tile `[partition, chunk, *rest]` with its features put back at `axis`."""
    if data is None:
        return None
    whole = data.reshape(data.shape[0] * data.shape[1], *data.shape[2:])
    return jnp.moveaxis(whole, 0, axis)


def _tile(x: jax.Array, width: tuple[int, ...]) -> jax.Array:
    x = jnp.moveaxis(x, -1, 0)
    return x.reshape(*width, *x.shape[1:])


def mlp_tiled_plain(*operands, name: str, **config) -> tuple[jax.Array, ...]:
    """What `mlp_tiled_fwd` returns: untiled, computed, tiled again."""
    ops = Operands(*operands)
    weights = ("gate_w", "up_w", "down_w")
    whole = [
        _untile(data, 0 if key in weights else -1)
        for key, data in zip(ops._fields, ops, strict=True)
    ]
    opts = Options(**config)
    outs = mlp_plain(*whole, name=name, **config)
    stored_at = 2 if opts.store_fused_add else 1
    model, middle = ops.hidden.shape[:2], ops.down_w.shape[:2]
    return tuple(
        _tile(out, model if i < stored_at else middle) for i, out in enumerate(outs)
    )
