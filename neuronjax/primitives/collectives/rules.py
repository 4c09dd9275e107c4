"""The rules that the functions over a ring and their emitters share, one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.collectives.facts import (
    GATHER_MATMUL,
    KERNELS,
    MATMUL_SCATTER,
    PRODUCTS,
    RINGS,
    SB2SB,
    SB2SB_KERNEL,
    SCATTERS,
    SUMS,
    TILED_COLUMN_GATHER,
    misranked,
    odd_dtype,
    tiles,
)
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.kinds import described, is_count, is_flag
from neuronjax.primitives.tile import MemrefTile

ALL = (*RINGS, *SB2SB, *KERNELS)
PUBLIC = (*RINGS, *SB2SB)
_FLAGS = ("force_hbm_cc", "raw", "bidirectional")
_COUNTS = ("tp_degree", "num_groups", "nc_version")


def arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape."""

    def build(function: str) -> dict[str, Any]:
        columns = function in (*SB2SB, SB2SB_KERNEL)
        given: dict[str, Any] = dict(inp=(2, 3)) if columns else dict(lhs=(4, 3))
        if function in PRODUCTS:
            given["rhs"] = (3, 2)
        if function in KERNELS:
            given["axis"] = None
        else:
            given["tp_degree"] = 1
        if function in SB2SB:
            given["replica_groups"] = [[0]]
        if function in (GATHER_MATMUL, MATMUL_SCATTER):
            given["num_groups"] = 1
        given |= changes
        for name in ("lhs", "rhs", "inp"):
            if type(given.get(name)) is tuple:
                given[name] = np.zeros(given[name], np.float32)
        return given

    return build


def first_operand(value: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments whose first operand is `value`."""
    return lambda function: arguments(
        **{"inp" if function in (*SB2SB, SB2SB_KERNEL) else "lhs": value}
    )(function)


def row(
    rule: str, functions: tuple[str, ...], message: str, *args: Any, **kwargs: Any
) -> None:
    """Enters a row of the family."""
    text = "{function}: " + message
    contracts.add(Contract(f"collectives.{rule}", functions, text, *args, **kwargs))


def _tiled(function: str) -> dict[str, Any]:
    return first_operand(MemrefTile.from_tensor(jnp.zeros((4, 3)), 0))(function)


def _uncounted(c: SimpleNamespace) -> str:
    given = {name: getattr(c, name) for name in _COUNTS if hasattr(c, name)}
    odd = [f"{n} = {described(v)}" for n, v in given.items() if not is_count(v)]
    return ", ".join(odd)


def _unflagged(c: SimpleNamespace) -> str:
    given = {name: getattr(c, name) for name in _FLAGS if hasattr(c, name)}
    return ", ".join(
        f"{n} = {described(v)}" for n, v in given.items() if not is_flag(v)
    )


row(
    "tensor",
    ALL,
    "collectives have no tiled form: operands must be tensors",
    tiles,
    example=_tiled,
    stage=0,
)
row(
    "rank",
    ALL,
    "{misranked}",
    told("misranked", misranked),
    example=first_operand((3,)),
    stage=0,
)
row(
    "dtype",
    SUMS,
    "operands must be bfloat16, float16, float32 or float64, got {odd_dtype}",
    told("odd_dtype", odd_dtype),
    example=first_operand(np.zeros((4, 3), np.int32)),
    stage=0,
)
row(
    "counts",
    PUBLIC,
    "{uncounted}: it must be a positive integer, known while tracing",
    told("uncounted", _uncounted),
    example=arguments(tp_degree=0),
    stage=0,
)
row(
    "flags",
    (*RINGS, *(k for k in KERNELS if k != SB2SB_KERNEL)),
    "{unflagged}: it must be True or False, known while tracing",
    told("unflagged", _unflagged),
    example=arguments(bidirectional="yes"),
    stage=0,
)
row(
    "axis_kind",
    PUBLIC,
    "axis must be the name of one mesh axis, got {axis!r}",
    lambda c: not isinstance(c.axis, str),
    example=arguments(axis=("data", "tensor")),
    stage=0,
)
row(
    "lnc_kind",
    (*RINGS, TILED_COLUMN_GATHER),
    "lnc_axis must be None or the name of another mesh axis than axis, got "
    "{lnc_axis!r} beside {axis!r}",
    lambda c: (
        c.lnc_axis is not None
        and (not isinstance(c.lnc_axis, str) or c.lnc_axis == c.axis)
    ),
    example=arguments(axis="tensor", lnc_axis="tensor"),
    stage=0,
)
row(
    "axis",
    PUBLIC,
    "axis must be a mesh axis of {devices} devices, one a rank, and the call inside "
    "its shard_map, got {axis!r}{seen}",
    lambda c: c.misfits,
    example=lambda function: arguments(
        **(
            dict(tp_degree=2, replica_groups=[[0, 1]])
            if function in SB2SB
            else dict(tp_degree=2)
        )
    )(function),
)
row(
    "lnc",
    (*RINGS, TILED_COLUMN_GATHER),
    "lnc_axis must be a mesh axis, and the call inside its shard_map, which must check "
    "varying axes (its default), got {lnc_axis!r}{lnc_fault}",
    lambda c: bool(c.lnc_fault),
    example=arguments(lnc_axis="lnc"),
)
row(
    "contraction",
    PRODUCTS,
    "K of lhs {lhs_shape} and of rhs {rhs_shape} must be equal",
    lambda c: c.lhs_shape[1] != c.rhs_shape[0],
    example=arguments(rhs=(4, 2)),
)
row(
    "rows",
    tuple(f for f in RINGS if f not in SCATTERS),
    "m, the rows of lhs, must be a multiple of {shares}: a rank has {plan.cores} cores "
    "of {plan.channels} channels, got {m}",
    lambda c: c.m % c.shares != 0,
    example=arguments(lhs=(5, 3), lnc_axis="lnc"),
)
row(
    "scattered_rows",
    tuple(f for f in RINGS if f in SCATTERS),
    "the rows of lhs must be a multiple of {shares}: there are {tp_degree} ranks of "
    "{plan.cores} cores of {plan.channels} channels, got {m}",
    lambda c: c.m % c.shares != 0,
    example=arguments(tp_degree=3),
)
