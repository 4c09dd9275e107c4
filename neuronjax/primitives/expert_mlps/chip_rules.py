"""What the chip takes of a decode step's experts: reported, refused for tiles alone."""

from types import SimpleNamespace

import numpy as np

from neuronjax.primitives.contracts import Size
from neuronjax.primitives.expert_mlps.arguments import (
    ALL,
    arguments,
    block_scaled,
)
from neuronjax.primitives.expert_mlps.rules import row
from neuronjax.primitives.tile import PARTITIONS

_DYNAMIC = ALL | dict(dynamic=True, block_size=8)


def _wide_all(tokens: int = 32, **changes):
    given = ALL | dict(hidden=(tokens, 512), affinities=(tokens, 2))
    index = np.zeros((tokens, 2), np.int32)
    return block_scaled(**(given | dict(index=index) | changes))


row(
    "chip_tokens",
    "the chip takes T up to 128 unless {arg.all_experts}, got {T}",
    size=Size("T", lambda c: 1 if c.own.all_experts else c.T, maximum=PARTITIONS),
    example=arguments(
        hidden=(129, 8), affinities=(129, 3), index=np.zeros((129, 2), np.int32)
    ),
    tag="hw",
    stage=3,
)


def _mx_step(c: SimpleNamespace) -> int:
    return 32 if c.own.hidden_scale is None else 4


row(
    "chip_mx_tokens",
    "the chip takes block-scaled weights and {arg.all_experts} with T a multiple of "
    "32, of 4 where {arg.hidden} is quantized, got {T}",
    lambda c: c.is_mx and c.own.all_experts and c.T % _mx_step(c) != 0,
    example=_wide_all(33),
    tag="hw",
    stage=3,
)
row(
    "chip_mx_scaling",
    "the chip takes block-scaled weights and {arg.all_experts} with POST_SCALE only",
    lambda c: c.is_mx and c.own.all_experts and not c.is_scaled,
    example=_wide_all(scaling="NO_SCALE"),
    tag="hw",
    stage=3,
)
row(
    "chip_dynamic_experts",
    "the chip takes {arg.dynamic} with one local expert, got {E_L}",
    lambda c: c.own.dynamic and c.E_L != 1,
    example=arguments(**_DYNAMIC),
    tag="hw",
    stage=3,
)
row(
    "chip_dynamic_mask",
    "the chip takes {arg.dynamic} without {arg.mask}",
    lambda c: c.own.dynamic and c.own.mask,
    example=arguments(**(_DYNAMIC | dict(mask=True))),
    tag="hw",
    stage=3,
)


def _is_odd_block(c: SimpleNamespace) -> bool:
    size, tokens = c.own.block_size, c.T
    if not c.own.dynamic or not isinstance(tokens, int):
        return False
    step = 8 if size < 32 else 32 if size < PARTITIONS else PARTITIONS
    return size % step != 0 or tokens % size != 0 or 2 * size > tokens


row(
    "chip_dynamic_block",
    "the chip takes a block_size that divides T, is at most T/2, and is a multiple of "
    "8 below 32, of 32 below 128, of 128 from there on, got {own.block_size} of {T}",
    _is_odd_block,
    example=arguments(**_DYNAMIC),
    tag="hw",
    stage=3,
)
