"""The enums of aws-neuron/nki-library; every function takes a member or its name."""

import difflib
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax.numpy as jnp


class ActFnType(enum.Enum):
    """The activation between the projections of an MLP."""

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3


class NormType(enum.Enum):
    """The norm that is fused in front of a projection."""

    NO_NORM = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    RMS_NORM_SKIP_GAMMA = 3


class RouterActFnType(enum.Enum):
    """What turns a router's logits into affinities."""

    SIGMOID = 0
    SOFTMAX = 1


class QuantizationType(enum.Enum):
    """How weights and activations are quantized."""

    NONE = 0
    STATIC = 1
    ROW = 2
    MX = 3
    STATIC_MX = 4
    ROW_MX = 5


class ExpertAffinityScaleMode(enum.Enum):
    """Where a token's affinity for an expert is multiplied in."""

    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2
    PRE_SCALE_DELAYED = 3


class MoECTEImplementation(enum.Enum):
    """How the cores share the prefill of a mixture of experts."""

    shard_on_block = 0
    shard_on_i = 1
    shard_on_i_hybrid = 2
    shard_on_i_dropping = 3
    shard_on_block_mx = 4
    shard_on_i_mx = 5
    shard_on_i_mx_hybrid = 6


class BlockShardStrategy(enum.Enum):
    """Which blocks a core takes: half of them in a row, or every other one."""

    HI_LO = 0
    PING_PONG = 1


class ShardOption(enum.Enum):
    """Which axis the cores split in the backward of a mixture of experts."""

    AUTO = 0
    SHARD_ON_HIDDEN = 1
    SHARD_ON_INTERMEDIATE = 2
    BASELINE_LNC1 = 3


class AffinityOption(enum.Enum):
    """Whether affinities multiply an expert's output or what its down weight meets."""

    AFFINITY_ON_H = 0
    AFFINITY_ON_I = 1


class KernelTypeOption(enum.Enum):
    """Whether an expert has one block of fixed capacity, or as many as it needs."""

    DROPPING = 0
    DROPLESS = 1


# What the config bag of a macro calls each norm.
NORM_CONFIG = {
    NormType.NO_NORM: "none",
    NormType.RMS_NORM: "rms",
    NormType.LAYER_NORM: "layer",
    NormType.RMS_NORM_SKIP_GAMMA: "rms_skip_gamma",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def member(kind: type[enum.Enum], value: object) -> Any:
    """The member of `kind` that `value` is or names; None when there is none."""
    if isinstance(value, kind):
        return value
    return kind.__members__.get(value) if isinstance(value, str) else None


def members(kind: type[enum.Enum]) -> str:
    """The names of `kind`, for a message."""
    return ", ".join(kind.__members__)


# The dtypes of operands that are not quantized.
FLOATS = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def odd_dtype(operands: Mapping[str, Any]) -> str:
    """The first operand whose dtype is none of `FLOATS`, described; "" if none is."""
    for name, x in operands.items():
        if x is None:
            continue
        # NumPy takes None for float64: `None in FLOATS`.
        if not hasattr(x, "dtype"):
            return f"{name} of type {type(x).__name__}"
        if x.dtype not in FLOATS:
            return f"{name} of dtype {x.dtype}"
    return ""


class QKVOutputLayout(enum.Enum):
    """The axis order of the projected heads: `d` is the head dimension, `N` heads."""

    BSD = 0
    NBSd = 1
    NBdS = 2


class QKVWeightLayout(enum.Enum):
    """How the packed rows of a block-scaled weight lie."""

    CONTIGUOUS = 0
    MX_CONTIGUOUS = 1
    MX_INTERLEAVED = 2


# Options about memory on chip, and why an array has no use for them.
_NO_MEANING = {
    "sbm": "they lie in no SBUF that a buffer manager could divide",
    "store_output_in_sbuf": "a result in SBUF is a tile, and tiles give one",
    "output_in_sbuf": "tiles go to neuronjax.emit.expert_mlps_kernel, which gives one",
}


def refuses(instead: str = "", **off: object) -> Callable[[Function], Function]:
    """Marks options that refuse, and never answer wrongly.

    They are about memory on chip, which arrays do not have, or are not built yet: the
    message says which.

    Args:
        instead: what is built in place of those that are not yet, for the message.
        **off: for each option, the value that leaves it off, or a tuple of them; a
            call with another one raises `NotImplementedError` before anything else is
            looked at.
    """

    def mark(function: Function) -> Function:
        signature = inspect.signature(function)
        _REFUSED[function.__name__] = instead, off

        @functools.wraps(function)
        def checked(*args, **kwargs):
            given = bind_call(function.__name__, signature, args, kwargs).arguments
            reason = refusal(function.__name__, given)
            if reason is not None:
                raise NotImplementedError(reason)
            return function(*args, **kwargs)

        return cast(Function, checked)

    return mark


def bind_call(
    name: str, signature: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by parameter.

    Raises:
        TypeError: the call does not fit the signature; the message names the function
            and, for an unknown argument, those of similar names.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        near: list[str] = []
        for given in (given for given in kwargs if given not in signature.parameters):
            near += difflib.get_close_matches(given, signature.parameters)
        hint = f"; near matches: {', '.join(near)}" if near else ""
        raise TypeError(f"{name}() {error}{hint}") from None


# By function: what is built instead of options that are not yet, and all off values.
_REFUSED: dict[str, tuple[str, Mapping[str, object]]] = {}


def refusal(function: str, given: Mapping[str, object]) -> str | None:
    """Why a call is refused: the first option that `refuses` marks; None if none is."""
    instead, off = _REFUSED.get(function, ("", {}))
    for name, none in off.items():
        if name not in given:
            continue
        value = given[name]
        nones = none if isinstance(none, tuple) else (none,)
        if isinstance(nones[0], enum.Enum):
            value = member(type(nones[0]), value) or nones[0]
        if not any(_is_off(value, none) for none in nones):
            return f"{function}: {name} = {_shown(value)} {_reason(name, instead)}"
    return None


def _reason(option: str, instead: str) -> str:
    if option in _NO_MEANING:
        return f"has no meaning for arrays: {_NO_MEANING[option]}"
    return f"is not built yet; {instead}"


def _is_off(value: object, none: object) -> bool:
    if isinstance(none, bool | int | float) and isinstance(value, bool | int | float):
        return value == none
    return value is none


def _shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return repr(value) if isinstance(value, bool | int | float | str) else "given"
