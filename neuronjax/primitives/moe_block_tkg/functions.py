"""`moe_block_tkg`: norm, router, experts and shared expert of a decode step.

It has no macro of its own: it emits `NeuronReduceMacro`, `RouterTopK`, `ExpertMLPs`
and, for a shared expert, `MLP`.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives import contracts
from neuronjax.primitives.expert_mlps.functions import moe_tkg
from neuronjax.primitives.mlp.emitters import mlp_fused_add_kernel
from neuronjax.primitives.moe_block_tkg import rules  # noqa: F401  enters the rows
from neuronjax.primitives.moe_block_tkg.facts import (
    experts_of,
    facts,
    has_shared_expert,
    norm_of,
    router_dtype,
    router_of,
    shared_of,
)
from neuronjax.primitives.options import (
    ActFnType,
    ExpertAffinityScaleMode,
    RouterActFnType,
)
from neuronjax.primitives.reduce import neuron_reduce_macro_kernel
from neuronjax.primitives.router_topk.functions import router_topk


@contracts.contracted(facts)
def moe_block_tkg(
    inp: Float[Array, "batch seq d_model"],
    gamma: Float[Array, "1 d_model"],
    router_weights: Float[Array, "d_model num_experts"],
    expert_gate_up_weights: Shaped[Array, "experts ..."],
    expert_down_weights: Shaped[Array, "experts ..."],
    shared_expert_gate_w: Float[Array, "d_model d_shared"] | None = None,
    shared_expert_up_w: Float[Array, "d_model d_shared"] | None = None,
    shared_expert_down_w: Float[Array, "d_shared d_model"] | None = None,
    expert_gate_up_weights_scale: Shaped[Array, "experts ..."] | None = None,
    expert_down_weights_scale: Shaped[Array, "experts ..."] | None = None,
    router_bias: Float[Array, "... num_experts"] | None = None,
    expert_gate_up_bias: Float[Array, "experts ..."] | None = None,
    expert_down_bias: Float[Array, "experts d_model"] | None = None,
    shared_expert_gate_bias: Float[Array, "1 d_shared"] | None = None,
    shared_expert_up_bias: Float[Array, "1 d_shared"] | None = None,
    shared_expert_down_bias: Float[Array, "1 d_model"] | None = None,
    eps: float = 1e-6,
    top_k: int = 1,
    router_act_fn: RouterActFnType | str = RouterActFnType.SIGMOID,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode | str = "NO_SCALE",
    hidden_act_fn: ActFnType | str = ActFnType.SiLU,
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    router_mm_dtype: DTypeLike | None = None,
    hidden_actual: int | None = None,
    skip_router_logits: bool = False,
    is_all_expert: bool = False,
    rank_id: Int[Array, "1 1"] | int | None = None,
    residual: Float[Array, "batch seq d_model"] | None = None,
    weight_dtype: Any = None,
) -> tuple[jax.Array, ...]:
    r"""Norm, router and experts of a decode step.

    $$x = \mathrm{rms\_norm}(h + r) \cdot \gamma, \qquad
      \mathrm{idx}, a = \mathrm{router\_topk}(x), \qquad
      \mathrm{out} = \sum_k a_{\mathrm{idx}_k}\, y_{\mathrm{idx}_k}(x) + y_s(x)$$

    with the experts `y` of `moe_tkg` and a shared expert `y_s` where there is one. The
    sum `h + r` is not added to the result: it is returned for the next layer to add.

    Args:
        inp: `h`, `[B, S, H]`. With block-scaled experts its columns, those of `gamma`,
            and the rows of the router's and the shared expert's weights are in the
            order of `neuronjax.swizzle_hidden`; those of the results never are, but for
            `h + r`.
        gamma: the norm's gain, `[1, H]`.
        router_weights: `[H, E]`.
        expert_gate_up_weights: as in `moe_tkg`, and so are the other expert operands.
        expert_down_weights: as in `moe_tkg`.
        shared_expert_gate_w: `[H, I_s]`: an expert that every token goes to, with
            affinity 1, the activation and the clamps of the others. Over ranks give it
            to one of them, or to each a part of its `I_s`.
        shared_expert_up_w: `[H, I_s]`.
        shared_expert_down_w: `[I_s, H]`.
        expert_gate_up_weights_scale: as in `moe_tkg`.
        expert_down_weights_scale: as in `moe_tkg`.
        router_bias: `[1, E]` or `[E]`, added to the logits.
        expert_gate_up_bias: as in `moe_tkg`.
        expert_down_bias: as in `moe_tkg`.
        shared_expert_gate_bias: `[1, I_s]`.
        shared_expert_up_bias: `[1, I_s]`.
        shared_expert_down_bias: `[1, H]`.
        eps: added to the mean square; finite, at least 0.
        top_k: how many experts a token gets.
        router_act_fn: as `act_fn` of `router_topk`.
        router_pre_norm: as in `router_topk`. Its affinities of experts that are not
            chosen are masked where all local experts see every token.
        norm_topk_prob: as in `router_topk`.
        expert_affinities_scaling_mode: as in `moe_tkg`. Without scaling and with
            `is_all_expert`, every local expert counts, chosen or not.
        hidden_act_fn: as `activation_fn` of `moe_tkg`.
        hidden_act_scale_factor: refused: what it scales is defined nowhere.
        hidden_act_bias: refused alike.
        gate_clamp_upper_limit: as in `moe_tkg`.
        gate_clamp_lower_limit: as in `moe_tkg`.
        up_clamp_upper_limit: as in `moe_tkg`.
        up_clamp_lower_limit: as in `moe_tkg`.
        router_mm_dtype: `x` and the router's weights are rounded to it; None for what
            holds both. (aws-neuron/nki-library's is bfloat16, which would round
            float32 without a word.)
        hidden_actual: columns that count in the mean square; the rest of `h` holds
            zeros.
        skip_router_logits: leave the logits out of the results.
        is_all_expert: as in `moe_tkg`.
        rank_id: as in `moe_tkg`.
        residual: `r`, of the shape and dtype of `inp`.
        weight_dtype: as in `moe_tkg`.

    Returns:
        `(out [T, H][, router_logits [T, E]][, h + r [B, S, H]])` with `T = B S`; `out`
        and the sum in the dtype of `inp`, logits in float32, or float64 for float64.
        The checkpoint names are those of `rms_norm`, `router_topk`, `moe_tkg` and
        `mlp`.

    Raises:
        ValueError: the arguments break a rule, of the block, the router or the experts;
            one error lists all of them. The chip's limits are reported by
            `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, `core/moe_block/moe_block_tkg`; DeepSeek-AI 2024,
        DeepSeekMoE, https://arxiv.org/abs/2401.06066, equation 9, for the shared
        expert.

    Example:
        >>> import jax.numpy as jnp
        >>> h, w = jnp.ones((1, 1, 2)), jnp.ones((3, 2, 2, 4))
        >>> out, logits = moe_block_tkg(
        ...     h, jnp.ones((1, 2)), jnp.eye(2, 3), w, jnp.ones((3, 4, 2)), top_k=2
        ... )
        >>> out.shape, logits.shape
        ((1, 2), (1, 3))
    """
    call = SimpleNamespace(**locals(), function="moe_block_tkg")
    added = inp if residual is None else inp + residual
    rows = added.reshape(-1, added.shape[-1])
    x = neuron_reduce_macro_kernel(rows, gamma[0], **norm_of(call))
    logits, index, affinities = router_topk(
        x.astype(router_dtype(call)),
        router_weights.astype(router_dtype(call)),
        router_bias,
        **router_of(call),
    )
    shared = has_shared_expert(call)
    # What a shared expert is added to is not rounded before.
    wide = accumulator(x.dtype) if shared else None
    experts = experts_of(call) | dict(output_dtype=wide)
    out = moe_tkg(x, expert_affinities=affinities, expert_index=index, **experts)
    out = _with_shared_expert(call, x, out) if shared else out
    outs = [out] if skip_router_logits else [out, logits]
    return tuple(outs if residual is None else [*outs, added])


def _with_shared_expert(
    call: SimpleNamespace, x: jax.Array, routed: jax.Array
) -> jax.Array:
    """The routed sum and what the shared expert gives, rounded once."""
    return mlp_fused_add_kernel(
        x, mlp_out=jnp.zeros_like(x), attn_out=routed, **shared_of(call)
    )
