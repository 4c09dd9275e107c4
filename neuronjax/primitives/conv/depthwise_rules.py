"""The rules of depthwise convolutions: what they read, and one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from neuronjax.kernels.conv.window import Window
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.conv.conv1d_rules import is_negative, is_padding, shape_of
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import described, is_count
from neuronjax.primitives.options import odd_dtype
from neuronjax.primitives.tile import MemrefTile

PUBLIC, EMITTER = "depthwise_conv1d_implicit_gemm", "depthwise_conv1d_kernel"
_BOTH = (PUBLIC, EMITTER)
_IN_ORDER = (0, 1, 2, 3)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call."""
    given = dict(img_ref=call.img_ref, filter_ref=call.filter_ref)
    x, w = map(shape_of, given.values())
    ranked = len(x) == len(w) == 4 and x[2] == w[1] == w[2] == 1
    padding, stride = _across(call)
    return dict(
        tile=any(isinstance(x, MemrefTile) for x in given.values()),
        x_shape=x,
        filters_shape=w,
        ranked=ranked,
        channels=x[1] if ranked else 1,
        width=x[3] if ranked else 0,
        taps=w[3] if ranked else 0,
        odd_dtype=odd_dtype(given),
        dtypes=[str(getattr(x, "dtype", None)) for x in given.values()],
        across=padding if is_padding(padding) else None,
        step=stride if is_count(stride) else None,
        shown=f"{described(call.padding)} and {described(call.stride)}",
    )


def _across(call: SimpleNamespace) -> tuple[Any, Any]:
    """Padding and stride of the width; None where a pair is none."""
    if call.function != PUBLIC:
        return call.padding, call.stride
    return _second(call.padding), _second(call.stride)


def _second(pair: Any) -> Any:
    return pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None


def _is_pair_of(value: Any, wanted: Any) -> bool:
    """Whether `value` is the pair `(wanted, wanted)` of integers."""
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(is_count(x, wanted) and x == wanted for x in value)


def _pads_height(call: SimpleNamespace) -> bool:
    return call.across is not None and not _is_pair_of(call.padding[0], 0)


def _strides_height(call: SimpleNamespace) -> bool:
    first = None if call.step is None else call.stride[0]
    return call.step is not None and not (is_count(first) and first == 1)


def _perms(call: SimpleNamespace) -> str:
    """The orders of axes that are not the described one, for the message."""
    names = ("in_perm", "kern_perm", "out_perm")
    given = {n: getattr(call, n) for n in names if getattr(call, n) is not None}
    odd = {n: x for n, x in given.items() if not _is_in_order(x)}
    return ", ".join(f"{name} = {described(x)}" for name, x in odd.items())


def _is_in_order(perm: Any) -> bool:
    return isinstance(perm, tuple | list) and tuple(perm) == _IN_ORDER


def _is_unknown(call: SimpleNamespace) -> bool:
    sizes = (call.width, call.taps)
    return call.ranked and not all(isinstance(n, int | np.integer) for n in sizes)


def _is_empty(call: SimpleNamespace) -> bool:
    known = call.ranked and not _is_unknown(call) and call.taps >= 1
    if not known or call.across is None or call.step is None:
        return False
    window = Window(call.step, tuple(call.across))
    return is_negative(window.results(call.width, call.taps))


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; shapes are of the operands."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(img_ref=(1, 2, 1, 5), filter_ref=(2, 1, 1, 3))
        if function == PUBLIC:
            given |= dict(feature_group_count=2)
        given |= changes
        for name in ("img_ref", "filter_ref"):
            if isinstance(given[name], tuple):
                given[name] = np.zeros(given[name], np.float32)
        return given

    return build


def _tiled(function: str) -> dict[str, Any]:
    x = MemrefTile.from_tensor(jnp.zeros((1, 2, 1, 5)), 1)
    return _arguments(img_ref=x)(function)


def _symbolic(function: str) -> dict[str, Any]:
    shape = (1, 2, 1, *export.symbolic_shape("w"))
    return _arguments(img_ref=jax.ShapeDtypeStruct(shape, np.float32))(function)


def _odd_channels(function: str) -> dict[str, Any]:
    groups = dict(feature_group_count=3) if function == PUBLIC else {}
    shapes = dict(img_ref=(1, 3, 1, 5), filter_ref=(3, 1, 1, 3))
    return _arguments(**shapes, **groups)(function)


