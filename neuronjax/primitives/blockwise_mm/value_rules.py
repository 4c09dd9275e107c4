"""The rules on the values of blockwise expert calls, where tracing knows them."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.primitives.blockwise_mm.arguments import arguments
from neuronjax.primitives.blockwise_mm.facts import BWD, CTE, EMITTERS
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.contracts import told
from neuronjax.primitives.known import known


def _ids(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def _outside(x: Any, low: int, high: int) -> str:
    """The first known value of `x` outside `[low, high)`; empty if there is none."""
    held = known(x)
    if held is None:
        return ""
    flat = held.ravel()
    wrong = flat[(flat < low) | (flat >= high)]
    return str(wrong[0]) if wrong.size else ""


def _wrong_id(c: SimpleNamespace) -> str:
    low = -1 if c.skip.skip_token else 0
    return _outside(c.operands["token_id"], low, c.R)


row(
    "ids",
    "{arg.token_id} must hold rows of {arg.hidden}, in [0, {T}), and {padding_id} for "
    "an empty slot, got {wrong_id}",
    told("wrong_id", _wrong_id),
    example=arguments(token_id=_ids([0, 2, 1, -1, 3, 3])),
    stage=2,
)


def _wrong_expert(c: SimpleNamespace) -> str:
    return _outside(c.operands["block_expert"], 0, c.E)


row(
    "experts",
    "{arg.block_expert} must hold experts, in [0, {E}), got {wrong_expert}",
    told("wrong_expert", _wrong_expert),
    example=arguments(block_expert=_ids([0, 1, 2])),
    stage=2,
)


def _unordered(c: SimpleNamespace) -> bool:
    held = known(c.operands["block_expert"])
    return c.dropping and held is not None and (held.ravel() != np.arange(c.E)).any()


row(
    "dropping_experts",
    "dropping has block e for expert e: {arg.block_expert} must count from 0, or be "
    "None",
    _unordered,
    functions=(CTE, BWD),
    example=lambda function: arguments(
        token_id=(4,),
        block_expert=_ids([1, 0]),
        **(
            dict(spec="shard_on_i_dropping")
            if function == CTE
            else dict(
                kernel_type_option="DROPPING", gate_up=(2, 2, 6, 2), down=(2, 2, 8)
            )
        ),
    )(function),
    stage=2,
)


def _unlike_flags(c: SimpleNamespace) -> bool:
    held = known(c.operands["conditions"])
    if held is None:
        return False
    held = held.astype(np.int64)  # differences of unsigned ones wrap
    return bool(((held != 0) & (held != 1)).any() or (np.diff(held) > 0).any())


row(
    "conditions",
    "conditions must be ones, those of the blocks in use, and zeros behind them",
    _unlike_flags,
    functions=(CTE, *EMITTERS),
    example=arguments(conditions=_ids([1, 0, 1, 0])),
    stage=2,
)
