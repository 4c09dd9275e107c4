"""A mixture of experts as a layer."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.nn.mlp import MLP
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_at_most,
    require_dtypes,
    require_from_zero,
    require_option,
    require_sizes,
    require_word,
)
from neuronjax.primitives.blockwise_mm.functions import moe_cte
from neuronjax.primitives.blockwise_mm.spec import SkipMode
from neuronjax.primitives.expert_mlps.functions import moe_tkg
from neuronjax.primitives.moe_block_tkg import moe_block_tkg
from neuronjax.primitives.options import ActFnType, RouterActFnType
from neuronjax.primitives.reduce import rms_norm
from neuronjax.primitives.router_topk import load_balance_loss, router_topk
from neuronjax.primitives.routing import (
    block_size_for,
    mask_affinities,
    route_to_blocks,
)
from neuronjax.sharding.expert_parallel import expert_parallel_moe
from neuronjax.sharding.mesh import require_axes


def _require_settings(act_fn, activation, norm_eps, checkpoint) -> None:
    require_option("MoE", "act_fn", act_fn, RouterActFnType)
    require_option("MoE", "activation", activation, ActFnType)
    require_from_zero("MoE", norm_eps=norm_eps)
    require_word("MoE", "checkpoint", checkpoint, ("store", "recompute"))


def _require_sizes(sizes, experts_per_token, shared_d_ff, block_size) -> None:
    require_sizes("MoE", **sizes, experts_per_token=experts_per_token)
    chosen = dict(experts_per_token=experts_per_token)
    require_at_most("MoE", chosen, "num_experts", sizes["num_experts"])
    optional = dict(shared_d_ff=shared_d_ff or None, block_size=block_size)
    given = {name: size for name, size in optional.items() if size is not None}
    require_sizes("MoE", **given)


def _expert_weights(
    *, d_model: int, d_ff: int, num_experts: int, rngs: nnx.Rngs, dtype: Any
) -> tuple[nnx.Param, nnx.Param]:
    """`gate_up [E, d_model, 2, d_ff]` and `down [E, d_ff, d_model]`."""
    lecun = functools.partial(nnx.initializers.lecun_normal, in_axis=1, out_axis=-1)
    shape, names = (num_experts, d_model, 2, d_ff), ("expert", None, None, "tensor")
    gate_up = parameter(lecun(batch_axis=(0, 2)), shape, names, rngs, dtype)
    shape, names = (num_experts, d_ff, d_model), ("expert", "tensor", None)
    return gate_up, parameter(lecun(batch_axis=0), shape, names, rngs, dtype)


class MoE(nnx.Module):
    r"""RMSNorm, router, the experts of each token, and a shared expert if there is one.

    $$z = \mathrm{rms\_norm}(x), \qquad
      \mathrm{out}_t = \sum_{e \in \mathrm{top}_k(t)} a_{te} \,
      \mathrm{expert}_e(z_t) + \mathrm{shared}(z_t)$$

    The twin of `rms_norm`, `router_topk`, `route_to_blocks` and `moe_cte` (`moe_tkg`
    when decoding, or for all of it `moe_block_tkg`), in that order; no token is
    dropped. The shared expert is the twin of `mlp`, added to the routed sum before that
    is rounded. A narrow routed sum is kept wide for it, and with it what
    `checkpoint="store"` keeps.

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
        mesh: devices that share tokens and experts, as in `expert_parallel_moe`: two
            all-to-alls a call, decoding too. Tokens are filled up to a multiple of the
            devices. Each device's sum is rounded for the way back. Other axes of the
            mesh hold everything whole.
        axis: the mesh axis that splits them.
        batch: a mesh axis that splits tokens too, each part with all experts.
        dtype: dtype of the computation; `None` keeps that of the input, to which the
            router's weights are then rounded.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    `gate_up [E, d_model, 2, d_ff]` carries the partition names `("expert", None, None,
    "tensor")`, `down [E, d_ff, d_model]` `("expert", "tensor", None)`. Without `mesh` a
    device that has a part of the experts alone gathers the others. Quantizing a model
    (`neuronjax.quantize`) quantizes the shared expert and leaves the others.

    Raises:
        ValueError: a setting is out of range, or `mesh` lacks an axis; and when called,
            what the functions refuse.

    Source:
        Shazeer et al. 2017, https://arxiv.org/abs/1701.06538, equation 1; DeepSeek-AI
        2024, https://arxiv.org/abs/2401.06066, equation 9, for the shared expert.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = MoE(8, 6, num_experts=4, experts_per_token=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
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
        mesh: Mesh | None = None,
        axis: str = "expert",
        batch: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        _require_sizes(sizes, experts_per_token, shared_d_ff, block_size)
        _require_settings(act_fn, activation, norm_eps, checkpoint)
        require_dtypes("MoE", dtype, param_dtype)
        if mesh is not None:
            require_axes("nn.MoE", mesh, axis=axis, batch=batch)
        lecun, ones = nnx.initializers.lecun_normal(), nnx.initializers.ones_init()
        self.gate_up, self.down = _expert_weights(**sizes, rngs=rngs, dtype=param_dtype)
        table = (d_model, num_experts), (None, None)
        self.router = parameter(lecun, *table, rngs, param_dtype)
        gain = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.norm = gain if norm else None
        kind: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        kind |= dict(activation=activation, norm=False)
        self.shared = MLP(d_model, shared_d_ff, **kind) if shared_d_ff else None
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.act_fn, self.norm_topk_prob = act_fn, norm_topk_prob
        self.activation, self.norm_eps, self.dtype = activation, norm_eps, dtype
        self.block_size, self.checkpoint = block_size, checkpoint
        self.mesh, self.axis, self.batch = mesh, axis, batch

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
        token_mask: Bool[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """Returns the experts' weighted sum, plus `residual` where given.

        Padding tokens (False in `token_mask`) go to no expert, count as zeros whatever
        they hold, and add 0 to their residual.
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
        """What a call returns, by the macro for a few tokens: `ExpertMLPs`.

        Over a mesh it is a call.
        """
        return self._apply(x, residual, None, self._few)[0]

    def decode_block(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
    ) -> tuple[Float[Array, "batch seq d_model"], Array, Array]:
        """The layer of `x + residual`, by the fused decode block, `moe_block_tkg`.

        Returns:
            `(out, router_logits [batch * seq, num_experts], x + residual)`: the sum is
            not added to `out`, the next layer does.

        Raises:
            ValueError: the layer has no norm, or is over a mesh.
        """
        if self.norm is None or self.mesh is not None:
            found = "norm=False" if self.norm is None else "a mesh"
            raise ValueError(
                f"nn.MoE: decode_block must have a norm and all experts at hand, "
                f"got {found}"
            )
        x = x if self.dtype is None else x.astype(self.dtype)
        added = jnp.zeros_like(x) if residual is None else residual.astype(x.dtype)
        out, logits, total = moe_block_tkg(
            x,
            at_dtype(self.norm, self.dtype)[None],
            at_dtype(self.router, x.dtype),
            at_dtype(self.gate_up, self.dtype),
            at_dtype(self.down, self.dtype),
            **self._shared_operands(),
            eps=self.norm_eps,
            top_k=self.experts_per_token,
            router_act_fn=self.act_fn,
            norm_topk_prob=self.norm_topk_prob,
            expert_affinities_scaling_mode="POST_SCALE",
            hidden_act_fn=self.activation,
            residual=added,
        )
        return out.reshape(x.shape), logits, total

    def _shared_operands(self) -> dict[str, Array]:
        if self.shared is None:
            return {}
        names = ("gate", "up", "down")
        return {
            f"shared_expert_{name}_w": at_dtype(getattr(self.shared, name), self.dtype)
            for name in names
        }

    def _apply(self, x, residual, token_mask, experts=None):
        """The output; the router's logits and choices; the mask of tokens."""
        x = x if self.dtype is None else x.astype(self.dtype)
        mask = None if token_mask is None else token_mask.reshape(-1)
        # What padding holds ends here: 0 * NaN would reach the gain's gradient.
        x = x if token_mask is None else jnp.where(token_mask[..., None], x, 0)
        if self.norm is not None:
            x = rms_norm(x, at_dtype(self.norm, self.dtype), eps=self.norm_eps)
        rows = x.reshape(-1, x.shape[-1])
        if self.mesh is None:
            out, logits, index = self._here(rows, mask, experts or self._blocks)
        else:
            out, logits, index = self._over_mesh(rows, mask)
        out = out.reshape(x.shape)
        for addend in (self.shared and self.shared(x), residual):
            out = out if addend is None else out + addend.astype(out.dtype)
        return out.astype(x.dtype), logits, index, mask

    def _here(self, rows: Array, mask: Array | None, experts: Any):
        """The routed sum, the router's logits and choices; every expert is at hand."""
        logits, index, affinities = router_topk(
            rows,
            at_dtype(self.router, rows.dtype),
            k=self.experts_per_token,
            x_hbm_layout=1,
            token_mask=mask,
            **self._rule(),
        )
        # What a shared expert is added to is not rounded before.
        wide = rows.dtype if self.shared is None else accumulator(rows.dtype)
        return experts(rows, index, affinities, wide), logits, index

    def _over_mesh(self, rows: Array, mask: Array | None):
        """The same with tokens and experts over the devices."""
        assert self.mesh is not None
        axes = [name for name in (self.batch, self.axis) if name is not None]
        tokens = rows.shape[0]
        spare = -tokens % math.prod(self.mesh.shape[name] for name in axes)
        if spare:
            mask = jnp.ones(tokens, bool) if mask is None else mask
            mask, rows = jnp.pad(mask, (0, spare)), jnp.pad(rows, ((0, spare), (0, 0)))
        outs = expert_parallel_moe(
            self.mesh,
            rows,
            at_dtype(self.router, rows.dtype),
            at_dtype(self.gate_up, self.dtype),
            at_dtype(self.down, self.dtype),
            k=self.experts_per_token,
            axis=self.axis,
            batch=self.batch,
            token_mask=mask,
            block_size=self.block_size,
            activation_function=self.activation,
            checkpoint=self.checkpoint,
            **self._rule(),
        )
        return tuple(x[:tokens] for x in outs) if spare else outs

    def _rule(self) -> dict[str, Any]:
        return dict(act_fn=self.act_fn, norm_topk_prob=self.norm_topk_prob)

    def _blocks(self, x: Array, index: Array, affinities: Array, wide: Any) -> Any:
        """The routed sum of `[tokens, d_model]` in `wide`, expert by expert."""
        load = x.shape[0], self.experts_per_token, self.num_experts
        size = block_size_for(*load) if self.block_size is None else self.block_size
        weights = [at_dtype(w, self.dtype) for w in (self.gate_up, self.down)]
        factor = promoted(x.dtype, *(w.dtype for w in weights))
        ids, experts, _ = route_to_blocks(
            index, self.num_experts, size, skip_token=True
        )
        return moe_cte(
            x.astype(wide),
            mask_affinities(affinities, index, skip_token=True),
            *weights,
            ids,
            experts,
            size,
            "shard_on_block",
            skip_dma=SkipMode(skip_token=True),
            activation_function=self.activation,
            checkpoint=self.checkpoint,
            compute_dtype=factor,
        )

    def _few(self, x: Array, index: Array, affinities: Array, wide: Any) -> Array:
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
            output_dtype=wide,
        )
