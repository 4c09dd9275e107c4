"""Cells of `vmap`: a mapped macro is one macro."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from neuronjax.tools.transformations.case import MacroCase
from neuronjax.tools.transformations.compare import (
    GRADIENT,
    grads,
    is_float,
    require,
    require_close,
)


def stacked(x: Any, size: int, axis: int = 0) -> np.ndarray:
    """`size` scaled copies of `x` along a new axis; of integers plain copies.

    NumPy compiles no program for them.
    """
    x = np.asarray(x)
    factors = [1 + i / 4 for i in range(size)]
    copies = [x * factor for factor in factors] if is_float(x) else [x] * size
    return np.stack(copies, axis).astype(x.dtype)


def mapped(case: MacroCase, first: int | None, rest: int | None, size: int = 3) -> None:
    """vmap equals a Python loop, and the mapped macro is one macro."""
    alone = len(case.flat) == 1 and first is None
    dims = [rest if alone else first] + [rest] * (len(case.flat) - 1)

    def each(act):
        pairs = zip(case.flat, dims, strict=True)
        return [x if dim is None else act(x, dim) for x, dim in pairs]

    operands = each(lambda x, dim: stacked(x, size, dim))
    batched = jax.vmap(case.macro, dims)
    outs = [
        case.reference(*each(lambda x, _, i=i: stacked(x, size)[i]))
        for i in range(size)
    ]
    wanted = [np.stack(column) for column in zip(*outs, strict=True)]
    require_close(list(jax.jit(batched)(*operands)), wanted)
    _require_one(case, batched, operands)


def _require_one(case: MacroCase, fun: Any, operands: list) -> None:
    count = case.equations(fun, *operands)
    require(count == 1, f"expected one mapped macro, got {count}")


def all_first(case: MacroCase) -> None:
    """Every operand is mapped along its first axis."""
    mapped(case, 0, 0)


def first_operand(case: MacroCase) -> None:
    """Only the first operand is mapped."""
    mapped(case, 0, None)


def but_first_operand(case: MacroCase) -> None:
    """All operands but the first are mapped."""
    mapped(case, None, 0)


def second_axis(case: MacroCase) -> None:
    """The first operand is mapped along its second axis."""
    mapped(case, 1, 0)


def size_one(case: MacroCase) -> None:
    """The mapped axis has one element."""
    mapped(case, 0, None, size=1)


def twice(case: MacroCase) -> None:
    """Two axes are mapped, one within the other."""
    others = len(case.flat) - 1
    operands = [stacked(x, 2) for x in case.flat]
    outer: Sequence[int | None] = [None, *[0] * others]
    if not others:
        operands, outer = [stacked(x, 3) for x in operands], [0]

    def nested(fun):
        return jax.vmap(jax.vmap(fun, [0] + [None] * others), outer)

    got, wanted = nested(case.macro), nested(case.plain)
    _require_one(case, got, operands)
    require_close(jax.jit(got)(*operands), jax.jit(wanted)(*operands))


def _first_stacked(case: MacroCase) -> tuple[list, list]:
    operands = [stacked(case.live[0], 3), *case.live[1:]]
    return operands, [0] + [None] * (len(case.live) - 1)


def of_grad(case: MacroCase) -> None:
    """A mapped gradient."""
    operands, dims = _first_stacked(case)
    got, wanted = (
        jax.jit(jax.vmap(grads(case.of_floats(f), len(case.live)), dims))(*operands)
        for f in (case.macro, case.plain)
    )
    require_close(got, wanted, GRADIENT)


def grad_of(case: MacroCase) -> None:
    """The gradient of a mapped macro."""
    operands, dims = _first_stacked(case)
    got, wanted = (
        jax.jit(grads(jax.vmap(case.of_floats(f), dims), len(case.live)))(*operands)
        for f in (case.macro, case.plain)
    )
    require_close(got, wanted, GRADIENT)
