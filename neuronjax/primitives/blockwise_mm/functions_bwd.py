"""The backward from stored activations: `blockwise_mm_bwd`."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from neuronjax.kernels.blockwise_mm.operands import (
    Operands,
    Options,
    factor_dtype,
)
from neuronjax.primitives import contracts
from neuronjax.primitives.blockwise_mm import (  # noqa: F401  enter the rows
    bwd_rules,
    chip_rules,
    cte_rules,
    value_rules,
)
from neuronjax.primitives.blockwise_mm.emitter import config_of, operands
from neuronjax.primitives.blockwise_mm.facts import BWD, facts
from neuronjax.primitives.blockwise_mm.macro import blockwise_mm_bwd as backward_macro
from neuronjax.primitives.blockwise_mm.names import BACKWARD
from neuronjax.primitives.blockwise_mm.spec import ClampLimits, SkipMode
from neuronjax.primitives.options import (
    ActFnType,
    AffinityOption,
    KernelTypeOption,
    ShardOption,
    member,
)

_GRADS = ("hidden", "affinity", "gate_up_w", "down_w")
_BIASES = ("gate_up_b", "down_b")
_SHARDS = {
    ShardOption.AUTO: "hidden",
    ShardOption.SHARD_ON_HIDDEN: "hidden",
    ShardOption.SHARD_ON_INTERMEDIATE: "intermediate",
}


@contracts.contracted(facts)
def blockwise_mm_bwd(
    hidden_states: Float[Array, "rows d_model"],
    expert_affinities_masked: Float[Array, "rows_experts 1"],
    gate_up_proj_weight: Float[Array, "num_experts d_model 2 d_ff"],
    down_proj_weight: Float[Array, "num_experts d_ff d_model"],
    gate_up_proj_act_checkpoint_T: Float[Array, "blocks 2 d_ff slots"],
    down_proj_act_checkpoint: Float[Array, "blocks slots d_model"] | None,
    token_position_to_id: Int[Array, " slots"],
    block_to_expert: Int[Array, "..."] | None,
    output_hidden_states_grad: Float[Array, "rows d_model"],
    block_size: int,
    skip_dma: SkipMode | None = None,
    compute_dtype: DTypeLike | None = None,
    is_tensor_update_accumulating: bool = True,
    shard_option: ShardOption | str = ShardOption.SHARD_ON_HIDDEN,
    affinity_option: AffinityOption | str = AffinityOption.AFFINITY_ON_H,
    kernel_type_option: KernelTypeOption | str = KernelTypeOption.DROPLESS,
    clamp_limits: ClampLimits | None = None,
    bias: bool = False,
    activation_type: ActFnType | str = ActFnType.SiLU,
    block_tile_size: int | None = None,
    *,
    axis: str | None = None,
) -> tuple[Array, ...]:
    r"""The gradients of `moe_cte` from what it stored; no product is computed again.

    With $D$ the rows of the output's gradient, `a` the affinities and $e$ a block's
    expert:

    $$da = \textstyle\sum_h D\, y, \quad dY = a D, \quad m = \mathrm{act}(g)\, u, \quad
      dW_d \mathrel{+}= m^T dY, \quad dM = dY\, W_d^T$$

    $$dU = dM\, \mathrm{act}(g)\, [l_u < u < h_u], \quad
      dG = dM\, u\, \mathrm{act}'(g)\, [l_g < g < h_g]$$

    $$dW_{gu} \mathrel{+}= x^T [dG, dU], \quad dX \mathrel{+}= [dG, dU]\, W_{gu}^T,
      \quad db_d \mathrel{+}= \textstyle\sum_B dY, \quad
      db_{gu} \mathrel{+}= \textstyle\sum_B [dG, dU]$$

    Args:
        hidden_states: as in `moe_cte`, `[rows, H]`.
        expert_affinities_masked: `[rows * E, 1]`.
        gate_up_proj_weight: `[E, H, 2, I]`.
        down_proj_weight: `[E, I, H]`.
        gate_up_proj_act_checkpoint_T: `g` and `u` after scales, biases and clamps,
            `[N, 2, I, B]`.
        down_proj_act_checkpoint: `y`, its bias included, before the affinity,
            `[N, B, H]`; None with `AFFINITY_ON_I`.
        token_position_to_id: `[N * B]`.
        block_to_expert: `[N]` or `[N, 1]`; for `DROPPING` not read, and may be None.
        output_hidden_states_grad: the cotangent of the output, `[rows, H]`.
        block_size: `B`.
        skip_dma: a `SkipMode`; None for neither.
        compute_dtype: the dtype that factors of products are rounded to, and that of
            the gradients of biases; None for that of the operands.
        is_tensor_update_accumulating: whether the forward added the rows of a token;
            False: its last slot alone has gradients.
        shard_option: what the cores of `axis` have parts of: `SHARD_ON_HIDDEN` (and
            `AUTO`): operands split over H; `SHARD_ON_INTERMEDIATE`: over I;
            `BASELINE_LNC1`: one core, without `axis`. Without `axis` one device has
            them whole, and all are the same.
        affinity_option: `AFFINITY_ON_H`; `AFFINITY_ON_I` for a forward with
            `expert_affinity_multiply_on_I`, where `da = sum_i dM m` before the
            affinity.
        kernel_type_option: `DROPLESS`; `DROPPING` has block `e` for expert `e`.
        clamp_limits: the forward's `ClampLimits`, up's first. Derivatives are zero
            where a stored value reaches its limit, rounded as the value is.
        bias: return the gradients of the biases too.
        activation_type: the forward's activation, as in `moe_cte`.
        block_tile_size: visit blocks in tiles of so many slots, a divisor of `B`: less
            memory a step, more steps; None for whole blocks.
        axis: inside `jax.shard_map`, the mesh axis of the cores that share the work,
            each with its part of the operands. H costs one all-reduce a block, of dM
            and da together, I one of the hidden gradient at the end.

    Returns:
        `(d_hidden [rows, H], d_affinity [rows * E, 1], d_gate_up_weight [E, H, 2, I],
        d_down_weight [E, I, H])` in the dtypes of their operands, then with `bias`
        `[E, 2, I]` and `[E, H]` in the compute dtype. Weights sum over blocks in
        float32 (float64 for float64). What no slot names is exactly zero.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or ids or experts that are
            known while tracing lie outside. The chip's limits are reported by
            `neuronjax.can`.

    Source:
        aws-neuron/nki-library, `experimental/moe/bwd/blockwise_mm_backward.py`; the
        equations are the transpose of `moe_cte`'s.

    Example:
        One token, one expert, whose gate is so large that SiLU is the identity:
        `y = 2 g u = 160` was stored, and `da` is it.

        >>> import jax.numpy as jnp
        >>> x, one = jnp.ones((1, 1)), jnp.ones((1, 1, 1))
        >>> gate_up = jnp.array([80.0, 1.0]).reshape(1, 2, 1, 1)
        >>> weights = gate_up.reshape(1, 1, 2, 1), 2 * one
        >>> grads = blockwise_mm_bwd(
        ...     x,
        ...     x,
        ...     *weights,
        ...     gate_up,
        ...     160 * one,
        ...     jnp.array([0]),
        ...     jnp.array([0]),
        ...     x,
        ...     1,
        ...     SkipMode(skip_token=True),
        ... )
        >>> [float(grad.max()) for grad in grads]
        [320.0, 160.0, 160.0, 80.0]
    """
    call = SimpleNamespace(function=BWD, **locals())
    ops, given, config = backward_of(call)
    if axis is not None:
        config |= dict(shard=_SHARDS[member(ShardOption, shard_option)], axis=axis)
    grads = backward_macro(*ops, *given, name=BACKWARD, **config)
    return in_given_dtypes(ops, grads, config)


def backward_of(
    call: SimpleNamespace,
) -> tuple[Operands, tuple[Array | None, ...], dict[str, Any]]:
    """The macro's operands, what stands behind them, and its config."""
    ops, stored, config = _in_tiles(call, operands(call), config_of(call))
    grads = _GRADS + (_BIASES if call.bias else ())
    cotangents = (call.output_hidden_states_grad, None, None)
    return ops, (*stored, *cotangents), config | dict(grads=grads)


def in_given_dtypes(
    ops: Operands, grads: tuple[Array, ...], config: dict[str, Any]
) -> tuple[Array, ...]:
    """The gradients, those of the biases in the dtype of factors."""
    dtype = factor_dtype(ops, Options.of(config))
    return *grads[:4], *(x.astype(dtype) for x in grads[4:])


def _in_tiles(call: SimpleNamespace, ops: Operands, config: dict[str, Any]):
    """The operands, what is stored and the config, with blocks cut into tiles."""
    gate_up, down = call.gate_up_proj_act_checkpoint_T, call.down_proj_act_checkpoint
    size, tile = config["block_size"], call.block_tile_size
    if tile is None or int(tile) == size:
        return ops, (gate_up, down), config
    tile, count = int(tile), size // int(tile)
    blocks, _, d_ff, _ = gate_up.shape
    tiles = gate_up.reshape(blocks, 2, d_ff, count, tile)
    gate_up = jnp.moveaxis(tiles, 3, 1).reshape(blocks * count, 2, d_ff, tile)
    if down is not None:
        down = down.reshape(blocks * count, tile, -1)
    ops = ops._replace(block_expert=jnp.repeat(ops.block_expert, count))
    return ops, (gate_up, down), config | dict(block_size=tile)
