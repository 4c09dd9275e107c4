"""A kernel of a user, with its backward, its equation and its example."""

import jax
import jax.numpy as jnp
import numpy as np

import neuronjax

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
GATE = jnp.cos(X) * 3


def gated(x, gate, index=None, *, limit=2.0):
    """`x * silu(gate)`, the gate clipped; `index` is there to be an integer operand."""
    held = jnp.clip(gate, -limit, limit)
    return x * held * jax.nn.sigmoid(held)


def gated_bwd(operands, y, dy, *, limit):
    x, gate, _ = operands
    held = jnp.clip(gate, -limit, limit)
    s = jax.nn.sigmoid(held)
    slope = s + held * s * (1 - s)
    return dy * held * s, dy * x * jnp.where(jnp.abs(gate) <= limit, slope, 0), None


def gated_example(dtype, batch):
    keys = jax.random.split(jax.random.key(0))
    x, gate = (jax.random.normal(key, (batch, 3), dtype) for key in keys)
    return x, gate, jnp.arange(3, dtype=jnp.int32)


def gated_numpy(x, gate, limit):
    held = np.clip(gate, -limit, limit)
    return x * held / (1 + np.exp(-held))


def register(name="GatedUnit", kernel=gated, **options):
    return neuronjax.register_kernel(
        name, kernel, **dict(dict(backward=gated_bwd, example=gated_example), **options)
    )
