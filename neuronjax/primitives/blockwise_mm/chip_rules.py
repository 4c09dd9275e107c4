"""The limits of the chip: `can` reports them, and nothing is refused for them."""

from types import SimpleNamespace

import numpy as np

from neuronjax.primitives.blockwise_mm.arguments import arguments, block_scaled
from neuronjax.primitives.blockwise_mm.facts import BWD, CTE, HIDDEN_SHARD
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.blockwise_mm.spec import (
    HYBRID,
    MoECTESpec,
    ShardOnBlockConfig,
    SkipMode,
    spec_of,
)
from neuronjax.primitives.contracts import Size
from neuronjax.primitives.options import (
    ActFnType,
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    member,
)

_KINDS = MoECTEImplementation
_PLAIN_I = (_KINDS.shard_on_i, _KINDS.shard_on_i_hybrid, _KINDS.shard_on_i_dropping)
_MX_I = (_KINDS.shard_on_i_mx, _KINDS.shard_on_i_mx_hybrid)
_BLOCK, _MX_BLOCK = _KINDS.shard_on_block, _KINDS.shard_on_block_mx


def _chip(rule: str, message: str, violated=None, functions=(CTE,), **kwargs) -> None:
    row(
        f"chip_{rule}",
        f"the chip {message}",
        violated,
        functions,
        tag="hw",
        stage=3,
        **kwargs,
    )


def _size(name: str, size: str, kinds: tuple, multiple: int, **limits) -> Size:
    """A limit of some implementations; its name tells it from that of others."""

    def of(c: SimpleNamespace) -> int:
        return getattr(c, size) if c.impl in kinds else max(multiple, lowest)

    lowest = limits.get("minimum", 1)
    return Size(name, of, multiple, **limits)


_chip(
    "block_size",
    "shares I with B in multiples of 256, got {value}",
    size=_size("block_size", "B", (*_PLAIN_I, *_MX_I), 256),
    example=arguments(),
)
_chip(
    "block_size_mx",
    "shares block-scaled blocks with B in multiples of 128, got {value}",
    size=_size("block_size (MX blocks)", "B", (_MX_BLOCK,), 128),
    example=block_scaled(spec="shard_on_block_mx"),
)
_chip(
    "width",
    "takes H in multiples of 512 up to 8192 with {impl_name}, got {value}",
    size=_size("H", "H", (*_PLAIN_I, _MX_BLOCK), 512, minimum=512, maximum=8192),
    example=arguments(),
)
_chip(
    "d_ff",
    "takes I in multiples of 16 with {impl_name}, got {value}",
    size=_size("I", "I", (*_PLAIN_I, _BLOCK, _MX_BLOCK), 16),
    example=arguments(),
)
_chip(
    "d_ff_mx",
    "shares I of block-scaled weights in multiples of 1024, got {value}",
    size=_size("I (MX)", "I", _MX_I, 1024),
    example=block_scaled(),
)
_chip(
    "skip_weight",
    "reads all weights where it shares I: skip_weight must be False",
    lambda c: c.skip.skip_weight and c.impl in (*_PLAIN_I, *_MX_I),
    example=arguments(skip_dma=SkipMode(skip_weight=True)),
)


def _strategy(c: SimpleNamespace) -> bool:
    spec = spec_of(c.spec)
    on_blocks = (spec and spec.shard_on_block) or ShardOnBlockConfig()
    strategy = member(BlockShardStrategy, on_blocks.block_sharding_strategy)
    return strategy is not BlockShardStrategy.PING_PONG


_chip(
    "strategy",
    "takes block_sharding_strategy PING_PONG alone",
    lambda c: c.impl is _BLOCK and _strategy(c),
    example=arguments(
        spec=MoECTESpec(
            "shard_on_block", ShardOnBlockConfig(block_sharding_strategy="HI_LO")
        )
    ),
)
_chip(
    "delayed",
    "shares blocks without PRE_SCALE_DELAYED",
    lambda c: (
        c.impl is _BLOCK and c.scaling_kind is ExpertAffinityScaleMode.PRE_SCALE_DELAYED
    ),
    example=arguments(
        spec="shard_on_block", expert_affinities_scaling_mode="PRE_SCALE_DELAYED"
    ),
)
_chip(
    "accumulating",
    "shares block-scaled blocks with is_tensor_update_accumulating alone",
    lambda c: c.impl is _MX_BLOCK and not c.is_tensor_update_accumulating,
    example=block_scaled(spec="shard_on_block_mx", is_tensor_update_accumulating=False),
)


def _entries(c: SimpleNamespace) -> int | None:
    """How many conditions the chip's kernel of a call reads; None for none."""
    if c.impl in HYBRID:
        return c.N + 1
    return c.N + 2 if c.impl is _MX_BLOCK else None


_chip(
    "conditions",
    "reads N + 1 conditions in a hybrid implementation, N + 2 for block-scaled blocks "
    "and none elsewhere",
    lambda c: _entries(c) != (None if c.conditions is None else c.conditions.shape[0]),
    example=arguments(conditions=np.asarray([1, 1, 1, 0], np.int32)),
)
_chip(
    "activation",
    "has SiLU and Swish alone",
    lambda c: c.activation_kind not in (ActFnType.SiLU, ActFnType.Swish),
    functions=(CTE, BWD),
    example=lambda function: arguments(
        **{"activation_type" if function == BWD else "activation_function": "GELU"}
    )(function),
)
_chip(
    "hidden_width",
    "shares an even H, got {value}",
    size=Size("H", lambda c: c.H, 2),
    functions=(HIDDEN_SHARD,),
    example=arguments(hidden=(4, 7), gate_up_w=(2, 7, 2, 6), down_w=(2, 6, 7)),
)
_chip(
    "hidden_d_ff",
    "takes I in multiples of 16, got {value}",
    size=Size("I", lambda c: c.I, 16),
    functions=(HIDDEN_SHARD,),
    example=arguments(),
)
_chip(
    "bwd_block_size",
    "takes block_size 128, 256, 512 or 1024, got {block_size}",
    lambda c: c.B not in (128, 256, 512, 1024),
    functions=(BWD,),
    example=arguments(),
)
_chip(
    "bwd_width",
    "shares H between two cores in parts of 32, got {value}",
    size=Size("H", lambda c: c.H, 64),
    functions=(BWD,),
    example=arguments(),
)
_chip(
    "bwd_d_ff",
    "shares I between two cores in parts of 32, got {value}",
    size=Size("I", lambda c: c.I, 64),
    functions=(BWD,),
    example=arguments(),
)
