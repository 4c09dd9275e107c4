"""`moe_tkg`: a decode step's experts by aws-neuron/nki-library's name and arguments."""

from types import SimpleNamespace
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from neuronjax.primitives import contracts
from neuronjax.primitives.expert_mlps.emitter import emit
from neuronjax.primitives.expert_mlps.facts import PUBLIC, facts
from neuronjax.primitives.options import ActFnType, ExpertAffinityScaleMode, refuses


@refuses(output_in_sbuf=False)
@contracts.contracted(facts)
def moe_tkg(
    hidden_input: Shaped[Array, "..."],
    expert_gate_up_weights: Shaped[Array, "experts ..."],
    expert_down_weights: Shaped[Array, "experts ..."],
    expert_affinities: Float[Array, "tokens num_experts"] | None,
    expert_index: Int[Array, "tokens k"] | None,
    is_all_expert: bool,
    rank_id: Int[Array, "1 1"] | int | None = None,
    expert_gate_up_bias: Float[Array, "experts ..."] | None = None,
    expert_down_bias: Float[Array, "experts d_model"] | None = None,
    expert_gate_up_weights_scale: Shaped[Array, "experts ..."] | None = None,
    expert_down_weights_scale: Shaped[Array, "experts ..."] | None = None,
    hidden_input_scale: UInt8[Array, "..."] | None = None,
    gate_up_input_scale: Array | None = None,
    down_input_scale: Array | None = None,
    mask_unselected_experts: bool = False,
    expert_affinities_eager: Array | None = None,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode | str = "NO_SCALE",
    activation_fn: ActFnType | str = ActFnType.SiLU,
    output_dtype: DTypeLike | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    output_in_sbuf: bool = False,
    is_all_expert_dynamic: bool = False,
    block_size: int | None = None,
    weight_dtype: Any = None,
) -> jax.Array:
    r"""The feed-forward experts of a decode step: few tokens, each by its experts.

    $$g = \mathrm{clamp}(x W_g^e + b_g^e), \quad u = \mathrm{clamp}(x W_u^e + b_u^e),
      \quad y_e = (\mathrm{act}(g) \cdot u)\, W_d^e + b_d^e$$

    Selective, each token goes to the experts that it names; an expert named twice
    counts twice, and an index outside of the experts (`router_topk` gives padding
    tokens `E`) names none:

    $$\mathrm{out}_t = \sum_k a_{t, \mathrm{idx}_{tk}}\, y_{\mathrm{idx}_{tk}}(x_t)$$

    With `is_all_expert` every local expert sees every token; local are the experts
    `rank_id * E_L` to `(rank_id + 1) * E_L`:

    $$\mathrm{out}_t = \sum_{e\ \mathrm{local}} a_{te}\, y_e(x_t)$$

    Under `NO_SCALE` every `a` is 1, in the second form for experts that no token names
    too.

    Args:
        hidden_input: `[T, H]`; for block-scaled weights with columns in the order of
            `neuronjax.swizzle_hidden`, or, with `hidden_input_scale`, uint32 containers
            `[128, H/512, T]` of float8_e4m3fn.
        expert_gate_up_weights: `[E_L, H, 2, I]`, 0 the gate, 1 up: floats, float8_e4m3
            or float8_e4m3fn; or block-scaled, containers `[E_L, 128, 2, H/512, I]`.
        expert_down_weights: `[E_L, I, H]`, or containers `[E_L, Ip, ceil(I/512), H]`,
            `Ip` 128, or a multiple of 8 from `I/4` on for `I < 512`.
        expert_affinities: `[T, E]`, of all experts; not read under `NO_SCALE`.
        expert_index: `[T, K]` integers, numbers among all experts; with
            `is_all_expert` read for `mask_unselected_experts` alone.
        is_all_expert: which of the two forms.
        rank_id: `[1, 1]` integer, may be traced, or a number: whose experts these are.
            A selective call without it holds all experts. Under jit, an expert beyond
            the affinities has affinity 0.
        expert_gate_up_bias: `[E_L, 2, I]`; block-scaled `[E_L, Ip, 2, ceil(I/512), 4]`.
        expert_down_bias: `[E_L, H]`.
        expert_gate_up_weights_scale: fp8 weights: float32 `[E_L, 2, I]`, one a column;
            activations are not quantized then. Block-scaled: uint8
            `[E_L, 16, 2, H/512, I]`.
        expert_down_weights_scale: float32 `[E_L, H]`, or uint8
            `[E_L, Ip/8, ceil(I/512), H]`.
        hidden_input_scale: `[16, H/512, T]` uint8, of a quantized `hidden_input`.
        gate_up_input_scale: refused: no path quantizes statically.
        down_input_scale: refused alike.
        mask_unselected_experts: with `is_all_expert`, make affinities of experts that
            the token does not name 0. Selective, they are not read anyway.
        expert_affinities_eager: refused: affinities are those of `expert_affinities`.
        expert_affinities_scaling_mode: `NO_SCALE` or `POST_SCALE`.
        activation_fn: `SiLU`, `GELU`, `GELU_Tanh_Approx`, or `Swish`
            (`x sigmoid(1.702 x)`).
        output_dtype: dtype of the result; None for that of `hidden_input`.
        gate_clamp_upper_limit: `g` is at most this, and at least the lower limit.
        gate_clamp_lower_limit: see `gate_clamp_upper_limit`.
        up_clamp_upper_limit: the same for `u`.
        up_clamp_lower_limit: the same for `u`.
        output_in_sbuf: refuses; tiles go to the emitter.
        is_all_expert_dynamic: leave out tokens of affinity 0, which changes no value
            and no gradient: time then follows the tokens that an expert has. Under
            `NO_SCALE` none is left out.
        block_size: how many tokens go through at once then.
        weight_dtype: the format of block-scaled weights, as in
            `neuronjax.quantize_to_mx`; that of their container unless named,
            float4_e2m1fn in uint16 and float8_e4m3fn in uint32.

    Returns:
        `[T, H]`, summed in float32 (float64 for float64) and rounded once. Its
        checkpoint name is `expert_mlps_out`. Gradients flow to activations, floating
        weights, biases and affinities: `d a` is the expert's own output, at affinity 0
        too. Quantized weights and scales are constants, and a rounding to blocks passes
        a gradient straight through. A weight of an expert without tokens gets exactly
        0.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`T` 128 unless `is_all_expert`, and those of its paths) are reported
            by `neuronjax.can` and do not hold here.
        NotImplementedError: `output_in_sbuf` is set.

    Source:
        aws-neuron/nki-library, `core/moe/moe_tkg`; Shazeer et al. 2017,
        https://arxiv.org/abs/1701.06538, equation 1.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.ones((1, 1)), jnp.arange(1.0, 3.0)
        >>> out = moe_tkg(
        ...     x,
        ...     jnp.ones((2, 1, 2, 1)),
        ...     w[:, None, None],
        ...     jnp.array([[0.5, 0.25]]),
        ...     jnp.array([[1]]),
        ...     is_all_expert=False,
        ...     expert_affinities_scaling_mode="POST_SCALE",
        ... )
        >>> round(float(out[0, 0]), 3)  # 0.25 * 2 * silu(1)
        0.366
    """
    return emit(SimpleNamespace(**locals(), function=PUBLIC))