def _moved(padding: Any = None, stride: Any = None) -> Callable[[str], dict[str, Any]]:
    """Arguments with this padding or stride of the width."""

    def build(function: str) -> dict[str, Any]:
        given = {}
        if padding is not None:
            given["padding"] = ((0, 0), padding) if function == PUBLIC else padding
        if stride is not None:
            given["stride"] = (1, stride) if function == PUBLIC else stride
        return _arguments(**given)(function)

    return build


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    text = "{function}: " + message
    contracts.add(
        Contract(f"depthwise_conv1d.{rule}", functions, text, *args, **kwargs)
    )


contracts.add(only_hints(EMITTER, _arguments()))
_row(
    "tensor",
    _BOTH,
    "DepthwiseConv1D has no tiled form: its operands must be tensors",
    lambda c: c.tile,
    example=_tiled,
)
_row(
    "rank",
    _BOTH,
    "img_ref must have shape [N, C, 1, W] and filter_ref [C, 1, 1, S], got {x_shape} "
    "and {filters_shape}",
    lambda c: not c.tile and not c.ranked,
    example=_arguments(img_ref=(1, 2, 5)),
)
_row(
    "channels",
    _BOTH,
    "filter_ref must have C = {channels}, the channels of img_ref, and C and S at "
    "least 1, got {filters_shape}",
    lambda c: (
        c.ranked
        and (c.filters_shape[0] != c.channels or any(map(is_negative, c.filters_shape)))
    ),
    example=_arguments(filter_ref=(3, 1, 1, 3)),
)
_row(
    "known",
    _BOTH,
    "W and S must be known while tracing, got {x_shape} and {filters_shape}",
    _is_unknown,
    example=_symbolic,
)
_row(
    "dtype",
    _BOTH,
    "operands must be bfloat16, float16, float32 or float64, got {odd_dtype}",
    lambda c: c.odd_dtype,
    example=_arguments(filter_ref=np.zeros((2, 1, 1, 3), np.int32)),
)
_row(
    "dtypes",
    _BOTH,
    "img_ref and filter_ref must have one dtype, got {dtypes[0]} and {dtypes[1]}",
    lambda c: len(set(c.dtypes)) > 1,
    example=_arguments(filter_ref=np.zeros((2, 1, 1, 3), np.float16)),
)
_row(
    "movement",
    _BOTH,
    "padding must hold integers of at least 0 and stride integers of at least 1, for "
    "height and width a pair each where there are both, known while tracing, got "
    "{shown}",
    lambda c: c.across is None or c.step is None,
    example=_moved(padding=(1, -1)),
)
_row(
    "height_padding",
    (PUBLIC,),
    "padding[0] must be (0, 0), the height is 1, got {padding[0]}",
    _pads_height,
    example=_arguments(padding=((1, 1), (0, 0))),
)
_row(
    "height_stride",
    (PUBLIC,),
    "stride[0] must be 1, the height is 1, got {stride[0]}",
    _strides_height,
    example=_arguments(stride=(2, 1)),
)
_row(
    "dilation",
    (PUBLIC,),
    "rhs_dilation and lhs_dilation must be (1, 1), got {rhs_dilation} and "
    "{lhs_dilation}",
    lambda c: not (_is_pair_of(c.rhs_dilation, 1) and _is_pair_of(c.lhs_dilation, 1)),
    example=_arguments(rhs_dilation=(1, 2)),
)
_row(
    "groups",
    (PUBLIC,),
    "feature_group_count must be C = {channels}, each channel has its own filter, got "
    "{feature_group_count}",
    lambda c: c.ranked and c.feature_group_count != c.channels,
    example=_arguments(feature_group_count=1),
)
_row(
    "batch_groups",
    (PUBLIC,),
    "batch_group_count must be 1, got {batch_group_count}",
    lambda c: c.batch_group_count != 1,
    example=_arguments(batch_group_count=2),
)
_row(
    "order",
    (PUBLIC,),
    "in_perm, kern_perm and out_perm must be None or (0, 1, 2, 3), operands lie in "
    "that order, got {odd_perms}",
    contracts.told("odd_perms", _perms),
    example=_arguments(in_perm=(0, 3, 1, 2)),
)
_row(
    "empty",
    _BOTH,
    "the filter must fit into the padded width, got S = {taps} for W = {width} with "
    "padding {across}",
    _is_empty,
    example=_arguments(filter_ref=(2, 1, 1, 6)),
)
_row(
    "chip_channels",
    _BOTH,
    "the chip splits C over its two cores and loses the last of an odd number, got "
    "{value}",
    size=Size("C", lambda c: c.channels, multiple=2),
    example=_odd_channels,
    tag="hw",
    stage=3,
)
