"""The rules of the mixture-of-experts block of a decode step: one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.kinds import described, is_count, is_flag
from neuronjax.primitives.moe_block_tkg.facts import (
    FLAGS,
    FUNCTION,
    SHARED,
    SHARED_BIASES,
    has_shared_expert,
)
from neuronjax.primitives.tile import MemrefTile

_EXPERT_WEIGHTS = ("expert_gate_up_weights", "expert_down_weights")
_ARGUMENTS: dict[str, Any] = dict(
    inp=(2, 2, 8),
    gamma=(1, 8),
    router_weights=(8, 4),
    expert_gate_up_weights=(4, 8, 2, 6),
    expert_down_weights=(4, 6, 8),
    top_k=2,
)
_SHARED: dict[str, Any] = dict(
    shared_expert_gate_w=(8, 5),
    shared_expert_up_w=(8, 5),
    shared_expert_down_w=(5, 8),
)
_BLOCKS: dict[str, Any] = dict(
    inp=(3, 1, 512),
    gamma=(1, 512),
    router_weights=(512, 2),
    expert_gate_up_weights=np.zeros((2, 128, 2, 1, 32), np.uint16),
    expert_down_weights=np.zeros((2, 8, 1, 512), np.uint16),
    expert_gate_up_weights_scale=np.zeros((2, 16, 2, 1, 32), np.uint8),
    expert_down_weights_scale=np.zeros((2, 1, 1, 512), np.uint8),
    is_all_expert=True,
    rank_id=0,
)


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape of zeros."""

    def build(function: str) -> dict[str, Any]:
        given = _ARGUMENTS | changes
        return {
            key: np.zeros(x, np.float32) if type(x) is tuple else x
            for key, x in given.items()
        }

    return build


def _row(rule: str, message: str, violated=None, **kwargs: Any) -> None:
    text = "{function}: " + message
    rule = f"{FUNCTION}.{rule}"
    contracts.add(Contract(rule, (FUNCTION,), text, violated, **kwargs))


def _tiles(c: SimpleNamespace) -> bool:
    return any(isinstance(x, MemrefTile) for x in vars(c).values())


def _parts_of_shared(c: SimpleNamespace) -> list[bool]:
    return [getattr(c, name) is not None for name in SHARED]


def _absent(c: SimpleNamespace) -> str:
    """The first operand that every block has and that is no array, described."""
    for name in ("inp", "gamma", "router_weights", *_EXPERT_WEIGHTS):
        x = getattr(c, name)
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return f"{name} must be an array, got {type(x).__name__}"
    return ""


def _odd_flag(c: SimpleNamespace) -> str:
    for name in FLAGS:
        if not is_flag(getattr(c, name)):
            return f"{name} must be True or False, got {described(getattr(c, name))}"
    actual = c.hidden_actual
    if actual is not None and not is_count(actual):
        return f"hidden_actual must be a positive integer, got {described(actual)}"
    return ""


_row(
    "tensors",
    "the block takes tensors; its emitters take tiles",
    _tiles,
    example=lambda function: (
        _arguments()(function)
        | dict(gamma=MemrefTile.from_tensor(np.zeros((1, 8), np.float32), 1))
    ),
    stage=-1,
)
_row(
    "arrays",
    "{absent}",
    contracts.told("absent", _absent),
    example=_arguments(gamma=None),
    stage=-1,
)
_row(
    "flags",
    "{odd_flag}",
    contracts.told("odd_flag", _odd_flag),
    example=_arguments(router_pre_norm="no"),
    stage=-1,
)
_row(
    "rank",
    "inp must have shape [B, S, H] and router_weights [H, E], without an axis of size "
    "0, got {inp_shape} and {router_shape}",
    lambda c: not c.ranked,
    example=_arguments(inp=(4, 8)),
)
_row(
    "dtype",
    "operands must be bfloat16, float16, float32 or float64, got {odd}",
    lambda c: c.odd,
    example=_arguments(gamma=np.zeros((1, 8), np.int8)),
)
_row(
    "router_dtype",
    "router_mm_dtype must be bfloat16, float16, float32, float64 or None, got "
    "{router_mm_dtype}",
    lambda c: not c.is_dtype,
    example=_arguments(router_mm_dtype="int8"),
)
_row(
    "act_scale",
    "hidden_act_scale_factor and hidden_act_bias must be None: what they do is defined "
    "nowhere",
    lambda c: c.hidden_act_scale_factor is not None or c.hidden_act_bias is not None,
    example=_arguments(hidden_act_bias=1.0),
)
_row(
    "shared",
    "a shared expert has gate, up and down weights, and its biases belong to it",
    lambda c: (
        any(_parts_of_shared(c)) != all(_parts_of_shared(c))
        or (
            not has_shared_expert(c)
            and any(getattr(c, name) is not None for name in SHARED_BIASES)
        )
    ),
    example=_arguments(shared_expert_down_w=(5, 8)),
)
_row(
    "shapes",
    "{unlike}",
    lambda c: c.unlike,
    example=_arguments(gamma=(8,)),
    stage=2,
)
_row(
    "residual_dtype",
    "residual must have the dtype of inp, got {residual.dtype} and {inp.dtype}",
    lambda c: c.residual is not None and c.residual.dtype != c.inp.dtype,
    example=_arguments(residual=np.zeros((2, 2, 8), np.float64)),
    stage=2,
)
_row(
    "norm",
    "its norm: {norm}",
    lambda c: c.norm,
    example=_arguments(eps=-1.0),
    stage=2,
)
_row(
    "router",
    "its router: {router}",
    lambda c: c.router,
    example=_arguments(top_k=5),
    stage=2,
)
_row(
    "experts",
    "its experts: {experts}",
    lambda c: c.experts,
    example=_arguments(expert_down_weights=(4, 5, 8)),
    stage=2,
)
_row(
    "shared_expert",
    "its shared expert: {shared}",
    lambda c: c.shared,
    example=_arguments(**_SHARED, hidden_act_fn="ReLU"),
    stage=2,
)
_row(
    "chip_router",
    "the router: {chip_router}",
    lambda c: c.chip_router,
    example=_arguments(),
    tag="hw",
    stage=3,
)
_row(
    "chip_experts",
    "the experts: {chip_experts}",
    lambda c: c.chip_experts,
    example=_arguments(inp=(129, 1, 8)),
    tag="hw",
    stage=3,
)
_row(
    "chip_width",
    "the chip takes H in multiples of 256 for inp, got {inp_shape}",
    size=Size("H", lambda c: c.H, multiple=256),
    example=_arguments(),
    tag="hw",
    stage=3,
)
_row(
    "chip_shared",
    "the chip takes no shared expert",
    has_shared_expert,
    example=_arguments(**_SHARED),
    tag="hw",
    stage=3,
)
_row(
    "chip_rank",
    "the chip takes is_all_expert with rank_id",
    lambda c: c.is_all_expert and c.rank_id is None,
    example=_arguments(is_all_expert=True),
    tag="hw",
    stage=3,
)
_row(
    "chip_residual",
    "the chip takes residual with block-scaled weights and is_all_expert only",
    lambda c: c.residual is not None and not (c.packed and c.is_all_expert),
    example=_arguments(residual=(2, 2, 8)),
    tag="hw",
    stage=3,
)
_row(
    "chip_mx_tokens",
    "the chip takes block-scaled weights and is_all_expert with T a multiple of 4, got "
    "{T}",
    lambda c: c.packed and c.is_all_expert and c.T % 4 != 0,
    example=_arguments(**_BLOCKS),
    tag="hw",
    stage=3,
)
