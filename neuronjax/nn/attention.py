"""Causal self-attention with grouped key/value heads as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from neuronjax.nn.cache import LayerCache
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.primitives.attention.decode import attention_tkg_fwd_kernel
from neuronjax.primitives.attention.prefill import attention_cte
from neuronjax.primitives.output_projection import output_projection_cte
from neuronjax.primitives.qkv import qkv


class Attention(nnx.Module):
    """RMSNorm and QKV with rotary embedding, causal attention, output projection.

    The twin of `neuronjax.qkv`, `attention_cte` (or `AttentionTkgFwd` with a cache) and
    `output_projection_cte`, in that order.

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` is a multiple of it.
        head_dim: width of a head.
        norm: fuse an RMSNorm in front.
        norm_eps: added to the mean square.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    The columns of `qkv` (all query heads, then key heads, then value heads) carry the
    partition names `(None, "tensor")`, the rows of `out` `("tensor", None)`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm: bool = True,
        norm_eps: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init, ones = nnx.initializers.lecun_normal(), nnx.initializers.ones_init()
        columns, inner = (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim
        split, rows = (None, "tensor"), ("tensor", None)
        self.qkv = parameter(init, (d_model, columns), split, rngs, param_dtype)
        self.out = parameter(init, (inner, d_model), rows, rngs, param_dtype)
        gain = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.norm = gain if norm else None
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.norm_eps, self.dtype = head_dim, norm_eps, dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
    ) -> Float[Array, "batch seq d_model"]:
        """Attends causally within `x`: training and scoring."""
        return self.prefill(x, cos, sin)[0]

    def prefill(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
    ) -> tuple[Array, Array, Array]:
        """The same, and the keys and values `[batch, num_kv_heads, seq, head_dim]`."""
        query, key, value = self._heads(x, cos, sin)
        fold = [lax.collapse(t, 0, 2) for t in (query, key, value)]
        scale = self.head_dim**-0.5
        out = attention_cte(*fold, scale=scale, tp_k=True, tp_out=True)
        out = out.reshape(x.shape[0], self.num_heads, self.head_dim, x.shape[1])
        return self._out(out), key, value

    def decode(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
        cache: LayerCache,
        lengths: Int[Array, " batch"],
    ) -> tuple[Array, LayerCache]:
        """Attends to `lengths[b]` cached tokens and, causally, to `x`.

        Returns the output, and the cache with the new tokens from slot `lengths[b]` on.
        """
        query, key, value = self._heads(x, cos, sin)
        out = attention_tkg_fwd_kernel(
            query * jnp.asarray(self.head_dim**-0.5, query.dtype),
            key,
            value,
            cache.key,
            cache.value,
            lengths=lengths,
        )
        return self._out(out), cache.write(key, value, lengths)

    def _heads(self, x, cos, sin):
        """Query, key and value, each `[batch, heads, seq, head_dim]`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        gamma = None if self.norm is None else at_dtype(self.norm, self.dtype)[None]
        options = dict(
            norm_eps=self.norm_eps,
            fused_rope=True,
            cos_cache=cos,
            sin_cache=sin,
            d_head=self.head_dim,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
        )
        fused = self._project(x, gamma, options)
        heads = fused.reshape(*x.shape[:2], -1, self.head_dim)
        ends = [self.num_heads, self.num_heads + self.num_kv_heads]
        return (jnp.moveaxis(t, 2, 1) for t in jnp.split(heads, ends, 2))

    def _project(self, x, gamma, options: dict[str, Any]) -> Array:
        """The fused projection `[batch, seq, heads * head_dim]`."""
        return qkv(
            x,
            at_dtype(self.qkv, self.dtype),
            fused_norm_type="NO_NORM" if gamma is None else "RMS_NORM",
            gamma_norm_weights=gamma,
            **options,
        )

    def _out(self, heads: Float[Array, "batch heads head_dim seq"]) -> Array:
        """The output projection, `[batch, seq, d_model]`."""
        return output_projection_cte(heads, at_dtype(self.out, self.dtype))
