"""The fused attention block of a decode step as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.cache import LayerCache
from neuronjax.nn.decode_tokens import new_tokens
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_even,
    require_from_zero,
    require_sizes,
    require_word,
)
from neuronjax.primitives.attention_block_tkg import attention_block_tkg


class AttentionBlock(nnx.Module):
    """The twin of `neuronjax.attention_block_tkg`: norm to projection, one macro.

    Decoding alone: a few new tokens of each sequence, behind a cache. All query heads
    share one key and one value head, as the block has it; `DecoderStack` has several.
    `nn.Attention` with `num_kv_heads=1` has the same weights, for prefill.

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        head_dim: width of a head, even.
        norm: an RMSNorm in front.
        norm_eps: added to the mean square, of all norms.
        qk_norm: `"pre_rope"` or `"post_rope"`: an RMSNorm of each query and key head in
            front of the rotation or behind it; `None` for none.
        interleaved: pairs of channels are `(2i, 2i + 1)`, not `(i, i + head_dim/2)`.
        bias: biases of both projections.
        sink: each head has one more score, a parameter, without a key.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    The rows of `out` carry the partition names `("tensor", None)`. Of `qkv` none does:
    the key and value columns are every rank's.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from neuronjax.nn import LayerCache, rotary_tables
        >>> layer = AttentionBlock(8, 2, 4, rngs=nnx.Rngs(0))
        >>> cache = LayerCache.zeros(1, 1, 4, 5, jnp.float32)
        >>> tables, none = rotary_tables(jnp.array([[0]]), 4), jnp.array([0])
        >>> out, cache = layer(jnp.ones((1, 1, 8)), *tables, cache, none)
        >>> out.shape, cache.key.shape
        ((1, 1, 8), (1, 1, 4, 5))
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        norm: bool = True,
        norm_eps: float = 1e-6,
        qk_norm: str | None = None,
        interleaved: bool = False,
        bias: bool = False,
        sink: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(d_model=d_model, num_heads=num_heads, head_dim=head_dim)
        require_sizes("AttentionBlock", **sizes)
        require_even("AttentionBlock", "head_dim", head_dim)
        require_from_zero("AttentionBlock", norm_eps=norm_eps)
        words = ("pre_rope", "post_rope", None)
        require_word("AttentionBlock", "qk_norm", qk_norm, words)
        require_dtypes("AttentionBlock", dtype, param_dtype)
        lecun, rest = nnx.initializers.lecun_normal(), (rngs, param_dtype)
        columns, inner = (num_heads + 2) * head_dim, num_heads * head_dim
        self.qkv = parameter(lecun, (d_model, columns), (None, None), *rest)
        self.out = parameter(lecun, (inner, d_model), ("tensor", None), *rest)
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        row = (None,), *rest
        self.norm = parameter(ones, (d_model,), *row) if norm else None
        self.query_norm = parameter(ones, (head_dim,), *row) if qk_norm else None
        self.key_norm = parameter(ones, (head_dim,), *row) if qk_norm else None
        self.qkv_bias = parameter(zeros, (columns,), *row) if bias else None
        self.out_bias = parameter(zeros, (d_model,), *row) if bias else None
        logits = (num_heads,), ("tensor",), *rest
        self.sink = parameter(zeros, *logits) if sink else None
        self.num_heads, self.head_dim, self.norm_eps = num_heads, head_dim, norm_eps
        self.qk_norm, self.interleaved, self.dtype = qk_norm, interleaved, dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"] | None,
        sin: Float[Array, "batch seq head_dim"] | None,
        cache: LayerCache,
        lengths: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch seq d_model"], LayerCache]:
        """Attends to `lengths[b]` cached tokens and, causally, to `x`.

        Args:
            x: `[batch, seq, d_model]`.
            cos: `[batch, seq, head_dim]`, of which the first half of the columns
                counts; `None` for no rotation, and so `sin`.
            sin: like `cos`.
            cache: of one key/value head. Donate it to `jit` to have it updated in
                place.
            lengths: `[batch]`. A row needs room for the new tokens: one without, under
                `jit`, is written nothing, and sees its first `slots - seq` slots.

        Returns:
            The output, without a residual, and the cache with the new tokens from slot
            `lengths[b]` on.
        """
        x = x if self.dtype is None else x.astype(self.dtype)
        slots, (batch, seq, _) = cache.value.shape[2], x.shape
        tokens = new_tokens("AttentionBlock", (cos, sin), lengths, seq, slots)
        mask = jnp.broadcast_to(tokens.mask, (slots, batch, self.num_heads, seq))
        sink = None if self.sink is None else at_dtype(self.sink, self.dtype)[:, None]
        out, key, value = attention_block_tkg(
            x,
            **self._norms(),
            W_qkv=at_dtype(self.qkv, self.dtype),
            bias_qkv=self._row(self.qkv_bias),
            cos=tokens.cos,
            sin=tokens.sin,
            rope_contiguous_layout=not self.interleaved,
            K_cache_transposed=True,
            K_cache=cache.key,
            V_cache=cache.value,
            attention_mask=mask,
            sink=sink,
            kv_cache_update_idx=tokens.position,
            W_out=at_dtype(self.out, self.dtype),
            bias_out=self._row(self.out_bias),
        )
        return out.reshape(x.shape), LayerCache(key, value)

    def _norms(self) -> dict[str, Any]:
        norms = dict(
            rmsnorm_X_enabled=self.norm is not None,
            rmsnorm_X_eps=self.norm_eps,
            rmsnorm_X_gamma=self._row(self.norm),
        )
        if self.qk_norm is None:
            return norms
        kind = f"rmsnorm_QK_{self.qk_norm}"
        return norms | {
            f"{kind}_enabled": True,
            f"{kind}_eps": self.norm_eps,
            f"{kind}_W_Q": self._row(self.query_norm),
            f"{kind}_W_K": self._row(self.key_norm),
        }

    def _row(self, weight: nnx.Param | None) -> Array | None:
        return None if weight is None else at_dtype(weight, self.dtype)[None]
