"""The config bag of a macro: its settings, as one static value that JAX can look up."""

import math
from collections.abc import Mapping
from typing import Any


class Bag(tuple):
    """Sorted pairs of settings, equal only to pairs of the same kinds.

    Python takes 1, 1.0 and True for one value, and 0.0 for -0.0. A macro that was
    traced for one of them must not answer for another: they may give other values.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and _kind(self) == _kind(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def bag_of(config: Mapping[str, Any]) -> Bag:
    """The bag that holds `config`."""
    return Bag(sorted(config.items()))


def _kind(value: Any) -> Any:
    """What tells equal settings apart: their types, and the sign of a zero."""
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    if isinstance(value, float) and value == 0:
        return type(value), math.copysign(1.0, value)
    return type(value)
