"""The router of a mixture of experts as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_at_most,
    require_dtypes,
    require_option,
    require_sizes,
)
from neuronjax.primitives.options import RouterActFnType
from neuronjax.primitives.router_topk import router_topk


class SelectionBias(nnx.Variable):
    """What is added to an expert's score for the selection alone: no parameter.

    It has no gradient: a training loop raises it for experts with too few tokens.
    """


class Router(nnx.Module):
    """The twin of `neuronjax.router_topk`: each token's best experts.

    Args:
        d_model: width of a token.
        num_experts: how many experts it chooses from.
        experts_per_token: how many a token gets.
        act_fn: `"SOFTMAX"` or `"SIGMOID"`: what turns logits into affinities.
        router_pre_norm: activate the logits of all experts, not those of the selected
            ones alone.
        norm_topk_prob: the affinities of a token's experts sum to 1; needs
            `router_pre_norm`.
        bias: add a bias to the logits.
        selection_bias: keep a `SelectionBias`, `[num_experts]`, zeros at first.
        dtype: dtype of the computation; `None` keeps that of the input, to which the
            parameters are then rounded.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    No axis of `kernel [d_model, num_experts]` has a partition name: every device
    chooses for its own tokens.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Source:
        Wang et al. 2024, https://arxiv.org/abs/2408.15664, for balance by a bias of the
        selection.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> router = Router(8, 4, 2, rngs=nnx.Rngs(0))
        >>> logits, index, affinities = router(jnp.ones((3, 8)))
        >>> logits.shape, index.shape, affinities.sum(-1).round(4).tolist()
        ((3, 4), (3, 2), [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        experts_per_token: int,
        *,
        act_fn: str = "SOFTMAX",
        router_pre_norm: bool = True,
        norm_topk_prob: bool = True,
        bias: bool = False,
        selection_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        k = dict(experts_per_token=experts_per_token)
        require_sizes("Router", d_model=d_model, num_experts=num_experts, **k)
        require_at_most("Router", k, "num_experts", num_experts)
        if norm_topk_prob and not router_pre_norm:
            raise ValueError(  # a softmax over the selected sums to 1 already
                "nn.Router: norm_topk_prob must be False without router_pre_norm, got "
                f"{norm_topk_prob}"
            )
        require_option("Router", "act_fn", act_fn, RouterActFnType)
        require_dtypes("Router", dtype, param_dtype)
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        shape = (d_model, num_experts)
        self.kernel = parameter(init, shape, (None, None), rngs, param_dtype)
        offset = parameter(zeros, shape[1:], (None,), rngs, param_dtype)
        self.bias = offset if bias else None
        balance = jnp.zeros(num_experts, jnp.float32) if selection_bias else None
        self.selection_bias = None if balance is None else SelectionBias(balance)
        self.experts_per_token, self.act_fn = experts_per_token, act_fn
        self.router_pre_norm, self.norm_topk_prob = router_pre_norm, norm_topk_prob
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        token_mask: Bool[Array, " tokens"] | None = None,
    ) -> tuple[Array, Array, Array]:
        """The logits `[tokens, num_experts]`, the chosen experts and all affinities.

        Args:
            x: `[tokens, d_model]`.
            token_mask: True = keep; a padding token gets the expert `num_experts`.

        Returns:
            `(router_logits, expert_index [tokens, experts_per_token],
            expert_affinities [tokens, num_experts])`.
        """
        x = x if self.dtype is None else x.astype(self.dtype)
        bias, balance = self.bias, self.selection_bias
        logits, index, affinities = router_topk(
            x,
            at_dtype(self.kernel, x.dtype),
            None if bias is None else at_dtype(bias, x.dtype),
            act_fn=self.act_fn,
            k=self.experts_per_token,
            x_hbm_layout=1,
            router_pre_norm=self.router_pre_norm,
            norm_topk_prob=self.norm_topk_prob,
            selection_bias=None if balance is None else balance[...],
            token_mask=token_mask,
        )
        return logits, index, affinities
