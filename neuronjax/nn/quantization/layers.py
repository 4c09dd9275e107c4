"""The twins of `nn.MLP` and `nn.Attention` on quantized weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.attention import Attention
from neuronjax.nn.mlp import MLP
from neuronjax.nn.parameter import at_dtype
from neuronjax.nn.quantization.codes import Codes, codes, read
from neuronjax.nn.quantization.scheme import Scheme, Stored


def _codes(stored: Mapping[str, Stored]) -> nnx.Dict:
    def variable(item: Stored) -> Codes:
        # Stacked layers have a leading axis that nothing splits.
        lead = (None,) * (item.value.ndim - len(item.names))
        return codes(item.value, (*lead, *item.names), stacked=bool(lead))

    return nnx.Dict({name: variable(item) for name, item in stored.items()})


def _values(held: nnx.Dict) -> dict[str, jax.Array]:
    return {name: read(code) for name, code in held.items()}


class QuantizedMLP(nnx.Module):
    """`nn.MLP` whose three weights are quantized.

    Its weights and scales are `Codes`, which `nnx.grad` and optimizers leave alone: the
    norm's gain is the only parameter. Gradients pass straight through rounding.

    Args:
        layer: the layer whose weights are taken.
        scheme: how they are stored.
        seen: the largest magnitudes of the activations, for a calibrated scheme.
    """

    def __init__(
        self, layer: MLP, scheme: Scheme, seen: Mapping[str, Any] | None = None
    ):
        weights = [jnp.asarray(w[...]) for w in (layer.gate, layer.up, layer.down)]
        self.codes = _codes(scheme.encode_mlp(*weights, seen))
        self.norm, self.scheme = layer.norm, scheme
        self.activation, self.norm_eps = layer.activation, layer.norm_eps
        # What the weights were in: their codes no longer say.
        self.dtype = layer.dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """Returns `MLP(x)`, plus `residual` where given."""
        x = x if self.dtype is None else x.astype(self.dtype)
        gamma = None if self.norm is None else at_dtype(self.norm, self.dtype)[None]
        stored = _values(self.codes)
        out = self.scheme.mlp(x, gamma, stored, self.activation, self.norm_eps)
        return out if residual is None else out + residual.astype(out.dtype)


class QuantizedAttention(Attention):
    """`nn.Attention` whose two projections are quantized.

    Args:
        layer: the layer whose weights are taken.
        scheme: how they are stored.
        seen: the largest magnitudes of the activations, for a calibrated scheme.
    """

    def __init__(
        self, layer: Attention, scheme: Scheme, seen: Mapping[str, Any] | None = None
    ):
        heads = layer.num_heads, layer.num_kv_heads
        weights = [jnp.asarray(w[...]) for w in (layer.qkv, layer.out)]
        self.codes = _codes(scheme.encode_attention(*weights, heads, seen))
        self.scheme = scheme
        self.set_attributes_of(layer)

    def _project(self, x: jax.Array, gamma: jax.Array | None, options: dict[str, Any]):
        return self.scheme.qkv(x, gamma, _values(self.codes), options)

    def _out(self, heads: jax.Array) -> jax.Array:
        return self.scheme.out(heads, _values(self.codes))
