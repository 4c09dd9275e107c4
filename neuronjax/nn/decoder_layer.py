"""One decoder layer: attention and MLP, each with its norm and residual."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.attention import Attention
from neuronjax.nn.cache import LayerCache
from neuronjax.nn.mlp import MLP


class DecoderLayer(nnx.Module):
    """`h = x + Attention(x)`, then `h + MLP(h)`, the second sum inside the `MLP` macro.

    Args:
        d_model: width of the residual stream.
        d_ff: width of the MLP between its projections.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        norm_eps: added to the mean square in both norms.
        mlp: a layer to use for the MLP, called as `mlp(h, residual=h)`; it has its own
            norm.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the functions refuse.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm_eps: float = 1e-6,
        mlp: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kind: dict[str, Any] = dict(norm_eps=norm_eps, rngs=rngs)
        kind |= dict(dtype=dtype, param_dtype=param_dtype)
        self.attention = Attention(d_model, num_heads, num_kv_heads, head_dim, **kind)
        self.mlp: Any = MLP(d_model, d_ff, **kind) if mlp is None else mlp

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
    ) -> Float[Array, "batch seq d_model"]:
        """The layer over whole sequences."""
        return self._finish(x, self.attention(x, cos, sin))

    def prefill(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """The same, and the keys and values for a cache."""
        out, key, value = self.attention.prefill(x, cos, sin)
        return self._finish(x, out), key, value

    def decode(
        self,
        x: Array,
        cos: Array,
        sin: Array,
        cache: LayerCache,
        lengths: Int[Array, " batch"],
    ) -> tuple[Array, LayerCache]:
        """The layer over new tokens, with a cache of the old ones."""
        out, cache = self.attention.decode(x, cos, sin, cache, lengths)
        return self._finish(x, out), cache

    def _finish(self, x, attended):
        h = x.astype(attended.dtype) + attended
        return self.mlp(h, residual=h)
