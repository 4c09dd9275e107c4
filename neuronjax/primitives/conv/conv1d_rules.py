"""The rules of calls of `conv1d`: what they read, and one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.conv.window import Window
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import described, is_count, is_flag
from neuronjax.primitives.options import ActFnType, member, members, odd_dtype
from neuronjax.primitives.tile import MemrefTile

PUBLIC, EMITTER = "conv1d", "conv1d_kernel"
FORMS = ("fast", "stacked")
_BOTH = (PUBLIC, EMITTER)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call."""
    operands = dict(x_in=call.x_in, filters=call.filters, bias=call.bias)
    given = {name: x for name, x in operands.items() if x is not None}
    shapes = {name: shape_of(x) for name, x in given.items()}
    ranked = len(shapes["x_in"]) == len(shapes["filters"]) == 3
    x, w = (shapes[name] if ranked else (0, 0, 0) for name in ("x_in", "filters"))
    return dict(
        tile=any(isinstance(x, MemrefTile) for x in given.values()),
        x_shape=shapes["x_in"],
        filters_shape=shapes["filters"],
        bias_shape=shapes.get("bias"),
        ranked=ranked,
        taps=w[0],
        channels_in=w[1],
        channels_out=w[2],
        channels=x[1],
        length=x[2],
        odd_dtype=odd_dtype(given),
        dtypes=", ".join(str(getattr(x, "dtype", None)) for x in given.values()),
        shown=described(call.activation_fn),
        strides=f"{described(call.stride)} and {described(call.dilation)}",
        padding_shown=described(call.padding),
        pads=is_padding(call.padding),
    )


def shape_of(x: Any) -> tuple[Any, ...]:
    """The shape of an operand; () where it has none."""
    return tuple(getattr(x, "shape", ()))


def is_padding(value: Any) -> bool:
    """Whether `value` is two counts of zeros."""
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(is_count(zeros, 0) for zeros in value)


def is_negative(size: Any) -> bool:
    """Whether a size is below 1; a symbolic one is left to run time."""
    return isinstance(size, int | np.integer) and bool(size < 1)


def _is_empty(call: SimpleNamespace) -> bool:
    moves = is_count(call.stride) and is_count(call.dilation) and call.pads
    if not moves or not call.ranked or is_negative(call.taps):
        return False
    window = Window(call.stride, tuple(call.padding), call.dilation)
    vars(call)["span"] = window.span(call.taps)
    return is_negative(window.results(call.length, call.taps))


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(x_in=(1, 2, 5), filters=(3, 2, 4)) | changes
        for name in ("x_in", "filters", "bias"):
            if isinstance(given.get(name), tuple):
                given[name] = np.zeros(given[name], np.float32)
        return given

    return build


def _tiled(function: str) -> dict[str, Any]:
    x = MemrefTile.from_tensor(jnp.zeros((1, 2, 5)), 1)
    return _arguments(x_in=x)(function)


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    text = "{function}: " + message
    contracts.add(Contract(f"conv1d.{rule}", functions, text, *args, **kwargs))


contracts.add(only_hints(EMITTER, _arguments()))
_row(
    "tensor",
    _BOTH,
    "Conv1D has no tiled form: its operands must be tensors",
    lambda c: c.tile,
    example=_tiled,
)
_row(
    "rank",
    _BOTH,
    "x_in must have shape [B, C_in, L] and filters [K, C_in, C_out], got {x_shape} and "
    "{filters_shape}",
    lambda c: not c.tile and not c.ranked,
    example=_arguments(filters=(2, 4)),
)
_row(
    "sizes",
    _BOTH,
    "K, C_in and C_out of filters must be at least 1, got {filters_shape}",
    lambda c: c.ranked and any(map(is_negative, c.filters_shape)),
    example=_arguments(x_in=(1, 0, 5), filters=(3, 0, 4)),
)
_row(
    "channels",
    _BOTH,
    "filters must have C_in = {channels}, the channels of x_in, got {channels_in}",
    lambda c: c.ranked and c.channels != c.channels_in,
    example=_arguments(filters=(3, 3, 4)),
)
_row(
    "bias",
    _BOTH,
    "bias must have shape [C_out] = ({channels_out},), got {bias_shape}",
    lambda c: c.ranked and c.bias is not None and c.bias_shape != (c.channels_out,),
    example=_arguments(bias=(1, 4)),
)
_row(
    "dtype",
    _BOTH,
    "operands must be bfloat16, float16, float32 or float64, got {odd_dtype}",
    lambda c: c.odd_dtype,
    example=_arguments(filters=np.zeros((3, 2, 4), np.int32)),
)
_row(
    "dtypes",
    _BOTH,
    "x_in, filters and bias must have one dtype, got {dtypes}",
    lambda c: len(set(c.dtypes.split(", "))) > 1,
    example=_arguments(filters=np.zeros((3, 2, 4), np.float16)),
)
_row(
    "strides",
    _BOTH,
    "stride and dilation must be integers of at least 1, known while tracing, got "
    "{strides}",
    lambda c: not (is_count(c.stride) and is_count(c.dilation)),
    example=_arguments(stride=0),
)
_row(
    "padding",
    _BOTH,
    "padding must be two integers (left, right) of at least 0, known while tracing, "
    "got {padding_shown}",
    lambda c: not c.pads,
    example=_arguments(padding=(1, -1)),
)
_row(
    "activation",
    _BOTH,
    f"activation_fn must be None or one of {members(ActFnType)}, got {{shown}}",
    lambda c: c.activation_fn is not None and not member(ActFnType, c.activation_fn),
    example=_arguments(activation_fn="ReLU"),
)
_row(
    "lnc_shard",
    _BOTH,
    "lnc_shard must be True or False, known while tracing, got {lnc_shard}",
    lambda c: not is_flag(c.lnc_shard),
    example=_arguments(lnc_shard=2),
)
_row(
    "form",
    (EMITTER,),
    f"form must be one of {', '.join(FORMS)}, got {{form!r}}",
    lambda c: c.form not in FORMS,
    example=_arguments(form="im2col"),
)
_row(
    "empty",
    _BOTH,
    "the window of dilation * (K - 1) + 1 = {span} positions must fit into the padded "
    "ones, got L = {length} with padding {padding}",
    _is_empty,
    example=_arguments(x_in=(1, 2, 4), dilation=2),
)
