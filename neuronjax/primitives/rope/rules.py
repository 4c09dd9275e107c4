"""The rules of rotations: what they read, and one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size, told
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.options import odd_dtype
from neuronjax.primitives.tile import MemrefTile

PUBLIC, EMITTER, FULL = "RoPE", "rope_kernel", "rope_hf"
HINTS = ("lnc_shard", "relayout_in_sbuf")
_HALF = (PUBLIC, EMITTER)
_ALL = (*_HALF, FULL)
_OPERANDS = {
    PUBLIC: ("x_in", "cos", "sin"),
    EMITTER: ("x", "cos", "sin"),
    FULL: ("q", "k", "cos", "sin", "rope_cache"),
}
_OPTIONAL = ("cos", "sin", "rope_cache")


def _x(call: SimpleNamespace) -> Any:
    return getattr(call, _OPERANDS[call.function][0])


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `RoPE` or `rope_kernel`."""
    full, shape = getattr(call, "full", False), tuple(_x(call).shape)
    axes = dict(zip(_axes(full), shape, strict=True))
    batch, seq, d = axes["batch"], axes["seq"], axes["d"]
    return axes | dict(
        x_name=_OPERANDS[call.function][0],
        x_shape=shape,
        table=(batch, seq, d) if full else (d // 2, batch, seq),
        table_axes="[batch, seq, d]" if full else "[d/2, batch, seq]",
        shared=getattr(call, "lnc_shard", False)
        or getattr(call, "hints", {}).get("lnc_shard", False),
    )


def _axes(full: bool) -> tuple[str, ...]:
    if full:
        return ("batch", "heads", "seq", "d")
    return ("d", "batch", "heads", "seq")


def hf_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `rope_hf`."""
    tables = call.cos.shape if call.rope_cache is None else call.rope_cache.shape
    batch, _, seq, d = call.q.shape
    width = d if call.rope_cache is None else 2 * d
    return dict(d=d, batch=batch, seq=seq, tables=tables, width=width)


def _not_tensor(call: SimpleNamespace) -> str:
    """The first operand that is no floating tensor, described."""
    given = {name: getattr(call, name) for name in _OPERANDS[call.function]}
    for name, x in given.items():
        if x is None and call.function == FULL and name in _OPTIONAL:
            continue
        if isinstance(x, MemrefTile) or x is None:
            return f"{name} of type {type(x).__name__}"
    return odd_dtype(given)


def _odd_rank(call: SimpleNamespace) -> str:
    """An operand to rotate that has not four axes, described."""
    shape, axes = tuple(_x(call).shape), ", ".join(_axes(getattr(call, "full", False)))
    name = _OPERANDS[call.function][0]
    return "" if len(shape) == 4 else f"{name} must have shape [{axes}], got {shape}"


def _odd_tables(call: SimpleNamespace) -> str:
    """Which tables are given, where these are not those of one kind."""
    given = [name for name in _OPTIONAL if getattr(call, name) is not None]
    if given in (["cos", "sin"], ["rope_cache"]):
        return ""
    return ", ".join(given) or "none"


def _arguments(
    shape=(8, 1, 2, 3), table=(4, 1, 3), **changes: Any
) -> Callable[[str], dict[str, Any]]:
    x, cos = np.zeros(shape, np.float32), np.zeros(table, np.float32)

    def build(function: str) -> dict[str, Any]:
        return {_OPERANDS[function][0]: x, "cos": cos, "sin": cos} | changes

    return build


def _hf_arguments(
    shape=(1, 2, 3, 8), table=(1, 3, 8), **changes: Any
) -> Callable[[str], dict[str, Any]]:
    q, cos = np.zeros(shape, np.float32), np.zeros(table, np.float32)
    return lambda function: dict(dict(q=q, k=q, cos=cos, sin=cos), **changes)


def _either(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments of any of the functions."""

    def build(function: str) -> dict[str, Any]:
        return (_hf_arguments if function == FULL else _arguments)(**changes)(function)

    return build


def _row(
    rule: str, functions: tuple[str, ...], message: str, *args: Any, **more: Any
) -> None:
    family = FULL if functions == (FULL,) else "rope"
    contracts.add(
        Contract(f"{family}.{rule}", functions, "{function}: " + message, *args, **more)
    )


contracts.add(only_hints(EMITTER, _arguments(), HINTS), *only_flags(*_ALL))
_row(
    "tensors",
    _ALL,
    "operands must be tensors of bfloat16, float16, float32 or float64, got "
    "{not_tensor}",
    told("not_tensor", _not_tensor),
    example=_either(cos=np.zeros((1, 3, 8), np.int32)),
    stage=-1,
)
_row(
    "rank",
    _HALF,
    "{odd_rank}",
    told("odd_rank", _odd_rank),
    example=_arguments(shape=(8, 2, 3)),
    stage=0,
)
_row(
    "even",
    _HALF,
    "d of {x_name} must be even and positive, got {x_shape}",
    size=Size("d", lambda c: c.d, multiple=2, minimum=2),
    example=_arguments(shape=(7, 1, 2, 3)),
)
_row(
    "tables",
    _HALF,
    "cos and sin must have shape {table_axes} = {table}, got {cos.shape} and "
    "{sin.shape}",
    lambda c: {tuple(c.cos.shape), tuple(c.sin.shape)} != {c.table},
    example=_arguments(table=(8, 1, 3)),
)
_row(
    "table_dtypes",
    _HALF,
    "cos and sin must have one dtype, got {cos.dtype} and {sin.dtype}",
    lambda c: c.cos.dtype != c.sin.dtype,
    example=_arguments(sin=np.zeros((4, 1, 3), np.float16)),
)
_row(
    "head_dim",
    _HALF,
    "the chip takes d = 64 or 128 for {x_name}, got {x_shape}",
    size=Size("d", lambda c: c.d, multiple=64, maximum=128),
    example=_arguments(),
    tag="hw",
)
_row(
    "chip_cores",
    _HALF,
    "the chip's two cores share an even seq of {x_name} with lnc_shard, got {x_shape}",
    lambda c: c.shared and c.seq % 2 != 0,
    example=_arguments(lnc_shard=True),
    tag="hw",
)
_row(
    "rank",
    (FULL,),
    "q and k must have shape [batch, heads, seq, d] and agree in all but heads, got "
    "{q.shape} and {k.shape}",
    lambda c: (
        c.q.ndim != 4
        or c.k.ndim != 4
        or (c.q.shape[0], *c.q.shape[2:]) != (c.k.shape[0], *c.k.shape[2:])
    ),
    example=_hf_arguments(k=np.zeros((1, 2, 3, 6), np.float32)),
    stage=0,
)
_row(
    "one_table",
    (FULL,),
    "exactly one of (cos and sin) and rope_cache must be given, got {odd_tables}",
    told("odd_tables", _odd_tables),
    example=_hf_arguments(sin=None),
    stage=0,
)
_row(
    "even",
    (FULL,),
    "d of q must be even and positive, got {q.shape}",
    size=Size("d", lambda c: c.d, multiple=2, minimum=2),
    example=_hf_arguments(shape=(1, 2, 3, 7), table=(1, 3, 7)),
)
_row(
    "tables",
    (FULL,),
    "tables must have shape [batch, seq, {width}] or [seq, {width}] = ({batch}, {seq}, "
    "{width}), got {tables}",
    lambda c: (
        tuple(c.tables)
        not in {(c.batch, c.seq, c.width), (1, c.seq, c.width), (c.seq, c.width)}
    ),
    example=_hf_arguments(table=(1, 3, 4)),
)
_row(
    "table_shapes",
    (FULL,),
    "cos and sin must have one shape, got {cos.shape} and {sin.shape}",
    lambda c: c.cos is not None and c.cos.shape != c.sin.shape,
    example=_hf_arguments(sin=np.zeros((3, 8), np.float32)),
)
_row(
    "seq",
    (FULL,),
    "the chip takes seq in multiples of 128, got {q.shape}",
    size=Size("seq", lambda c: c.seq, multiple=128),
    example=_hf_arguments(),
    tag="hw",
)
