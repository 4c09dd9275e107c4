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
    """The largest magnitude seen so far; -1 before anything was seen."""


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
        self.gate_up, self.down = (Largest(-jnp.ones(())) for _ in range(2))

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

    def seen(self) -> Seen:
        return dict(gate_up=self.gate_up[...], down=self.down[...])


class _SeenAttention(Attention):
    """An attention that notes what enters its projections."""

    def __init__(self, layer: Attention):
        self.layer = layer
        self.set_attributes_of(layer)
        self.columns, self.rows = (Largest(-jnp.ones(())) for _ in range(2))

    def _project(self, x, gamma, options):
        _see(self.columns, _normed(self.layer, x))
        return self.layer._project(x, gamma, options)

    def _out(self, heads):
        _see(self.rows, heads)
        return self.layer._out(heads)

    def seen(self) -> Seen:
        return dict(qkv=self.columns[...], out=self.rows[...])


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

    Raises:
        ValueError: a layer never ran, or saw NaN or an infinity.
    """
    layers: dict[tuple[Any, ...], _SeenMLP | _SeenAttention] = {}

    def watch(kind):
        def make(layer, path):
            layers[path] = kind(layer)
            return layers[path]

        return make

    watched = replace_layers(model, watch(_SeenMLP), watch(_SeenAttention))
    run = nnx.jit(lambda model, x: (call(model, x), None)[1])
    for x in inputs:
        run(watched, x)
    return {path: _checked(path, layer.seen()) for path, layer in layers.items()}


def _checked(path: tuple[Any, ...], seen: Seen) -> Seen:
    place = ".".join(map(str, path)) or "model"
    for name, top in seen.items():
        if top == -1:
            raise ValueError(
                f"quantize: calibration must run every layer, got nothing for {place}"
            )
        if not jnp.isfinite(top):
            raise ValueError(
                f"quantize: calibration must be finite everywhere, got {top} before "
                f"the {name} projection of {place}"
            )
    return seen
