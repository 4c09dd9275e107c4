"""How a call becomes the macro `BlockwiseMM`: its operands and config; the emitter."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from neuronjax.kernels.blockwise_mm.operands import Operands
from neuronjax.primitives import contracts
from neuronjax.primitives.blockwise_mm import (  # noqa: F401  enter the rows
    cte_rules,
    kernel_rules,
    mx_rules,
    value_rules,
)
from neuronjax.primitives.blockwise_mm.facts import (
    CTE,
    INTEGERS,
    KERNEL,
    LIMITS,
    activation_of,
    facts,
    implementation,
    is_dropping,
    limits_of,
    multiplies_on_intermediate,
    on_intermediate_of,
    operands_of,
    quantization,
    scaling_of,
    skip_of,
    weight_dtype_of,
)
from neuronjax.primitives.blockwise_mm.macro import blockwise_mm
from neuronjax.primitives.blockwise_mm.names import FORWARD
from neuronjax.primitives.blockwise_mm.spec import ON_BLOCKS, spec_of
from neuronjax.primitives.known import in_int32
from neuronjax.primitives.mx.formats import weight_format as format_of
from neuronjax.primitives.options import (
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    QuantizationType,
    member,
)

_DELAYED = ExpertAffinityScaleMode.PRE_SCALE_DELAYED


def operands(call: SimpleNamespace) -> Operands:
    """The macro's operands of a call that keeps the rules."""
    found = operands_of(call)
    size = call.block_size
    blocks = found["token_id"].shape[0] // int(size)
    if is_dropping(call):
        found["block_expert"] = jnp.arange(blocks, dtype=jnp.int32)
    beyond = dict(token_id=found["hidden"].shape[0], block_expert=1 << 30)
    for role in INTEGERS:
        if found[role] is not None:
            found[role] = in_int32(found[role].reshape(-1), -1, beyond.get(role, 1))
    return Operands(**{role: found[role] for role in Operands._fields})


def config_of(call: SimpleNamespace) -> dict[str, Any]:
    """The macro's config bag of a call that keeps the rules."""
    scaling, activation = scaling_of(call), activation_of(call)
    scaling = ExpertAffinityScaleMode.PRE_SCALE if scaling is _DELAYED else scaling
    limits = [None if x is None else float(x) for x in limits_of(call)]
    dtype = call.compute_dtype
    accumulates = getattr(call, "is_tensor_update_accumulating", None)
    return dict(
        block_size=int(call.block_size),
        scaling=scaling.name,
        activation=activation.name,
        **dict(zip(LIMITS, limits, strict=True)),
        skip_token=bool(skip_of(call).skip_token),
        accumulate=bool(getattr(call, "accumulate", accumulates)),
        on_intermediate=multiplies_on_intermediate(call),
        compute_dtype=None if dtype is None else jnp.dtype(dtype).name,
        checkpoint=getattr(call, "checkpoint", "store"),
        **_quantization(call),
        **_hints(call),
    )


def _quantization(call: SimpleNamespace) -> dict[str, Any]:
    found = operands_of(call)
    kind = quantization(call, found)
    if kind is not QuantizationType.MX:
        return dict(quantization=kind.name)
    fmt = format_of(found["gate_up_w"], weight_dtype_of(call))
    assert fmt is not None
    return dict(quantization="MX", weight_format=fmt.name)


def _hints(call: SimpleNamespace) -> dict[str, Any]:
    """What a call says of the chip: it changes no value, but for `num_static`."""
    hints = dict(getattr(call, "hints", {}))
    if skip_of(call).skip_weight:
        hints["skip_weight"] = True
    if call.function != CTE:
        return hints
    kind, spec = implementation(call), spec_of(call.spec)
    assert spec is not None
    hints["implementation"] = kind.name
    if kind in ON_BLOCKS and spec.shard_on_block is not None:
        given = vars(spec.shard_on_block)
        strategy = member(BlockShardStrategy, given["block_sharding_strategy"])
        hints |= given | dict(block_sharding_strategy=strategy.name)
    static = on_intermediate_of(call).num_static_block
    return hints | ({} if static is None else dict(num_static=int(static)))


def emit(call: SimpleNamespace, returned: bool) -> dict[str, Array]:
    """Binds `BlockwiseMM`; its outputs by name: `out`, and what it stores."""
    config = config_of(call) | dict(returned=returned)
    outs = blockwise_mm(*operands(call), name=FORWARD, **config)
    return dict(zip(("out", "gate_up", "down"), outs, strict=False))


@contracts.contracted(facts)
def blockwise_mm_kernel(
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
    *,
    block_size: int,
    scaling: ExpertAffinityScaleMode | str = "POST_SCALE",
    activation: Any = "SiLU",
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    skip_token: bool = False,
    accumulate: bool = True,
    checkpoint: str = "store",
    returned: bool = True,
    on_intermediate: bool = False,
    compute_dtype: DTypeLike | None = None,
    quantization: QuantizationType | str = "NONE",
    weight_format: Any = None,
    num_static: int = 0,
    shard: str | None = None,
    axis: str | None = None,
    **hints: Any,
) -> tuple[Array, ...]:
    """Emits `BlockwiseMM`: blocks of tokens through their experts.

    Inside `jax.shard_map` the cores of a mesh axis can share the work: `shard` says
    which axis of the weights each has its part of.

    Args:
        hidden: `[rows, H]`; with `shard="hidden"` the own columns.
        affinity: `[rows * E, 1]`.
        gate_up_w: `[E, H, 2, I]`, or containers.
        down_w: `[E, I, H]`, or containers.
        token_id: `[N * B]`, the row of each slot.
        block_expert: `[N]`, the expert of each block.
        gate_up_b: `[E, 2, I]`.
        down_b: `[E, H]`.
        gate_up_scale: `[E or 1, 1, 2 I]`, or those of containers.
        down_scale: `[E or 1, 1, H]`, or those of containers.
        conditions: at least `N` flags.
        block_size: `B`.
        scaling: where affinities multiply.
        activation: of the gate.
        gate_clamp_upper_limit: the gate is at most this.
        gate_clamp_lower_limit: and at least this.
        up_clamp_upper_limit: the same for up.
        up_clamp_lower_limit: the same for up.
        skip_token: -1 is the empty slot, and no row is padding.
        accumulate: add the rows of a token, instead of keeping the last.
        checkpoint: `"store"`: the backward reads what the forward stored; or
            `"recompute"`: it computes that again.
        returned: return what is stored too.
        on_intermediate: affinities multiply what the down weight meets.
        compute_dtype: the dtype of factors; None for that of the operands.
        quantization: `NONE`, `ROW` (fp8 weights with scales) or `MX`.
        weight_format: the format of containers; None for the container's own.
        num_static: the first blocks, which `conditions` do not close.
        shard: `"hidden"`, `"intermediate"`, or None.
        axis: the mesh axis of the cores that share; None for one.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `(out, gate_up, down)`: `[rows, H]`, `[N, 2, I, B]` and `[N, B, H]`; without
        `down` for `on_intermediate`, `out` alone without `returned`.
    """
    if shard is not None:
        hints |= dict(shard=shard, axis=axis)
    if num_static:
        hints |= dict(num_static=int(num_static))
    call = SimpleNamespace(function=KERNEL, **locals())
    return tuple(emit(call, returned).values())
