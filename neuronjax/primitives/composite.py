"""The lowering of a macro as a `lax.composite`, named `neuron.<NAME>`."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

_KNOWN = bool | int | float | str | np.generic | np.dtype


def composite(call: Callable, ctx: Any, params: dict[str, Any]) -> Callable:
    """`call` as a composite whose attributes are the config bag."""
    if ctx.dim_var_values:  # a decomposition cannot receive them
        raise NotImplementedError(
            f"{params['name']}: the composite route needs fixed sizes and one "
            "platform: export once for each, or use the inline route."
        )
    bag = dict(params["config"])
    if params["axes"]:
        bag["vmap_axes"] = tuple(dims for dims, _ in params["axes"])
    attributes = {key: _attribute(value) for key, value in bag.items()}
    name = f"neuron.{params['name']}"
    named = lax.composite(lambda *a, **_: call(*a), name=name, version=1)
    return functools.partial(named, **attributes)


def _attribute(value):
    """StableHLO knows no None, and JAX drops one silently: it is spelled out.

    So is any other setting of a user's kernel that StableHLO does not know: the member
    of an enum by its name, a function by its own.
    """
    if isinstance(value, tuple):
        return tuple(map(_attribute, value))
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, _KNOWN):
        return value
    return "none" if value is None else getattr(value, "__name__", str(value))
