"""The forward functions: `moe_cte` and `blockwise_mm_baseline_shard_hidden`."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from neuronjax.primitives import contracts
from neuronjax.primitives.blockwise_mm import (  # noqa: F401  enter the rows
    chip_rules,
    cte_rules,
    mx_rules,
    value_rules,
)
from neuronjax.primitives.blockwise_mm.cte_rules import returned
from neuronjax.primitives.blockwise_mm.emitter import emit
from neuronjax.primitives.blockwise_mm.facts import CTE, HIDDEN_SHARD, facts
from neuronjax.primitives.blockwise_mm.spec import (
    MoECTESpec,
    QuantizationConfig,
    SkipMode,
)
from neuronjax.primitives.options import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
)

Hidden = Float[Array, "rows d_model"]
Weight = Shaped[Array, "num_experts ..."]
Ids = Int[Array, " slots"]
Blocks = Int[Array, "..."]
Results = Array | tuple[Array, ...]


@contracts.contracted(facts)
def moe_cte(
    hidden_states: Hidden,
    expert_affinities_masked: Float[Array, "rows_experts 1"],
    gate_up_proj_weight: Weight,
    down_proj_weight: Weight,
    token_position_to_id: Ids,
    block_to_expert: Blocks | None,
    block_size: int,
    spec: MoECTESpec | MoECTEImplementation | str,
    conditions: Int[Array, " flags"] | None = None,
    gate_and_up_proj_bias: Float[Array, "num_experts ..."] | None = None,
    down_proj_bias: Float[Array, "num_experts d_model"] | None = None,
    quantization_config: QuantizationConfig | Mapping[str, Any] | None = None,
    gate_up_activations_T: Float[Array, "blocks 2 d_ff slots"] | None = None,
    down_activations: Float[Array, "blocks slots d_model"] | None = None,
    activation_function: ActFnType | str = ActFnType.SiLU,
    skip_dma: SkipMode | None = None,
    compute_dtype: DTypeLike | None = None,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode | str = "POST_SCALE",
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    *,
    checkpoint: str = "store",
) -> Results:
    r"""The experts of a mixture over blocks of tokens: prefill and training.

    Block `b` of `B` slots belongs to expert $e_b$; slot `s` serves one token or none.

    $$x_s = h_{t(s)}, \quad g = \mathrm{clamp}(x W_g s_g + b_g), \quad
      u = \mathrm{clamp}(x W_u s_u + b_u), \quad
      y = (\mathrm{act}(g) \cdot u)\, W_d s_d + b_d$$

    $$\mathrm{out}_t = \sum_{s:\, t(s) = t} a_{t,\, e(s)}\, y_s$$

    That is `POST_SCALE`; `PRE_SCALE` puts $a x$ for $x$, and `NO_SCALE` leaves $a$ out.

    A slot without a token reads a zero row, adds nothing and has no gradient, whatever
    the padding row holds. Blocks without one are not visited. The order of blocks and
    which implementation is named change rounding alone.

    Args:
        hidden_states: `h`, `[T + 1, H]` whose last row is padding, or `[T, H]` with
            `skip_token`; any floating dtype. Block-scaled weights take its columns
            swizzled, in order `(q, t, p)` of `[4, H/512, 128]`.
        expert_affinities_masked: `a`, `[rows * E, 1]`, row-major, token then expert.
        gate_up_proj_weight: `[E, H, 2, I]`, the gate first; fp8 too. Block-scaled:
            containers `[E, 128, 2, H/512, I]`.
        down_proj_weight: `[E, I, H]`; block-scaled `[E, Ip, ceil(I/512), H]`.
        token_position_to_id: `[N * B]`: the token of each slot; an empty one holds `T`,
            or -1 with `skip_token`. `neuronjax.route_to_blocks` makes these lists.
        block_to_expert: `[N]` or `[N, 1]`: the expert of each block. Dropping has block
            `e` for expert `e`: it is not read there, and may be None.
        block_size: `B`.
        spec: a `MoECTESpec`, or the implementation alone: `shard_on_block`,
            `shard_on_i`, `shard_on_i_hybrid`, `shard_on_i_dropping`,
            `shard_on_block_mx`, `shard_on_i_mx` or `shard_on_i_mx_hybrid`.
        conditions: at least `N` flags, ones and then zeros: blocks from the first zero
            on are not visited, but for the first `num_static_block`.
        gate_and_up_proj_bias: `[E, 2, I]`; block-scaled `[E, Ip, 2, ceil(I/512), 4]`.
        down_proj_bias: `[E, H]`, added before the affinity in every mode.
        quantization_config: the scales of fp8 or block-scaled weights, a
            `QuantizationConfig` or a mapping of its fields; both or none.
        gate_up_activations_T: a buffer `[N, 2, I, B]`: given, the stored gate and up
            are returned too. Its shape and dtype are checked, its values never read.
        down_activations: the same for `[N, B, H]`.
        activation_function: `SiLU`, `Swish` (`x sigmoid(1.702 x)`), `GELU` or
            `GELU_Tanh_Approx`.
        skip_dma: a `SkipMode`; None for neither.
        compute_dtype: the dtype that factors of products are rounded to; None for that
            of the hidden states and weights, the wider where they differ. (The vendor's
            default is bfloat16, which would round float32 operands unasked.) Sums are
            float32, with float64 operands float64.
        is_tensor_update_accumulating: False, for one expert a token: the last slot that
            names a token has it, and any before are empty.
        expert_affinities_scaling_mode: `POST_SCALE`, `PRE_SCALE`, `NO_SCALE`, or
            `PRE_SCALE_DELAYED`, which is `PRE_SCALE`.
        gate_clamp_upper_limit: `g` is at most this, then at least the lower limit.
        gate_clamp_lower_limit: see `gate_clamp_upper_limit`.
        up_clamp_upper_limit: the same for `u`.
        up_clamp_lower_limit: the same for `u`.
        checkpoint: `"store"` keeps `g`, `u` and `y` for the backward, which multiplies
            nothing twice; for `"recompute"` it computes them again.

    Returns:
        `out`, `[rows, H]`, dtype of `hidden_states`; its padding row is zero. With
        `checkpoint_activation`, and always for dropping, `(out, gate and up [N, 2, I,
        B], y [N, B, H])`: after scales, biases and clamps, `y` before the affinity, in
        the same dtype.
        `expert_affinity_multiply_on_I` has no `y`. Blocks that are not visited hold
        zeros there. The checkpoint names are `blockwise_mm_out`, `blockwise_mm_gate_up`
        and `blockwise_mm_down`; the backward macro is `BlockwiseMMBwd`. The gradient of
        an expert without tokens is exactly zero. Quantized weights and all scales are
        constants.

    Raises:
        ValueError: shapes, dtypes or options do not fit; or ids, experts or conditions
            whose values are known while tracing lie outside. Traced ones outside are
            empty slots. The chip's limits are reported by `neuronjax.can`.

    Source:
        Gale et al. 2022, MegaBlocks, https://arxiv.org/abs/2211.15841, section 4;
        aws-neuron/nki-library, `core/moe/moe_cte/moe_cte.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> h = jnp.array([[1.0], [2.0]])
        >>> w = jnp.ones((2, 1, 2, 1)), jnp.array([[[1.0]], [[10.0]]])
        >>> ids, experts = jnp.array([1, 0]), jnp.array([0, 1])
        >>> skip = SkipMode(skip_token=True)
        >>> affinity = jnp.ones((4, 1))
        >>> moe_cte(h, affinity, *w, ids, experts, 1, "shard_on_i", skip_dma=skip)
        Array([[7.310586],
               [3.523188]], dtype=float32)
    """
    return _results(SimpleNamespace(**locals(), function=CTE))


@contracts.contracted(facts)
def blockwise_mm_baseline_shard_hidden(
    hidden_states: Hidden,
    expert_affinities_masked: Float[Array, "rows_experts 1"],
    gate_up_proj_weight: Weight,
    down_proj_weight: Weight,
    block_size: int,
    token_position_to_id: Ids,
    block_to_expert: Blocks,
    gate_up_activations_T: Float[Array, "blocks 2 d_ff slots"] | None = None,
    down_activations: Float[Array, "blocks slots d_model"] | None = None,
    skip_dma: SkipMode | None = None,
    compute_dtype: DTypeLike | None = None,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode | str = "POST_SCALE",
    *,
    checkpoint: str = "store",
) -> Results:
    r"""`moe_cte` by the name of the kernel whose cores share the hidden axis.

    $$\mathrm{out}_t = \sum_{s:\, t(s) = t} a_{t,\, e(s)}\,
      (\mathrm{silu}(x_s W_g) \cdot x_s W_u)\, W_d$$

    The same values: SiLU, without biases, clamps and quantized weights. On a mesh
    `neuronjax.sharding.sharded_moe_cte(shard_on="hidden")` shares that axis.

    Args:
        hidden_states: as in `moe_cte`; so are all others.
        expert_affinities_masked: `[rows * E, 1]`.
        gate_up_proj_weight: `[E, H, 2, I]`.
        down_proj_weight: `[E, I, H]`.
        block_size: `B`.
        token_position_to_id: `[N * B]`.
        block_to_expert: `[N]` or `[N, 1]`.
        gate_up_activations_T: given, the stored gate and up are returned too.
        down_activations: given, the stored down projections are returned too.
        skip_dma: a `SkipMode`; None for neither.
        compute_dtype: the dtype of factors.
        is_tensor_update_accumulating: False overwrites.
        expert_affinities_scaling_mode: where affinities multiply.
        checkpoint: `"store"` or `"recompute"`.

    Returns:
        `out`, `[rows, H]`; with buffers a tuple of `out` and what they ask for.

    Raises:
        ValueError: as `moe_cte`.

    Source:
        aws-neuron/nki-library, `experimental/moe/forward/bwmm_shard_on_H.py`; Gale et
        al. 2022, MegaBlocks, https://arxiv.org/abs/2211.15841, section 4.

    Example:
        >>> import jax.numpy as jnp
        >>> h, one = jnp.array([[1.0], [0.0]]), jnp.ones((1, 1, 1))
        >>> out = blockwise_mm_baseline_shard_hidden(
        ...     h,
        ...     jnp.full((2, 1), 0.5),
        ...     jnp.ones((1, 1, 2, 1)),
        ...     2 * one,
        ...     2,
        ...     jnp.array([0, 1]),
        ...     jnp.array([0]),
        ... )
        >>> [round(float(x), 4) for x in out[:, 0]]  # 0.5 * 2 * silu(1), and padding
        [0.7311, 0.0]
    """
    return _results(SimpleNamespace(**locals(), function=HIDDEN_SHARD))


def _results(call: SimpleNamespace) -> Results:
    """The output, and the stored activations that a call returns."""
    wanted = returned(call)
    outs = emit(call, any(wanted))
    stored = zip(("gate_up", "down"), wanted, strict=True)
    found = tuple(outs[name] for name, is_wanted in stored if is_wanted)
    return (outs["out"], *found) if found else outs["out"]
