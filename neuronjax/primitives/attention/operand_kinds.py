"""Whether an argument of attention is an array, a mask, a number: for its rules."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.kinds import is_number


def not_array(
    call: SimpleNamespace, names: tuple[str, ...], needed: bool = False
) -> str:
    """The first of these arguments that is no array, described; None may be absent."""
    for name in names:
        x = getattr(call, name)
        if x is None and not needed:
            continue
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return f"{name} must be an array, got {type(x).__name__}"
    return ""


def is_soft_cap(cap: Any) -> bool:
    """Whether a score over the cap is a normal float32; None is no cap."""
    return cap is None or 1e-30 <= cap <= 1e30


def is_scale(scale: Any) -> bool:
    """Whether `scale` is None, an array, or a finite number known while tracing."""
    if scale is None or (hasattr(scale, "dtype") and not is_number(scale)):
        return True
    return is_number(scale) and bool(np.isfinite(scale))


def is_mask(mask: Any) -> bool:
    """Whether nonzero can mean keep: a float mask is mostly an additive one."""
    return mask is None or not jnp.issubdtype(mask.dtype, jnp.floating)


def is_wide_float(x: Any) -> bool:
    """Whether `x` is None or floating, two bytes or more."""
    if x is None:
        return True
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize > 1
