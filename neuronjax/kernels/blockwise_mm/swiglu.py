"""The gated values of a block and their derivative, from what a forward stored.

    middle = act(gate) * up

`gate` and `up` come after the clamp, whose derivative is zero where a value equals its
limit: the limit as the stored dtype has it, or a rounded value would pass below it.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.kernels.activation import activation, activation_grad
from neuronjax.kernels.blockwise_mm.operands import Limits, Options

GateUp = Float[Array, "slots 2 d_ff"]
Gated = Float[Array, "slots d_ff"]


def clamped(gate_up: GateUp, opts: Options) -> GateUp:
    """Gate and up, each within its limits."""
    if opts.gate_limits == opts.up_limits == (None, None):
        return gate_up
    gate = _clamp(gate_up[:, 0], opts.gate_limits)
    return jnp.stack([gate, _clamp(gate_up[:, 1], opts.up_limits)], 1)


def _clamp(x: jax.Array, limits: Limits) -> jax.Array:
    lower, upper = limits
    x = x if upper is None else lax.min(x, jnp.asarray(upper, x.dtype))
    return x if lower is None else lax.max(x, jnp.asarray(lower, x.dtype))


def gated(gate_up: GateUp, opts: Options) -> Gated:
    """The gated values."""
    return activation(gate_up[:, 0], opts.activation) * gate_up[:, 1]


def gated_bwd(d_middle: Gated, gate_up: GateUp, opts: Options) -> GateUp:
    """The cotangent of gate and up after their clamp."""
    wide = gate_up.astype(d_middle.dtype)
    opened, slope = activation_grad(wide[:, 0], opts.activation)
    return jnp.stack([d_middle * wide[:, 1] * slope, d_middle * opened], 1)


def clamped_bwd(dz: GateUp, gate_up: GateUp, opts: Options) -> GateUp:
    """The cotangent of gate and up before their clamp.

    `gate_up` comes in the dtype in which it was stored.
    """
    if opts.gate_limits == opts.up_limits == (None, None):
        return dz
    d_gate = _inside(dz[:, 0], gate_up[:, 0], opts.gate_limits)
    return jnp.stack([d_gate, _inside(dz[:, 1], gate_up[:, 1], opts.up_limits)], 1)


def _inside(dx: jax.Array, x: jax.Array, limits: Limits) -> jax.Array:
    lower, upper = (None if z is None else as_stored(z, x.dtype) for z in limits)
    dx = dx if upper is None else jnp.where(x < upper, dx, 0)
    return dx if lower is None else jnp.where(x > lower, dx, 0)


def as_stored(limit: float, dtype: jnp.dtype) -> jax.Array:
    """A limit in the stored dtype; one beyond it is never reached."""
    if abs(limit) > float(jnp.finfo(dtype).max):
        limit = math.copysign(math.inf, limit)
    return jnp.asarray(limit, dtype)


def saturated(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` in the dtype in which it is stored, which may have no room for it.

    An infinity would make the derivative of the activation NaN.
    """
    if jnp.finfo(dtype).maxexp < jnp.finfo(x.dtype).maxexp:
        top = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
        x = jnp.where(jnp.isfinite(x), lax.clamp(-top, x, top), x)
    return x.astype(dtype)
