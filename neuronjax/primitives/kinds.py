"""What kind of setting a call is given, for the rules of several families."""

import math
from typing import Any

import numpy as np
from jax.core import Tracer


def is_count(value: Any, minimum: int = 1) -> bool:
    """Whether `value` is an integer that is known while tracing, at least `minimum`."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and bool(value >= minimum)


def is_flag(value: Any) -> bool:
    """Whether `value` is True or False, known while tracing."""
    return isinstance(value, bool | np.bool_)


def is_on(value: Any) -> bool:
    """Whether a switch is True: Python's, or NumPy's that a comparison gives."""
    return is_flag(value) and bool(value)


def is_number(x: Any, *others: Any) -> bool:
    """Whether `x` is one of `others`, or a real number that is known while tracing."""
    if any(x is other for other in others):
        return True
    kinds = int | float | np.integer | np.floating
    return isinstance(x, kinds) and not isinstance(x, Tracer | bool)


def is_crossed(upper: Any, lower: Any) -> bool:
    """Whether a clamp has no value between its limits; a NaN leaves none."""
    high = math.inf if upper is None else float(upper)
    return not (-math.inf if lower is None else float(lower)) <= high


def described(value: Any) -> str:
    """A refused setting in a message: an array by its type alone."""
    return type(value).__name__ if hasattr(value, "dtype") else repr(value)
