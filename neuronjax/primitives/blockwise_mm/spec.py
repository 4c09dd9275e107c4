"""What tells `moe_cte` how to run: aws-neuron/nki-library's records, by its names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from neuronjax.primitives.options import (
    BlockShardStrategy,
    MoECTEImplementation,
    member,
)

_KINDS = MoECTEImplementation
ON_BLOCKS = (_KINDS.shard_on_block, _KINDS.shard_on_block_mx)
ON_INTERMEDIATE = tuple(kind for kind in _KINDS if kind not in ON_BLOCKS)
BLOCK_SCALED = tuple(kind for kind in _KINDS if "_mx" in kind.name)
HYBRID = (_KINDS.shard_on_i_hybrid, _KINDS.shard_on_i_mx_hybrid)
DROPPING = _KINDS.shard_on_i_dropping


@dataclasses.dataclass(frozen=True)
class SkipMode:
    """What a kernel leaves unread.

    Attributes:
        skip_token: an empty slot holds -1, and the hidden states have no row for
            padding; without it an empty slot holds T, the last row.
        skip_weight: the weights of the block before are not read again where the expert
            is the same; a placement hint, it changes no value.
    """

    skip_token: bool = False
    skip_weight: bool = False


@dataclasses.dataclass(frozen=True)
class ShardOnBlockConfig:
    """How cores share blocks: placement hints, none changes a value.

    Attributes:
        n_block_per_iter: blocks that a core takes at once.
        block_sharding_strategy: a `BlockShardStrategy` or its name.
        n_static_blocks: blocks of the loop of fixed length; -1 for as many as must hold
            tokens.
        n_dynamic_blocks: at most so many blocks more.
    """

    n_block_per_iter: int = 1
    block_sharding_strategy: BlockShardStrategy | str = BlockShardStrategy.PING_PONG
    n_static_blocks: int = -1
    n_dynamic_blocks: int = 55


@dataclasses.dataclass(frozen=True)
class ShardOnIConfig:
    """How cores share the intermediate axis, and what they keep.

    Attributes:
        checkpoint_activation: return the stored activations too.
        expert_affinity_multiply_on_I: affinities multiply what the down weight meets,
            instead of its product.
        num_static_block: hybrid: the first blocks, which hold tokens whatever
            `conditions` say; None for none. (The vendor's None is `N - E`, a length of
            its loop: the blocks up to there hold tokens then anyway.)
    """

    checkpoint_activation: bool = False
    expert_affinity_multiply_on_I: bool = False
    num_static_block: int | None = None


@dataclasses.dataclass(frozen=True)
class MoECTESpec:
    """An implementation of `moe_cte` and its settings.

    Attributes:
        implementation: a `MoECTEImplementation` or its name. All compute the same; they
            differ in what the cores of the chip share, in the weights (`_mx`) and in
            whether blocks have a fixed capacity (`_dropping`).
        shard_on_block: for the implementations that share blocks; None for defaults.
        shard_on_I: for those that share the intermediate axis; None for defaults.
    """

    implementation: MoECTEImplementation | str
    shard_on_block: ShardOnBlockConfig | None = None
    shard_on_I: ShardOnIConfig | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """The scales of quantized expert weights.

    Attributes:
        gate_up_proj_scale: fp8 weights: float32 `[E or 1, 1, 2 I]`, those of the gate
            first; block-scaled: uint8 `[E, 16, 2, H/512, I]`.
        down_proj_scale: fp8: float32 `[E or 1, 1, H]`; block-scaled: uint8
            `[E, Ip/8, ceil(I/512), H]`.
        weight_dtype: block-scaled: the format of the weights, as in
            `neuronjax.quantize_to_mx`; None for that of their container,
            float4_e2m1fn in uint16 and float8_e4m3fn in uint32.
    """

    gate_up_proj_scale: Array | None = None
    down_proj_scale: Array | None = None
    weight_dtype: Any = dataclasses.field(default=None, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class ClampLimits:
    """The clamps of the forward, in the order of the backward's record.

    Attributes:
        linear_clamp_upper_limit: up's projection was at most this.
        linear_clamp_lower_limit: and at least this.
        non_linear_clamp_upper_limit: the gate's projection was at most this.
        non_linear_clamp_lower_limit: and at least this.
    """

    linear_clamp_upper_limit: float | None = None
    linear_clamp_lower_limit: float | None = None
    non_linear_clamp_upper_limit: float | None = None
    non_linear_clamp_lower_limit: float | None = None


def spec_of(value: Any) -> MoECTESpec | None:
    """The spec that `value` is, or that of the implementation it names; else None."""
    if not isinstance(value, MoECTESpec):
        value = MoECTESpec(value)
    kind = member(MoECTEImplementation, value.implementation)
    return None if kind is None else dataclasses.replace(value, implementation=kind)


def quantization_of(value: Any) -> QuantizationConfig | None:
    """The scales of a `quantization_config`: the record, a mapping of it, or None."""
    if value is None or isinstance(value, QuantizationConfig):
        return value or QuantizationConfig()
    fields = {field.name for field in dataclasses.fields(QuantizationConfig)}
    if isinstance(value, Mapping) and fields >= set(value):
        return QuantizationConfig(**value)
    return None
