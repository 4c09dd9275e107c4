"""The rules of the forward functions: specs, skip modes and what they return."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.primitives.blockwise_mm.arguments import (
    arguments,
)
from neuronjax.primitives.blockwise_mm.facts import (
    ALL,
    BWD,
    CTE,
    EMITTERS,
    FORWARD,
    KERNEL_BWD,
    on_intermediate_of,
)
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.blockwise_mm.spec import (
    DROPPING,
    HYBRID,
    ON_BLOCKS,
    MoECTESpec,
    QuantizationConfig,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
    quantization_of,
    spec_of,
)
from neuronjax.primitives.contracts import told
from neuronjax.primitives.kinds import is_count, is_flag
from neuronjax.primitives.options import (
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    member,
    members,
)

STORE, RECOMPUTE = CHECKPOINTS = ("store", "recompute")
_UNTILED = tuple(function for function in ALL if function not in EMITTERS)


def _is_spec(c: SimpleNamespace) -> bool:
    spec = spec_of(c.spec)
    return (
        spec is not None
        and isinstance(spec.shard_on_block, ShardOnBlockConfig | None)
        and isinstance(spec.shard_on_I, ShardOnIConfig | None)
    )


row(
    "spec",
    "spec must be a MoECTESpec, or an implementation: one of "
    f"{members(MoECTEImplementation)}; its settings a ShardOnBlockConfig and a "
    "ShardOnIConfig, got {spec!r}",
    lambda c: not _is_spec(c),
    functions=(CTE,),
    example=arguments(spec="shard_on_h"),
    stage=-1,
)
row(
    "skip_dma",
    "skip_dma must be a SkipMode, got {skip_dma!r}",
    lambda c: not isinstance(c.skip_dma, SkipMode | None),
    functions=_UNTILED,
    example=arguments(skip_dma=True),
    stage=-1,
)


def _odd_scales(c: SimpleNamespace) -> str:
    given = c.quantization_config
    if quantization_of(given):
        return ""
    if not isinstance(given, Mapping):
        return type(given).__name__
    fields = vars(QuantizationConfig()).keys()
    return f"one with {', '.join(map(repr, given.keys() - fields))}"


row(
    "quantization_config",
    "quantization_config must be a QuantizationConfig, a mapping of its fields, or "
    "None, got {odd_config}",
    told("odd_config", _odd_scales),
    functions=(CTE,),
    example=arguments(quantization_config=1),
    stage=-1,
)


def _idle_config(c: SimpleNamespace) -> str:
    spec = spec_of(c.spec)
    assert spec is not None
    if c.impl in ON_BLOCKS:
        given, default, name = spec.shard_on_I, ShardOnIConfig(), "shard_on_I"
    else:
        given, default = spec.shard_on_block, ShardOnBlockConfig()
        name = "shard_on_block"
    return "" if given in (None, default) else name


row(
    "idle_config",
    "spec.{idle_config} has no use with {impl_name}",
    told("idle_config", _idle_config),
    functions=(CTE,),
    example=arguments(
        spec=MoECTESpec("shard_on_block", shard_on_I=ShardOnIConfig(True))
    ),
)

row(
    "static_blocks",
    "num_static_block is for hybrid implementations, got {impl_name}",
    lambda c: (
        c.impl not in HYBRID and on_intermediate_of(c).num_static_block is not None
    ),
    functions=(CTE,),
    example=arguments(
        spec=MoECTESpec("shard_on_i", shard_on_I=ShardOnIConfig(num_static_block=1))
    ),
)


def _odd_config(c: SimpleNamespace) -> str:
    """The first field of a config of another kind than it must have, described."""
    spec = spec_of(c.spec)
    assert spec is not None
    on_blocks = spec.shard_on_block or ShardOnBlockConfig()
    on_i = spec.shard_on_I or ShardOnIConfig()
    strategy = on_blocks.block_sharding_strategy
    if member(BlockShardStrategy, strategy) is None:
        words = members(BlockShardStrategy)
        return f"block_sharding_strategy must be one of {words}, got {strategy!r}"
    least = dict(n_block_per_iter=1, n_static_blocks=-1, n_dynamic_blocks=0)
    for name, minimum in least.items():
        if not is_count(getattr(on_blocks, name), minimum):
            got = repr(getattr(on_blocks, name))
            return f"{name} must be an integer of at least {minimum}, got {got}"
    static = on_i.num_static_block
    if static is not None and not is_count(static, 0):
        return f"num_static_block must be an integer of at least 0, got {static!r}"
    for name in ("checkpoint_activation", "expert_affinity_multiply_on_I"):
        if not is_flag(getattr(on_i, name)):
            return f"{name} must be True or False, got {getattr(on_i, name)!r}"
    return ""


row(
    "config",
    "{odd_field}",
    told("odd_field", _odd_config),
    functions=(CTE,),
    example=arguments(
        spec=MoECTESpec("shard_on_block", ShardOnBlockConfig(n_block_per_iter=0))
    ),
    stage=0,
)
row(
    "checkpoint",
    f"checkpoint must be {STORE!r} or {RECOMPUTE!r}, got {{checkpoint!r}}",
    lambda c: c.checkpoint not in CHECKPOINTS,
    functions=(*FORWARD, *EMITTERS),
    example=arguments(checkpoint="none"),
    stage=0,
)


def returned(c: SimpleNamespace) -> tuple[bool, bool]:
    """Whether a call returns the stored gate and up, and the stored down."""
    buffers = c.gate_up_activations_T, c.down_activations
    if c.function != CTE:
        return buffers[0] is not None, buffers[1] is not None
    settings, spec = on_intermediate_of(c), spec_of(c.spec)
    assert spec is not None
    both = settings.checkpoint_activation or spec.implementation is DROPPING
    down = both and not settings.expert_affinity_multiply_on_I
    return bool(both or buffers[0] is not None), bool(down or buffers[1] is not None)


row(
    "buffers",
    "gate_up_activations_T and down_activations must have the dtype that is stored, "
    "{hidden_states.dtype}, that of hidden_states",
    lambda c: any(
        x is not None and x.dtype != c.hidden_states.dtype
        for x in (c.gate_up_activations_T, c.down_activations)
    ),
    functions=FORWARD,
    example=arguments(gate_up=np.zeros((3, 2, 6, 2), np.float16)),
)
row(
    "dropping",
    "shard_on_i_dropping has one block an expert: N = E = {E}, got N = {N}",
    lambda c: c.dropping and c.N != c.E,
    functions=(CTE,),
    example=arguments(spec="shard_on_i_dropping"),
)
_ON_I = MoECTESpec(
    "shard_on_i", shard_on_I=ShardOnIConfig(expert_affinity_multiply_on_I=True)
)


def _on_i(**changes: Any):
    """Arguments whose affinities multiply what the down weight meets."""

    def build(function: str) -> dict[str, Any]:
        if function == BWD:
            settings: dict[str, Any] = dict(affinity_option="AFFINITY_ON_I", down=None)
        else:
            kernel: dict[str, Any] = dict(on_intermediate=True)
            if function == KERNEL_BWD:
                kernel |= dict(down=None)
            settings = kernel if function in EMITTERS else dict(spec=_ON_I)
        return arguments(**(settings | changes))(function)

    return build


row(
    "on_I",
    "affinities that multiply what the down weight meets stand for POST_SCALE, got "
    "{scaling_kind.name}",
    lambda c: (
        c.on_I and c.scaling_kind not in (None, ExpertAffinityScaleMode.POST_SCALE)
    ),
    functions=(CTE, *EMITTERS),
    example=lambda function: _on_i(
        **{
            "scaling"
            if function in EMITTERS
            else "expert_affinities_scaling_mode": "NO_SCALE"
        }
    )(function),
)
row(
    "on_I_bias",
    "affinities that multiply what the down weight meets leave no place for the bias "
    "behind it",
    lambda c: (
        c.on_I and (c.bias if c.function == BWD else c.operands["down_b"] is not None)
    ),
    functions=(CTE, *EMITTERS, BWD),
    example=lambda function: _on_i(
        **({"bias": True} if function == BWD else {"down_b": (2, 8)})
    )(function),
)
row(
    "down_buffer",
    "down_activations are not kept with expert_affinity_multiply_on_I",
    lambda c: c.on_I and c.down_activations is not None,
    functions=(CTE,),
    example=_on_i(down=(3, 2, 8)),
)
