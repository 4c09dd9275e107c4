"""The rules of norms and reductions: what they read of a call, and one row each."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import described, is_flag, is_number, is_on
from neuronjax.primitives.options import FLOATS
from neuronjax.primitives.tile import MemrefTile

OPERANDS = ("x", "scale", "bias")
OPERATIONS = ("add", "max", "min", "mul", "absmax", "sumsq")
OPS = ("norm", *OPERATIONS)
# The norms of `op="norm"`, and those that may divide in front of a reduction.
NORMS = ("rms", "rms_skip_gamma", "layer", "l2")
DIVISORS = ("rms", "l2")

EMITTER = "neuron_reduce_macro_kernel"
_PUBLIC = ("rms_norm", "layer_norm")
_ALL = (*_PUBLIC, "reduce", EMITTER)
_GENERAL = ("reduce", EMITTER)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of any of these functions."""
    given: dict[str, Any] = {key: getattr(call, key, None) for key in OPERANDS}
    shape = tuple(getattr(call.x, "shape", ()))
    op = _word(getattr(call, "op", "norm"))
    axes = axes_of(getattr(call, "axis", -1), len(shape))
    sizes = tuple(shape[axis] for axis in axes or ())
    keys = ("eps", "offset", "hidden_actual")
    settings = {key: getattr(call, key) for key in keys if hasattr(call, key)}
    return given | dict(
        op=op,
        norm=_norm(call),
        normalises=op == "norm",
        shape=shape,
        axes=axes,
        sizes=sizes,
        d_model=math.prod(sizes),
        misfit=_misfit(call, given),
        unlike=_unlike(call, given, sizes),
        result=_result(call, shape, axes),
        traced=traced(settings),
        tile=any(isinstance(x, MemrefTile) for x in given.values()),
        actual=getattr(call, "hidden_actual", None),
        shown=described(getattr(call, "axis", -1)),
    )


def _word(value: Any) -> Any:
    """A setting that is a word; an array, which has no one truth value, by its type."""
    is_array = hasattr(value, "dtype") and not isinstance(value, str)
    return type(value).__name__ if is_array else value


def axes_of(axis: Any, rank: int) -> tuple[int, ...] | None:
    """The axes that `axis` names, sorted; `None` where it names none, or wrongly."""
    if axis is None:
        axis = range(rank)
    many = isinstance(axis, Sequence | range) and not isinstance(axis, str)
    named: list[Any] = list(axis) if many else [axis]
    if not all(isinstance(x, int | np.integer) for x in named):
        return None
    if any(isinstance(x, bool) or not -rank <= x < rank for x in named):
        return None
    found = sorted({int(x) % rank for x in named})
    return tuple(found) if found and len(found) == len(named) else None


def is_radicand(eps: float) -> bool:
    """Whether `eps` may be added under a root: finite and not negative."""
    return 0 <= float(eps) < math.inf


def traced(settings: dict[str, Any]) -> str:
    """The first setting that is no Python number, described; empty if none is."""
    for key, value in settings.items():
        if isinstance(value, str | bytes | bool):
            return f"{key} of type {type(value).__name__}"
        try:
            float(0 if key == "hidden_actual" and value is None else value)
        except (TypeError, ValueError):
            return f"{key} of type {type(value).__name__}"
    return ""


def _norm(call: SimpleNamespace) -> Any:
    """The norm that a call asks for; "rms" where the emitter is not told."""
    norm, op = _word(getattr(call, "norm", "rms")), getattr(call, "op", "norm")
    if norm is None and call.function == EMITTER and _word(op) == "norm":
        return "rms"
    return norm


def _misfit(call: SimpleNamespace, given: dict[str, Any]) -> str:
    """The operands that are no floating arrays; `scale` may be a number."""
    number = call.function in _GENERAL and is_number(given["scale"])
    held = {k: x for k, x in given.items() if not (k == "scale" and number)}
    return ", ".join(
        f"{key} of dtype {getattr(x, 'dtype', None)}"
        for key, x in held.items()
        if x is not None and not (hasattr(x, "dtype") and x.dtype in FLOATS)
    )


def _unlike(call: SimpleNamespace, given: dict[str, Any], sizes: tuple) -> str:
    """The gains of a norm that do not have the shape of the normalised axes."""
    general = call.function in _GENERAL
    fitting = dict(scale=(sizes, ()) if general else (sizes,), bias=(sizes,))
    name = "[d_model]" if len(sizes) == 1 else "that of the axes"
    return "; ".join(
        f"{key} must have shape {name} = {sizes}, got {np.shape(given[key])}"
        for key in ("scale", "bias")
        if given[key] is not None and np.shape(given[key]) not in fitting[key]
    )


def _result(call: SimpleNamespace, shape: tuple, axes: tuple | None) -> tuple:
    """The shape of a reduction."""
    if is_on(getattr(call, "keepdims", False)):
        return tuple(1 if i in (axes or ()) else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in (axes or ()))


def _is_wide(call: SimpleNamespace) -> bool:
    """Whether the scale of a reduction has not the shape of the result, or part."""
    scale, result = np.shape(call.scale), call.result
    if len(scale) > len(result):
        return True
    last = result[len(result) - len(scale) :]
    return any(a not in (1, b) for a, b in zip(scale, last, strict=True))


def _is_empty(call: SimpleNamespace) -> bool:
    """Whether there is no element where one is needed."""
    needs = call.op in ("max", "min", "absmax", "norm") or call.norm is not None
    return needs and any(isinstance(n, int) and n == 0 for n in call.sizes)


def _knows_norm(call: SimpleNamespace) -> bool:
    if call.function == "reduce":
        known = DIVISORS if call.normalises else (None, *DIVISORS)
    else:
        known = NORMS if call.normalises else (None, *DIVISORS)
    return call.norm in known


