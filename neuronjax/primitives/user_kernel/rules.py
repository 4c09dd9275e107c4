"""What `register_kernel` refuses."""

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from neuronjax.primitives import contracts, registry
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.table import TRANSFORMATIONS
from neuronjax.primitives.user_kernel.signature import Signature

PUBLIC = "register_kernel"
# Operations of one instruction, which are no macros.
INSIDE = ("MatMulMX", "QuantizeMX")


def facts(call: SimpleNamespace) -> Mapping[str, Any]:
    """The signature, where the function is given."""
    return dict(signature=None if call.kernel is None else Signature.of(call.kernel))


def _is_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.isascii()
        and name.isidentifier()
        and name[0].isupper()
        and not keyword.iskeyword(name)
    )


def _owner(call: SimpleNamespace) -> str:
    """Who has the NAME already; a function's own NAME is free for it."""
    name, backward = call.name, f"{call.name}Bwd"
    if not isinstance(name, str):
        return ""
    if name in registry.CATALOG or name in registry.ALIASES:
        return f"{name} is a NAME of the catalog"
    if name in INSIDE:
        return f"{name} is an operation inside leaves"
    if name in registry.USERS and not registry.USERS[name].emitter:
        return f"{name} is the backward of {name.removesuffix('Bwd')}"
    own = registry.USERS.get(backward)
    if call.backward is not None and own is not None and own.emitter:
        return f"{backward} is another kernel"
    return ""


def _is_function(x: Any) -> bool:
    try:
        return callable(x) and bool(inspect.signature(x))
    except (TypeError, ValueError):  # a built-in tells nothing
        return False


def _odd_functions(call: SimpleNamespace) -> str:
    """The first argument that must be a function with a signature and is not."""
    for word in ("kernel", "backward", "plain", "static", "example"):
        x = getattr(call, word)
        if x is not None and not _is_function(x):
            return f"{word} must be a function with a signature, got {x!r}"
    return ""


def _fault(call: SimpleNamespace) -> str:
    return "" if call.signature is None else call.signature.faults()


def _unlike(call: SimpleNamespace) -> str:
    """The first form that does not take what the function takes."""
    if call.signature is None or call.signature.faults():
        return ""
    settings = dict.fromkeys(call.signature.settings)
    operands = [None] * len(call.signature.operands)
    asked = dict(plain=operands, static=operands, backward=[None] * 3, example=[0, 0])
    if _is_function(call.outputs):
        asked |= dict(outputs=[])
    for word, args in asked.items():
        form = getattr(call, word)
        keywords = {} if word == "example" else settings
        try:
            _ = form is None or inspect.signature(form).bind(*args, **keywords)
        except TypeError as error:
            return f"{word} must take {_taken(word, call.signature)}: {error}"
    return ""


def _taken(word: str, signature: Signature) -> str:
    if word == "example":
        return "(dtype, batch)"
    if word == "outputs":
        return f"the settings, ({', '.join(signature.settings)})"
    if word == "backward":
        return f"({', '.join(['operands, outs, cotangents', *signature.settings])})"
    return f"what the function takes, {signature.python}"


def odd_names(outputs: Any) -> bool:
    """Whether `outputs` are no names of a tuple's arrays."""
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not outputs:
        return True
    words = [isinstance(x, str) and x.isidentifier() for x in outputs]
    return not all(words) or len(set(outputs)) < len(outputs)


def _odd_settings(call: SimpleNamespace) -> str:
    if call.settings is not None and not isinstance(call.settings, Mapping):
        return f"a mapping, got {type(call.settings).__name__}"
    if call.signature is None:
        return ""
    given, known = dict(call.settings or {}), call.signature.settings
    for key in given:
        if key not in known:
            return f"{key} is none of {', '.join(known) or 'them, it has none'}"
    lacking = [k for k in known if k not in {**call.signature.defaults(), **given}]
    if call.example is not None and lacking:
        return f"{', '.join(lacking)} must be given for the example"
    return ""


def _odd_refusals(refuses: Any) -> str:
    """What is no transformation, or has no reason."""
    if refuses is None:
        return ""
    if not isinstance(refuses, Mapping):
        return type(refuses).__name__
    without = [t for t, reason in refuses.items() if not _is_reason(reason)]
    unknown = [str(t) for t in refuses if t not in TRANSFORMATIONS]
    return ", ".join(unknown) or ", ".join(f"{t} without one" for t in without)


def _is_reason(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason.strip())


def _add(rule: str, message: str, broken: Callable, stage: int, **example: Any) -> None:
    def build(function: str) -> dict[str, Any]:
        return dict(name="Doubled", kernel=_doubled) | example

    text = "{function}: " + message
    contracts.add(
        Contract(f"{PUBLIC}.{rule}", (PUBLIC,), text, broken, None, build, stage=stage)
    )


def _doubled(x: Any, *, times: int = 2) -> Any:
    return times * x


_add(
    "name",
    "name must be a Python identifier that begins with a capital, got {name!r}",
    lambda c: not _is_name(c.name),
    0,
    name="my kernel",
)
_add(
    "taken",
    "name must be free, {owner}",
    told("owner", _owner),
    0,
    name="RoPE",
)
_add("functions", "{odd_functions}", told("odd_functions", _odd_functions), 0, plain=3)
_add(
    "signature",
    "{fault}",
    told("fault", _fault),
    1,
    kernel=lambda x, eps=1e-6: x * eps,
)
_add(
    "forms",
    "{unlike}",
    told("unlike", _unlike),
    1,
    backward=lambda cotangent: cotangent,
)
_add(
    "outputs",
    "outputs must be different identifiers, one for each array of a tuple, or a "
    "function of the settings, got {outputs!r}",
    lambda c: (
        c.outputs is not None and not callable(c.outputs) and odd_names(c.outputs)
    ),
    1,
    outputs="out",
)
_add(
    "settings",
    "settings must be those of the function, {odd_settings}",
    told("odd_settings", _odd_settings),
    1,
    settings=dict(time=3),
)
_add(
    "refuses",
    "refuses must map transformations to reasons, known are "
    + ", ".join(TRANSFORMATIONS)
    + ", got {odd_refusals}",
    told(
        "odd_refusals",
        lambda c: _odd_refusals(c.refuses),
    ),
    1,
    refuses=dict(vmapping="it cannot"),
)
_add(
    "reason",
    "no_derivative must be None or a reason in words, got {no_derivative!r}",
    lambda c: c.no_derivative is not None and not _is_reason(c.no_derivative),
    1,
    no_derivative=True,
)
_add(
    "no_derivative",
    "a kernel with no_derivative has no backward, got both",
    lambda c: c.no_derivative is not None and c.backward is not None,
    1,
    no_derivative="it counts",
    backward=lambda operands, outs, cotangents, times: (cotangents,),
)
