"""The dtypes of packed MX values, by name or by NumPy's extension types."""

from typing import Any

import jax.numpy as jnp

from neuronjax.kernels.mx.formats import E2M1FN, E4M3FN, FORMATS, Format

# The names that the functions take; the vendor's end in "_x4".
NAMES = ", ".join(f"{name}_x4" for name in FORMATS)
_BY_CONTAINER = {"uint16": E2M1FN, "uint32": E4M3FN}


def format_of(value: Any) -> Format | None:
    """The format that `value` names, with or without `_x4`; None if it names none."""
    if isinstance(value, str):
        return FORMATS.get(value.removesuffix("_x4"))
    try:
        return FORMATS.get(jnp.dtype(value).name)
    except TypeError:
        return None


def weight_format(packed: Any, named: Any = None) -> Format | None:
    """The format of a packed weight: the one named, else that of its container.

    uint16 holds float4_e2m1fn. uint32 holds float8_e4m3fn, unless float8_e5m2 is named.
    """
    if named is not None:
        return format_of(named)
    return _BY_CONTAINER.get(str(getattr(packed, "dtype", "")))