def _ill_fitting(call: SimpleNamespace) -> bool:
    """Whether an operand or setting has no use for the norm that is asked for."""
    if call.norm == "layer":
        return bool(call.offset or call.cast_before_scale or call.actual)
    if call.norm == "l2":
        return call.bias is not None or bool(call.actual)
    without = call.scale is None
    return call.bias is not None or without != (call.norm == "rms_skip_gamma")


def _unused(call: SimpleNamespace) -> bool:
    """Whether a reduction is given what only norms use."""
    settings = call.offset, call.cast_before_scale, call.actual
    return call.bias is not None or any(settings)


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`."""
    x, scale = np.zeros((2, 8), np.float32), np.zeros(8, np.float32)

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(x=x, scale=scale)
        if function == "reduce":
            given |= dict(op="norm", norm="rms", axis=-1)
        return given | changes

    return build


def _reducing(**changes: Any) -> Callable[[str], dict[str, Any]]:
    x = np.zeros((2, 8), np.float32)
    return lambda function: dict(dict(x=x, op="add", axis=1), **changes)


def _row(
    rule: str, functions: tuple[str, ...], message: str, *args: Any, **kwargs: Any
) -> None:
    text = "{function}: " + message
    contracts.add(Contract(f"reduce.{rule}", functions, text, *args, **kwargs))


contracts.add(*only_flags("rms_norm"))
_row(
    "tensors",
    _ALL,
    "NeuronReduceMacro has no tiled form: x, scale and bias must be tensors",
    lambda c: c.tile,
    example=lambda function: _arguments(x=MemrefTile.from_tensor(jnp.zeros((2, 8)), 1))(
        function
    ),
)
_row(
    "rank",
    (*_PUBLIC, EMITTER),
    "x must have shape [*batch, d_model] with d_model at least 1, got {shape}",
    lambda c: c.normalises and (not c.shape or 0 in c.sizes),
    example=_arguments(x=np.zeros((2, 0), np.float32)),
)
_row(
    "dtype",
    _ALL,
    "operands must be bfloat16, float16, float32 or float64, got {misfit}",
    lambda c: c.misfit,
    example=_arguments(x=np.zeros((2, 8), jnp.int32)),
)
_row(
    "static",
    _ALL,
    "eps, offset and hidden_actual must be Python numbers, known while tracing, got "
    "{traced}",
    lambda c: c.traced,
    example=_arguments(eps=np.zeros(2, np.float32)),
)
_row(
    "op",
    _GENERAL,
    f"op must be one of {', '.join(OPS)}, got {{op!r}}",
    lambda c: c.op not in OPS,
    example=_reducing(op="mean"),
)
_row(
    "axis",
    _GENERAL,
    "axis must be None, for all, or one or more different axes of x, got {shown} for "
    "shape {shape}",
    lambda c: c.axes is None,
    example=_reducing(axis=(0, -2)),
)
_row(
    "keepdims",
    _GENERAL,
    "keepdims must be True or False, known while tracing, and False for op norm, got "
    "{keepdims!r}",
    lambda c: not is_flag(c.keepdims) or (c.normalises and c.keepdims),
    example=_reducing(keepdims=2),
)
_row(
    "norm",
    ("reduce",),
    "norm must be rms or l2, or None for an op that is not norm, got {norm!r} for "
    "{op!r}",
    lambda c: c.op in OPS and not _knows_norm(c),
    example=_reducing(norm="layer"),
)
_row(
    "norms",
    (EMITTER,),
    f"norm must be one of {', '.join(NORMS)} for op norm, None, rms or l2 for others, "
    "got {norm!r} for {op!r}",
    lambda c: c.op in OPS and not _knows_norm(c),
    example=_arguments(norm="group"),
)
_row(
    "eps",
    _ALL,
    "eps must be finite and not negative, got {eps}",
    lambda c: not is_radicand(c.eps),
    example=_arguments(eps=-1e-6),
    stage=2,
)
_row(
    "vectors",
    _ALL,
    "{unlike}",
    lambda c: c.normalises and c.unlike,
    example=_arguments(scale=np.zeros(4, np.float32)),
    stage=2,
)
_row(
    "scale",
    _GENERAL,
    "scale must be one value, or broadcast to the result of shape {result}, got shape "
    "{scale.shape}",
    lambda c: not c.normalises and c.scale is not None and _is_wide(c),
    example=_reducing(scale=np.zeros(8, np.float32)),
    stage=2,
)
_row(
    "empty",
    _GENERAL,
    "{op} with norm {norm} has no value over an axis of size 0, got shape {shape}",
    _is_empty,
    example=_reducing(op="max", x=np.zeros((2, 0), np.float32)),
    stage=2,
)
_row(
    "hidden_actual",
    ("rms_norm", EMITTER),
    "hidden_actual must lie between 1 and d_model = {d_model}, got {actual}",
    lambda c: c.actual is not None and not 1 <= c.actual <= c.d_model,
    example=_arguments(hidden_actual=9),
    stage=2,
)
_row(
    "operands",
    (EMITTER,),
    "scale is for norm rms, l2 and layer, bias for layer, offset and cast_before_scale "
    "for the others, hidden_actual for rms, got norm {norm}",
    lambda c: c.normalises and _ill_fitting(c),
    example=_arguments(bias=np.zeros(8, np.float32)),
    stage=2,
)
_row(
    "unused",
    (EMITTER,),
    "bias, offset, cast_before_scale and hidden_actual are for op norm, got op {op}",
    lambda c: not c.normalises and _unused(c),
    example=_reducing(bias=np.zeros(8, np.float32)),
    stage=2,
)
