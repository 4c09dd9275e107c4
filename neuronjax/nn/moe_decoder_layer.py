"""The decoder layer with a mixture of experts."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.cache import LayerCache
from neuronjax.nn.decoder_layer import DecoderLayer
from neuronjax.nn.moe import MoE


class MoEDecoderLayer(DecoderLayer):
    r"""A decoder layer with experts in the place of its feed-forward block.

    $$h = x + \mathrm{Attention}(x), \qquad \mathrm{out} = h + \mathrm{MoE}(h)$$

    Args:
        d_model: width of the residual stream.
        d_ff: width of an expert between its projections.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        num_experts: how many experts the router chooses from.
        experts_per_token: how many a token gets.
        norm_eps: added to the mean square in both norms.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.
        **experts: further arguments of `MoE`, by name: its shared expert, its router,
            its activation, `block_size`, `checkpoint`, `mesh` and its axes.

    Raises:
        ValueError: a setting is out of range; when called, what the functions refuse.

    Source:
        Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from neuronjax.nn.rotary import rotary_tables
        >>> layer = MoEDecoderLayer(8, 6, 2, 1, 4, 4, 2, rngs=nnx.Rngs(0))
        >>> cos, sin = rotary_tables(jnp.arange(3)[None], 4)
        >>> layer(jnp.ones((1, 3, 8)), cos, sin).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_experts: int,
        experts_per_token: int,
        *,
        norm_eps: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **experts: Any,
    ):
        kind: dict[str, Any] = dict(norm_eps=norm_eps, rngs=rngs)
        kind |= dict(dtype=dtype, param_dtype=param_dtype)
        moe = MoE(d_model, d_ff, num_experts, experts_per_token, **kind, **experts)
        heads = num_heads, num_kv_heads, head_dim
        super().__init__(d_model, d_ff, *heads, mlp=moe, **kind)

    def with_balance(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
    ) -> tuple[Float[Array, "batch seq d_model"], Float[Array, ""]]:
        """The layer over whole sequences, and its load-balance loss."""
        attended = self.attention(x, cos, sin)
        h = x.astype(attended.dtype) + attended
        return self.mlp.with_balance(h, residual=h)

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
        h = x.astype(out.dtype) + out
        return self.mlp.decode(h, residual=h), cache
