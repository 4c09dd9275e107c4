"""The largest magnitudes of a model's activations, for a scale fixed in advance."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from neuronjax.kernels.activation import activation
from neuronjax.nn.attention import Attention
from neuronjax.nn.mlp import MLP
from neuronjax.nn.parameter import at_dtype
from neuronjax.nn.quantization.replace import replace_layers
from neuronjax.primitives.reduce import rms_norm

Seen = dict[str, jax.Array]


class Largest(nnx.Variable):
    """The largest magnitude seen so far."""


def _see(variable: Largest, x: jax.Array) -> None:
    top = jnp.max(jnp.abs(x.astype(jnp.float32)))
    variable[...] = jnp.maximum(variable[...], top)


def _normed(layer: MLP | Attention, x: jax.Array) -> jax.Array:
    if layer.norm is None:
        return x
    return rms_norm(x, at_dtype(layer.norm, layer.dtype), eps=layer.norm_eps)


class _SeenMLP(nnx.Module):
    """An MLP that notes what enters its projections."""

    def __init__(self, layer: MLP):
        self.layer = layer
        self.gate_up, self.down = (Largest(jnp.zeros(())) for _ in range(2))

    def __call__(self, x, residual=None):
        layer = self.layer
        given = x if layer.dtype is None else x.astype(layer.dtype)
        normed = _normed(layer, given)
        _see(self.gate_up, normed)
        gate, up = (
            jnp.dot(normed, at_dtype(w, layer.dtype).astype(normed.dtype))
            for w in (layer.gate, layer.up)
        )
        _see(self.down, activation(gate, layer.activation) * up)
        return layer(x, residual)


class _SeenAttention(Attention):
    """An attention that notes what enters its projections."""

    def __init__(self, layer: Attention):
        self.layer, self.norm, self.dtype = layer, layer.norm, layer.dtype
        self.num_heads, self.num_kv_heads = layer.num_heads, layer.num_kv_heads
        self.head_dim, self.norm_eps = layer.head_dim, layer.norm_eps
        self.columns, self.rows = (Largest(jnp.zeros(())) for _ in range(2))

    def _project(self, x, gamma, options):
        _see(self.columns, _normed(self.layer, x))
        return self.layer._project(x, gamma, options)

    def _out(self, heads):
        _see(self.rows, heads)
        return self.layer._out(heads)


def calibrate(
    model: nnx.Module,
    inputs: Iterable[Any],
    call: Callable[[nnx.Module, Any], Any],
) -> dict[tuple[Any, ...], Seen]:
    """Runs `call(model, x)` on every input, and says what each layer saw.

    Args:
        model: any NNX module; it is not changed.
        inputs: what to run it on.
        call: how to run it.

    Returns:
        For the path of each layer, the largest magnitude of what enters its
        projections: `gate_up` and `down` of an MLP, `qkv` and `out` of an attention.
    """
    watched = replace_layers(model, _SeenMLP, _SeenAttention)
    run = nnx.jit(lambda model, x: (call(model, x), None)[1])
    for x in inputs:
        run(watched, x)
    found = {}
    for path, layer in nnx.iter_modules(watched):
        if isinstance(layer, _SeenMLP):
            found[path] = dict(gate_up=layer.gate_up[...], down=layer.down[...])
        elif isinstance(layer, _SeenAttention):
            found[path] = dict(qkv=layer.columns[...], out=layer.rows[...])
    return found
