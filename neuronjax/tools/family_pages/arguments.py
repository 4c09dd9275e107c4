"""What a function takes, from its signature and its docstring: operands and options."""

import collections
import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.options import refusal
from neuronjax.primitives.tile import MemrefTile
from neuronjax.tools.family_pages import docstring
from neuronjax.tools.family_pages.table import code, table

# Rows that only send the reader to another function are folded into one line.
_ELSEWHERE = re.compile(r"^as in `[\w.]+`\.$")
_DTYPES = {
    "Float": "floating",
    "Int": "signed integer",
    "Integer": "integer",
    "UInt8": "uint8",
    "Bool": "bool",
    "Num": "number",
    "Shaped": "any",
}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a function.

    Attributes:
        name: with its stars.
        annotation: its type.
        default: its default; `inspect.Parameter.empty` if it must be given.
        meaning: what the docstring says.
    """

    name: str
    annotation: Any
    default: Any
    meaning: str

    @property
    def is_operand(self) -> bool:
        """Whether it is an array or a tile, and never a plain number."""
        leaves = list(_leaves(self.annotation))
        arrays = any(_is_array(leaf) for leaf in leaves)
        return arrays and not {float, int} & {*leaves}


def arguments(function: Callable) -> list[Argument]:
    """The arguments of `function`, in order."""
    told = _told(function)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        Argument(
            stars.get(p.kind, "") + name,
            p.annotation,
            p.default,
            told.get(name, ""),
        )
        for name, p in inspect.signature(function).parameters.items()
    ]


def _told(function: Callable) -> dict[str, str]:
    """What the docstring says of each argument; "likewise" is what stands before."""
    found: dict[str, str] = {}
    before = ""
    for name, meaning in docstring.read(function).entries("Args").items():
        if meaning != "likewise." or not _ELSEWHERE.match(before):
            before = meaning
        found[name] = before
    return found


def argument_tables(function: Callable) -> Iterator[str]:
    """The operands, the options, and the names that are explained elsewhere."""
    told = arguments(function)
    often = collections.Counter(a.meaning for a in told)
    plain = [a for a in told if often[a.meaning] < 3 or not _ELSEWHERE.match(a.meaning)]
    operands = [a for a in plain if a.is_operand]
    options = [a for a in plain if not a.is_operand]
    head = ("operand", "axes", "dtype", "default", "meaning")
    yield table(head, [_operand(a) for a in operands])
    head = ("option", "default", "values", "meaning")
    yield table(head, [_option(a) for a in options])
    for meaning in dict.fromkeys(a.meaning for a in told if a not in plain):
        names = code(a.name for a in told if a.meaning == meaning)
        yield f"{meaning[0].upper()}{meaning[1:-1]}: {names}."


def _operand(argument: Argument) -> tuple[str, ...]:
    leaves = list(_leaves(argument.annotation))
    typed = [leaf for leaf in leaves if hasattr(leaf, "dim_str")]
    axes = dict.fromkeys(_axes(leaf.dim_str) for leaf in typed)
    dtypes = dict.fromkeys(_DTYPES.get(t.dtype.__name__, "any") for t in typed)
    return (
        f"`{argument.name}`",
        " or ".join(a for a in axes if a),
        " or ".join(d for d in dtypes if d != "any"),
        _default(argument.default),
        argument.meaning,
    )


def _axes(names: str) -> str:
    """The axes as code; empty where the type leaves them all open."""
    axes = ["any" if name == "_" else name for name in names.split()]
    return "" if {*axes} <= {"any", "..."} and axes else f"`[{', '.join(axes)}]`"


def _option(argument: Argument) -> tuple[str, ...]:
    return (
        f"`{argument.name}`",
        _default(argument.default),
        values(argument.annotation),
        argument.meaning,
    )


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, enum.Enum):
        return f"`{value.name}`"
    if hasattr(value, "dtype") or value in (float, int):
        return f"`{jnp.dtype(value).name}`"
    return f"`{value!r}`"


def values(annotation: Any) -> str:
    """The values that an option may have, as far as its type tells."""
    words = [_words(leaf) for leaf in _leaves(annotation)]
    # The name of a member does as well as the member, and is not said.
    if any(_is_enum(leaf) for leaf in _leaves(annotation)):
        words = [word for word in words if word != "str"]
    return ", ".join(word for word in dict.fromkeys(words) if word)


def _words(leaf: Any) -> str:
    if _is_enum(leaf):
        return code(leaf.__members__)
    if leaf is np.dtype:
        return "dtype"
    if _is_array(leaf):
        return "array"
    if leaf in (type(None), Any, inspect.Parameter.empty) or not isinstance(leaf, type):
        return ""
    return leaf.__name__


def _is_enum(leaf: Any) -> bool:
    return isinstance(leaf, type) and issubclass(leaf, enum.Enum)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dim_str") or leaf in (jax.Array, MemrefTile)


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of; one that stands for dtypes is one."""
    origin = typing.get_origin(annotation)
    if origin is None or origin is type:
        yield annotation
        return
    parts = typing.get_args(annotation)
    if np.dtype in parts:
        yield np.dtype
        return
    if origin not in (typing.Union, types.UnionType) and not any(
        _is_array(leaf) for part in parts for leaf in _leaves(part)
    ):
        yield origin
        return
    for part in parts:
        yield from _leaves(part)


def refused_options(function: Callable) -> Mapping[str, str]:
    """The options that refuse whatever they are given, and the words they refuse in."""
    found = {}
    for argument in arguments(function):
        members = [
            member
            for leaf in _leaves(argument.annotation)
            if _is_enum(leaf)
            for member in leaf
        ]
        for value in (*members, True, 1, object()):
            reason = refusal(function.__name__, {argument.name: value})
            if reason is not None:
                found[argument.name] = reason
                break
    return found
