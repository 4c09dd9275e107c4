"""The rules of the prefill stack's calls: one row each."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from neuronjax.kernels.llama3_transformer.operands import ORDERS
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_flag, is_number
from neuronjax.primitives.llama3_transformer.chip import refused_on_chip
from neuronjax.primitives.llama3_transformer.example import operand_shapes
from neuronjax.primitives.llama3_transformer.facts import (
    BOTH,
    EMITTER,
    empty,
    misplaced,
    odd_axis,
)

# By argument, in the order of `Operands`: one layer of heads of 4.
_SHAPES: dict[str, tuple[int, ...]] = dict(
    zip(
        "X W_qkvs W_outs W_gates W_ups W_downs W_gamma_qkvs W_gamma_mlps RoPE_cos "
        "RoPE_sin".split(),
        operand_shapes(1, layers=1, d_model=8, head_dim=4, d_ff=6),
        strict=True,
    )
)


def _row(rule: str, message: str, violated=None, **kwargs: Any) -> None:
    rule, text = f"llama3_transformer.{rule}", "{function}: " + message
    contracts.add(Contract(rule, BOTH, text, violated, **kwargs))


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape."""

    def build(function: str) -> dict[str, Any]:
        return {
            name: np.zeros(x, np.float32) if isinstance(x, tuple) else x
            for name, x in (_SHAPES | changes).items()
        }

    return build


contracts.add(only_hints(EMITTER, _arguments()))
_row(
    "arguments",
    "{misplaced}",
    told("misplaced", misplaced),
    example=_arguments(W_ups=(8, 6)),
    stage=0,
)
_row(
    "settings",
    "eps must be a finite number of at least 0, output_kv True or False and qkv_order "
    "one of " + ", ".join(ORDERS) + ", known while tracing, got {eps}, {output_kv} "
    "and {qkv_order!r}",
    lambda c: (
        not (is_number(c.eps) and 0 <= c.eps < math.inf)
        or not is_flag(c.output_kv)
        or not (isinstance(c.qkv_order, str) and c.qkv_order in ORDERS)
    ),
    example=_arguments(eps=-1.0),
)
_row(
    "empty",
    "no axis may be empty, got {empty}",
    told("empty", empty),
    example=_arguments(X=(0, 2, 8)),
)
_row(
    "heads",
    "with D = {D}, twice the rows of RoPE_cos, W_outs must have N*D rows and W_qkvs "
    "(N + 2*G)*D columns, N a multiple of G and both at least 1, got {rows} and "
    "{columns}",
    lambda c: not c.divisible or c.N < 1 or c.G < 1 or c.N % c.G != 0,
    example=_arguments(W_qkvs=(1, 8, 12)),
)
_row(
    "shapes",
    "with layers = {layers} and H = {H}: {unlike}",
    lambda c: c.unlike,
    example=_arguments(W_downs=(1, 6, 9)),
)
_row(
    "tables",
    "RoPE_cos and RoPE_sin must have shape [D/2, B, S] = [D/2, {B}, {S}], got "
    "{shapes[RoPE_cos]} and {shapes[RoPE_sin]}",
    lambda c: (
        c.shapes["RoPE_cos"][1:] != (c.B, c.S)
        or c.shapes["RoPE_sin"] != c.shapes["RoPE_cos"]
    ),
    example=_arguments(RoPE_sin=(2, 1, 3)),
)
_row(
    "dtype",
    "operands must be floating and at least 16 bits wide, got {odd}",
    lambda c: c.odd,
    example=lambda function: {
        **_arguments()(function),
        "W_gates": np.zeros(_SHAPES["W_gates"], np.int8),
    },
)
_row(
    "axis",
    "axis {odd_axis}, got {axis!r}",
    told("odd_axis", odd_axis),
    example=_arguments(axis="tensor"),
)
_row(
    "chip_parts",
    "{refused_on_chip}",
    told("refused_on_chip", refused_on_chip),
    example=_arguments(),
    tag="hw",
    stage=3,
)
