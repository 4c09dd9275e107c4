"""The emitter of `BlockwiseMMBwd`."""

from types import SimpleNamespace
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from neuronjax.kernels.blockwise_mm.operands import Operands
from neuronjax.primitives import contracts
from neuronjax.primitives.blockwise_mm.emitter import config_of, operands
from neuronjax.primitives.blockwise_mm.facts import KERNEL_BWD, facts
from neuronjax.primitives.blockwise_mm.macro import (
    blockwise_mm_bwd as backward_macro,
)
from neuronjax.primitives.blockwise_mm.macro import live_operands
from neuronjax.primitives.blockwise_mm.names import BACKWARD
from neuronjax.primitives.options import (
    ActFnType,
    ExpertAffinityScaleMode,
    QuantizationType,
)


@contracts.contracted(facts)
def blockwise_mm_bwd_kernel(
    hidden: Float[Array, "rows d_model"],
    affinity: Float[Array, "rows_experts 1"],
    gate_up_w: Shaped[Array, "num_experts ..."],
    down_w: Shaped[Array, "num_experts ..."],
    token_id: Int[Array, " slots"],
    block_expert: Int[Array, "..."],
    gate_up_b: Float[Array, "num_experts ..."] | None = None,
    down_b: Float[Array, "num_experts d_model"] | None = None,
    gate_up_scale: Shaped[Array, "..."] | None = None,
    down_scale: Shaped[Array, "..."] | None = None,
    conditions: Int[Array, " flags"] | None = None,
    gate_up: Float[Array, "blocks 2 d_ff slots"] | None = None,
    down: Float[Array, "blocks slots d_model"] | None = None,
    d_out: Float[Array, "rows d_model"] | None = None,
    d_gate_up: Float[Array, "blocks 2 d_ff slots"] | None = None,
    d_down: Float[Array, "blocks slots d_model"] | None = None,
    *,
    block_size: int,
    grads: tuple[str, ...] | None = None,
    scaling: ExpertAffinityScaleMode | str = "POST_SCALE",
    activation: ActFnType | str = "SiLU",
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    skip_token: bool = False,
    accumulate: bool = True,
    checkpoint: str = "store",
    on_intermediate: bool = False,
    compute_dtype: DTypeLike | None = None,
    quantization: QuantizationType | str = "NONE",
    weight_format: Any = None,
    num_static: int = 0,
    shard: str | None = None,
    axis: str | None = None,
    **hints: Any,
) -> tuple[Array, ...]:
    """Emits `BlockwiseMMBwd`: the gradients of `blockwise_mm_kernel`.

    Args:
        hidden: as in `blockwise_mm_kernel`; so are the others that it has too. With
            `shard="columns"` the own columns of `H`.
        affinity: `[rows * E, 1]`.
        gate_up_w: `[E, H, 2, I]`, or containers; as `hidden` with `"columns"`.
        down_w: `[E, I, H]`, or containers.
        token_id: `[N * B]`.
        block_expert: `[N]`.
        gate_up_b: `[E, 2, I]`; read where gate and up are computed again.
        down_b: `[E, H]`; the same.
        gate_up_scale: `[E or 1, 1, 2 I]`, or those of containers.
        down_scale: `[E or 1, 1, H]`, or those of containers.
        conditions: at least `N` flags.
        gate_up: what the forward stored, `[N, 2, I, B]`; None with `"recompute"`.
        down: `[N, B, H]`; None with `"recompute"` or `on_intermediate`.
        d_out: the cotangent of `out`, `[rows, H]`. It must be given.
        d_gate_up: the cotangent of `gate_up`; None for zero.
        d_down: the cotangent of `down`; None for zero.
        block_size: `B`.
        grads: the operands whose gradients are computed, of `hidden`, `affinity`,
            `gate_up_w`, `down_w`, `gate_up_b` and `down_b`; None for all that are
            given and floating. An absent bias may be named.
        scaling: as in `blockwise_mm_kernel`; so are all others.
        activation: of the gate.
        gate_clamp_upper_limit: the forward's.
        gate_clamp_lower_limit: the forward's.
        up_clamp_upper_limit: the forward's.
        up_clamp_lower_limit: the forward's.
        skip_token: -1 is the empty slot.
        accumulate: whether the forward added the rows of a token.
        checkpoint: `"store"`, or `"recompute"`: compute gate, up and down again.
        on_intermediate: affinities multiplied what the down weight met.
        compute_dtype: the dtype of factors.
        quantization: `NONE`, `ROW` or `MX`.
        weight_format: the format of containers.
        num_static: the first blocks, which `conditions` do not close.
        shard: `"hidden"`, `"intermediate"`, or `"columns"`: each core computes the
            gradients of its columns of `H`, and nothing is exchanged.
        axis: the mesh axis of the cores that share.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        One gradient for each name of `grads`, in that order, in the shape and dtype
        of its operand; of an absent bias in that of sums.
    """
    if shard is not None:
        hints |= dict(shard=shard, axis=axis)
    if num_static:
        hints |= dict(num_static=int(num_static))
    call = SimpleNamespace(function=KERNEL_BWD, **locals())
    ops: Operands = operands(call)
    wrt = live_operands(ops) if grads is None else tuple(grads)
    given = gate_up, down, d_out, d_gate_up, d_down
    return backward_macro(*ops, *given, name=BACKWARD, grads=wrt, **config_of(call))
