"""The feed-forward block straight from its equations, for bisecting a model.

It is cut where the macro stores: `before` gives the pre-activations, `after` the
rest. The plain backward is JAX's own derivative of each half, joined by what is stored.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.feature import wide
from neuronjax.kernels.mlp.operands import Operands, Options, live_operands, parts
from neuronjax.kernels.shard_common import contract

ACTIVATIONS = {
    "SiLU": jax.nn.silu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "GELU_Tanh_Approx": lambda x: jax.nn.gelu(x, approximate=True),
    "Swish": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def normalised(x: jax.Array, ops: Operands, opts: Options) -> jax.Array:
    """The norm of `x`, in its own dtype."""
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


def clipped(x: jax.Array, opts: Options) -> jax.Array:
    """What weights meet in a decode that clips it."""
    bound = opts.activation_clipping_bound
    return jnp.clip(x, -bound, bound) if bound > 0 else x


def _linear(x: jax.Array, w: jax.Array, bias: jax.Array | None, like=None) -> jax.Array:
    dtype = promoted(x.dtype, w.dtype)
    x, w, acc = x.astype(dtype), w.astype(dtype), accumulator(dtype)
    if like is None:
        y = jnp.matmul(x, w, preferred_element_type=acc)
    else:
        rows = "abcdef"[: x.ndim - 1]
        y = contract(f"{rows}x,xy->{rows}y", x, w, like=like)
    return y if bias is None else y + bias.astype(acc).reshape(-1)


def before(ops: Operands, opts: Options) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The sum in front of the norm, and the pre-activations, all in the accumulator."""
    x0 = wide(ops.hidden)
    if opts.fused_add == "prologue":
        x0 = x0 + ops.addend.astype(x0.dtype)
    x = clipped(normalised(x0, ops, opts), opts).astype(ops.hidden.dtype)
    up = _linear(x, ops.up_w, ops.up_b)
    if opts.skip_gate:
        return x0, (up,)
    return x0, (_linear(x, ops.gate_w, ops.gate_b), up)


def after(
    stored: tuple, ops: Operands, opts: Options, requantize: Callable | None = None
) -> jax.Array:
    """The result from the pre-activations, not yet rounded.

    `requantize` is what becomes of the gated values; without it they are rounded to the
    dtype of `hidden`.
    """
    *gate, up = stored
    act, middle = ACTIVATIONS[opts.activation], jnp.clip(up, *opts.up_limits)
    if gate:
        middle = act(jnp.clip(gate[0], *opts.gate_limits)) * middle
    else:
        middle = act(middle)
    middle = requantize(middle) if requantize else middle.astype(ops.hidden.dtype)
    out = _linear(middle, ops.down_w, ops.down_b, like=ops.hidden)
    if opts.fused_add == "epilogue":
        out = out + ops.residual.astype(out.dtype)
    return out


def mlp_plain(*operands, name: str, **config) -> tuple[jax.Array, ...]:
    """What the forward leaves return, in plain `jax.numpy`."""
    ops, opts = Operands(*operands), Options.of(config)
    if opts.is_tiled:
        outs = mlp_plain(*untiled(ops), name=name, **dict(config, is_tiled=False))
        return tuple(retiled_outs(outs, ops, opts))
    dtype = ops.hidden.dtype
    out_dtype = opts.out_dtype or dtype
    x0, stored = before(ops, opts)
    out = after(stored, ops, opts).astype(out_dtype)
    added = (x0.astype(out_dtype),) if opts.store_fused_add else ()
    return out, *added, *(z.astype(dtype) for z in stored)


def mlp_plain_bwd(*operands, name: str, **config) -> tuple[jax.Array, ...]:
    """What the backward leaves return, by JAX's derivative of each half."""
    (ops, outs, cotangents), opts = parts(operands), Options.of(config)
    if opts.is_tiled:
        whole = [x if x is None else untile(x, -1) for x in (*outs, *cotangents)]
        config = dict(config, is_tiled=False)
        grads = mlp_plain_bwd(*untiled(ops), *whole, name=name, **config)
        return tuple(retiled_grads(grads, ops))
    grads = grads_of(ops, outs, cotangents, opts)
    return tuple(grads[key] for key in live_operands(ops))


def grads_of(
    ops: Operands,
    outs: tuple,
    cotangents: tuple,
    opts: Options,
    requantize: Callable | None = None,
) -> dict[str, Any]:
    """The cotangent of each operand, by JAX's derivative of each half."""
    stored_at = 2 if opts.store_fused_add else 1
    stored = tuple(wide(z) for z in outs[stored_at:])
    (x0, gates), pull_before = jax.vjp(lambda o: before(o, opts), ops)
    out, pull_after = jax.vjp(lambda s, o: after(s, o, opts, requantize), stored, ops)
    seeds = [None if c is None else c.astype(out.dtype) for c in cotangents]
    dout = jnp.zeros_like(out) if seeds[0] is None else seeds[0]
    d_stored, grads_after = pull_after(dout)
    d_stored = tuple(
        dz if seed is None else dz + seed
        for dz, seed in zip(d_stored, seeds[stored_at:], strict=True)
    )
    stores = opts.store_fused_add and seeds[1] is not None
    d_added = seeds[1] if stores else jnp.zeros_like(x0)
    (grads_before,) = pull_before((d_added, d_stored))
    pairs = zip(grads_before, grads_after, strict=True)
    sums = [None if a is None else a + b for a, b in pairs]
    return dict(zip(ops._fields, sums, strict=True))


def _is_weight(operand: str) -> bool:
    return operand in ("gate_w", "up_w", "down_w")


def untile(data: jax.Array, axis: int) -> jax.Array:
    """A tile `[partition, chunk, *rest]` with its features put back at `axis`."""
    whole = data.reshape(data.shape[0] * data.shape[1], *data.shape[2:])
    return jnp.moveaxis(whole, 0, axis)


def _tile(x: jax.Array, width: tuple[int, ...], axis: int) -> jax.Array:
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(*width, *x.shape[1:])


def untiled(ops: Operands) -> Operands:
    whole = {
        operand: untile(x, 0 if _is_weight(operand) else -1)
        for operand, x in ops._asdict().items()
        if x is not None
    }
    return ops._replace(**whole)


def retiled_outs(outs: tuple, ops: Operands, opts: Options):
    stored_at = 2 if opts.store_fused_add else 1
    for i, out in enumerate(outs):
        like = ops.hidden if i < stored_at else ops.down_w
        yield _tile(out, like.shape[:2], -1)


def retiled_grads(grads: tuple, ops: Operands):
    for grad, operand in zip(grads, live_operands(ops), strict=True):
        width = getattr(ops, operand).shape[:2]
        yield _tile(grad, width, 0 if _is_weight(operand) else -1)
