"""What the constructors of layers refuse, in one clear error before any parameter.

What depends on the input as well is refused by the function, when the layer is called.
"""

import enum
import math
import numbers
from typing import Any

import jax.numpy as jnp

from neuronjax.primitives.options import member, members


def require_sizes(layer: str, **sizes: Any) -> None:
    """Refuses a size that is not a positive integer."""
    for name, size in sizes.items():
        if not _is_count(size) or size < 1:
            _refuse(layer, name, "a positive integer", size)


def require_multiple(layer: str, name: str, size: int, of: str, unit: int) -> None:
    """Refuses a size that is not a multiple of another one."""
    if size % unit:
        _refuse(layer, name, f"a multiple of {of} = {unit}", size)


def require_at_most(layer: str, sizes: dict[str, int], of: str, limit: int) -> None:
    """Refuses a size above another one."""
    for name, size in sizes.items():
        if size > limit:
            _refuse(layer, name, f"at most {of} = {limit}", size)


def require_even(layer: str, name: str, size: int) -> None:
    """Refuses an odd size: rotary pairs leave no channel alone."""
    if size % 2:
        _refuse(layer, name, "even", size)


def require_from_zero(layer: str, **values: Any) -> None:
    """Refuses a number that is negative, infinite or NaN."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < math.inf:
            _refuse(layer, name, "finite and at least 0", value)


def require_positive(layer: str, **values: Any) -> None:
    """Refuses a number that is not positive and finite."""
    for name, value in values.items():
        if not _is_number(value) or not 0 < value < math.inf:
            _refuse(layer, name, "finite and above 0", value)


def require_fraction(layer: str, **values: Any) -> None:
    """Refuses a number outside of [0, 1]."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value <= 1:
            _refuse(layer, name, "from 0 to 1", value)


def require_rate(layer: str, **values: Any) -> None:
    """Refuses what is no probability to drop, below 1."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < 1:
            _refuse(layer, name, "at least 0 and below 1", value)


def require_padding(layer: str, padding: Any) -> None:
    """Refuses what is not two counts of zeros, left and right."""
    pair = padding if isinstance(padding, tuple | list) else ()
    if len(pair) != 2 or not all(_is_count(zeros) for zeros in pair):
        _refuse(layer, "padding", "two integers from 0 on", padding)


def require_ring(layer: str, axis: Any, lnc_axis: Any) -> None:
    """Refuses what is no name of a mesh axis; a rank may have no axis of cores."""
    if not isinstance(axis, str):
        _refuse(layer, "axis", "the name of a mesh axis", axis)
    if lnc_axis is not None and (not isinstance(lnc_axis, str) or lnc_axis == axis):
        _refuse(layer, "lnc_axis", "the name of another mesh axis or None", lnc_axis)


def require_option(
    layer: str, name: str, value: Any, kind: type[enum.Enum], *, none: bool = False
) -> None:
    """Refuses what is neither a member of `kind` nor the name of one.

    `None` passes with `none`.
    """
    if (value is None and none) or member(kind, value) is not None:
        return
    _refuse(layer, name, members(kind) + (" or None" if none else ""), value)


def require_word(layer: str, name: str, value: Any, words: tuple[Any, ...]) -> None:
    """Refuses what is none of `words`."""
    if not any(value is word or value == word for word in words):
        _refuse(layer, name, "one of " + ", ".join(map(repr, words)), value)


def require_dtypes(layer: str, dtype: Any, param_dtype: Any = jnp.float32) -> None:
    """Refuses what is no floating dtype; the computation's own may be `None`."""
    for name, value in dict(dtype=dtype, param_dtype=param_dtype).items():
        if not (value is None and name == "dtype") and not _is_floating(value):
            _refuse(layer, name, "a floating dtype", value)


def _is_floating(value: Any) -> bool:
    try:
        return value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False


def _is_count(value: Any) -> bool:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return int(value) >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _refuse(layer: str, name: str, expected: str, got: Any) -> None:
    raise ValueError(f"nn.{layer}: {name} must be {expected}, got {got!r}")
