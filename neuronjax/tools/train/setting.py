"""One setting of a run: its default, what it means, and which values it takes."""

import dataclasses
import math
import numbers
import types
import typing
from typing import Any


def setting(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    most: float | None = None,
    one_of: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field whose limits are data: flags, checks and docs read them.

    Args:
        default: the value unless named; it has the field's type.
        about: what the setting means, a few words.
        least: the smallest number allowed.
        most: the largest.
        one_of: the only values allowed.
    """
    limits = dict(about=about, least=least, most=most, one_of=one_of)
    return dataclasses.field(default=default, metadata=limits)


def kinds_of(cls: type) -> dict[str, tuple[type, bool]]:
    """Each setting's type, and whether it may be None."""
    hints = typing.get_type_hints(cls)
    return {f.name: _kind(hints[f.name]) for f in dataclasses.fields(cls)}


def _kind(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType):
        (kind,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        return kind, True
    return hint, False


def read(name: str, value: Any, kind: type, optional: bool) -> Any:
    """`value` as the setting's type.

    YAML writes `1e-3` as text and `1` for a whole float; both are numbers here.

    Raises:
        ValueError: it is of another type.
    """
    if value is None and optional:
        return None
    if kind is float and isinstance(value, str):
        value = _number(value)
    if kind is float and isinstance(value, numbers.Real) and type(value) is not bool:
        return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}")


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def check(field: dataclasses.Field, value: Any) -> None:
    """Refuses a value outside the setting's limits.

    Raises:
        ValueError: it is; the message names the setting and what it takes.
    """
    limits = field.metadata
    if value is None:
        return
    if limits["one_of"] and value not in limits["one_of"]:
        words = " or ".join(map(str, limits["one_of"]))
        raise ValueError(f"{field.name} must be {words}, got {value}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name} must be finite, got {value}")
    if limits["least"] is not None and value < limits["least"]:
        raise ValueError(
            f"{field.name} must be at least {limits['least']}, got {value}"
        )
    if limits["most"] is not None and value > limits["most"]:
        raise ValueError(f"{field.name} must be at most {limits['most']}, got {value}")
