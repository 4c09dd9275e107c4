"""A mixture of experts as a layer, and the decoder layer that has one."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from neuronjax.nn.cache import LayerCache
from neuronjax.nn.decoder_layer import DecoderLayer
from neuronjax.nn.mlp import MLP
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.primitives.blockwise_mm.functions import moe_cte
from neuronjax.primitives.blockwise_mm.spec import SkipMode
from neuronjax.primitives.expert_mlps.functions import moe_tkg
from neuronjax.primitives.reduce import rms_norm
from neuronjax.primitives.router_topk import load_balance_loss, router_topk
from neuronjax.primitives.routing import (
    block_size_for,
    mask_affinities,
    route_to_blocks,
)


class MoE(nnx.Module):
    """RMSNorm, router, the experts of each token, and a shared expert if there is one.

    The twin of `rms_norm`, `router_topk`, `route_to_blocks` and `moe_cte` (`moe_tkg`
    when decoding), in that order; no token is dropped. The shared expert is the twin of
    `mlp` and is added after the routed sum.

    Args:
        d_model: width of the residual stream.
        d_ff: width of an expert between its projections.
        num_experts: how many experts the router chooses from.
        experts_per_token: how many a token gets.
        shared_d_ff: width of an expert that every token has; 0 for none.
        act_fn: `"SOFTMAX"` or `"SIGMOID"`: what turns logits into weights.
        norm_topk_prob: the weights of a token's experts sum to 1.
        activation: of the gate: `"SiLU"`, `"GELU"`, `"GELU_Tanh_Approx"` or `"Swish"`.
        norm: an RMSNorm in front.
        norm_eps: added to the mean square.
        block_size: slots of a block; unless named it follows the number of tokens.
        checkpoint: `"store"`, or `"recompute"` to save memory in training.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    `gate_up [E, d_model, 2, d_ff]` carries the partition names `("expert", None, None,
    "tensor")`, `down [E, d_ff, d_model]` `("expert", "tensor", None)`. Quantizing a
    model (`neuronjax.quantize`) quantizes the shared expert and leaves the others.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        experts_per_token: int,
        *,
        shared_d_ff: int = 0,
        act_fn: str = "SOFTMAX",
        norm_topk_prob: bool = True,
        activation: str = "SiLU",
        norm: bool = True,
        norm_eps: float = 1e-6,
        block_size: int | None = None,
        checkpoint: str = "store",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        lecun, ones = nnx.initializers.lecun_normal, nnx.initializers.ones_init()
        each = lecun(in_axis=1, out_axis=-1, batch_axis=(0, 2))
        shape, names = (num_experts, d_model, 2, d_ff), ("expert", None, None, "tensor")
        self.gate_up = parameter(each, shape, names, rngs, param_dtype)
        each = lecun(in_axis=1, out_axis=-1, batch_axis=0)
        shape, names = (num_experts, d_ff, d_model), ("expert", "tensor", None)
        self.down = parameter(each, shape, names, rngs, param_dtype)
        shape = (d_model, num_experts)
        self.router = parameter(lecun(), shape, (None, None), rngs, param_dtype)
        gain = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.norm = gain if norm else None
        kind: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        kind |= dict(activation=activation, norm=False)
        self.shared = MLP(d_model, shared_d_ff, **kind) if shared_d_ff else None
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.act_fn, self.norm_topk_prob = act_fn, norm_topk_prob
        self.activation, self.norm_eps, self.dtype = activation, norm_eps, dtype
        self.block_size, self.checkpoint = block_size, checkpoint

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
        token_mask: Bool[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """Returns the experts' weighted sum, plus `residual` where given.

        Padding tokens (False in `token_mask`) go to no expert; a shared expert reads
        them like any other.
        """
        return self._apply(x, residual, token_mask)[0]

    def with_balance(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
        token_mask: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq d_model"], Float[Array, ""]]:
        """The same, and the `load_balance_loss` of the tokens that count."""
        out, logits, index, mask = self._apply(x, residual, token_mask)
        loss = load_balance_loss(logits, index, act_fn=self.act_fn, token_mask=mask)
        return out, loss

    def decode(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """What a call returns, by the macro for a few tokens: `ExpertMLPs`."""
        return self._apply(x, residual, None, self._few)[0]

    def _apply(self, x, residual, token_mask, experts=None):
        """The output; the router's logits and choices; the mask of tokens."""
        shape = x.shape
        x = x if self.dtype is None else x.astype(self.dtype)
        if self.norm is not None:
            x = rms_norm(x, at_dtype(self.norm, self.dtype), eps=self.norm_eps)
        mask = None if token_mask is None else token_mask.reshape(-1)
        rows = x.reshape(-1, shape[-1])
        logits, index, affinities = router_topk(
            rows,
            at_dtype(self.router, self.dtype),
            act_fn=self.act_fn,
            k=self.experts_per_token,
            x_hbm_layout=1,
            norm_topk_prob=self.norm_topk_prob,
            token_mask=mask,
        )
        out = (experts or self._blocks)(rows, index, affinities).reshape(shape)
        out = out if self.shared is None else out + self.shared(x)
        out = out if residual is None else out + residual.astype(out.dtype)
        return out, logits, index, mask

    def _blocks(self, x: Array, index: Array, affinities: Array) -> Any:
        """The routed sum of `[tokens, d_model]`, expert by expert."""
        load = x.shape[0], self.experts_per_token, self.num_experts
        size = self.block_size or block_size_for(*load)
        ids, experts, _ = route_to_blocks(
            index, self.num_experts, size, skip_token=True
        )
        return moe_cte(
            x,
            mask_affinities(affinities, index, skip_token=True),
            at_dtype(self.gate_up, self.dtype),
            at_dtype(self.down, self.dtype),
            ids,
            experts,
            size,
            "shard_on_block",
            skip_dma=SkipMode(skip_token=True),
            activation_function=self.activation,
            checkpoint=self.checkpoint,
        )

    def _few(self, x: Array, index: Array, affinities: Array) -> Array:
        """The same for a few tokens."""
        return moe_tkg(
            x,
            at_dtype(self.gate_up, self.dtype),
            at_dtype(self.down, self.dtype),
            affinities,
            index,
            is_all_expert=False,
            expert_affinities_scaling_mode="POST_SCALE",
            activation_fn=self.activation,
        )


class MoEDecoderLayer(DecoderLayer):
    """`h = x + Attention(x)`, then `h + MoE(h)`.

    Args:
        d_model: width of the residual stream.
        d_ff: width of an expert between its projections.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        num_experts: how many experts the router chooses from.
        experts_per_token: how many a token gets.
        shared_d_ff: width of an expert that every token has; 0 for none.
        norm_topk_prob: the weights of a token's experts sum to 1.
        norm_eps: added to the mean square in both norms.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.
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
        shared_d_ff: int = 0,
        norm_topk_prob: bool = True,
        norm_eps: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kind: dict[str, Any] = dict(norm_eps=norm_eps, rngs=rngs)
        kind |= dict(dtype=dtype, param_dtype=param_dtype)
        experts = MoE(
            d_model,
            d_ff,
            num_experts,
            experts_per_token,
            shared_d_ff=shared_d_ff,
            norm_topk_prob=norm_topk_prob,
            **kind,
        )
        heads = num_heads, num_kv_heads, head_dim
        super().__init__(d_model, d_ff, *heads, mlp=experts, **kind)

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
