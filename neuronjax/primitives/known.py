"""Rules on values: they hold where an operand's values are known while tracing.

Under `jit` an operand is a shape; what a leaf does then with a value that breaks the
rule is in its docstring.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from neuronjax.kernels.indices import bounded
from neuronjax.primitives.tile import MemrefTile


def known(x: Any) -> np.ndarray | None:
    """The values of an operand; `None` where it is traced, abstract or absent."""
    x = x.data if isinstance(x, MemrefTile) else x
    if x is None or isinstance(x, Tracer | jax.ShapeDtypeStruct):
        return None
    # In NumPy: under jit even a constant's comparison would be traced.
    return np.asarray(x)


def in_int32(x: Any, low: int, high: int) -> jax.Array:
    """`kernels.indices.bounded` of any integers.

    Those of NumPy are cut first: without x64 JAX would wrap int64 around.
    """
    if not isinstance(x, jax.Array):
        held = np.asarray(x)
        info = np.iinfo(held.dtype)
        held = np.clip(held, max(low, info.min), min(high, info.max))
        x = jnp.asarray(held.astype(np.int32))
    return bounded(x, low, high)


def is_epsilon(value: Any) -> bool:
    """Whether a number may be added under a root: finite and at least 0."""
    return 0 <= float(value) < math.inf


def require_divisors(function: str, **scales: Any) -> None:
    """Refuses a scale that divides and is not positive and finite.

    A scale of integers holds the exponents of blocks: any will do.

    Raises:
        ValueError: it names the first such scale.
    """
    for name, scale in scales.items():
        held = known(scale)
        if held is None or held.dtype.kind in "iu":
            continue
        wrong = held[~((held > 0) & np.isfinite(held))]
        if wrong.size:
            raise ValueError(
                f"{function}: {name} must be positive and finite, values are divided "
                f"by it before they are rounded, got {wrong[0]}"
            )


def require_slots(function: str, slots: Any, count: int) -> None:
    """Refuses slots outside `[0, count)`, and one that is named twice.

    Raises:
        ValueError: it names the first such slot.
    """
    held = known(slots)
    if held is None:
        return
    flat = held.ravel()
    outside = flat[(flat < 0) | (flat >= count)]
    if outside.size:
        raise ValueError(
            f"{function}: slot_mapping must lie in [0, {count}), the slots of the "
            f"caches, got {outside[0]}"
        )
    seen, times = np.unique(flat, return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"{function}: slot_mapping must name a slot once, got "
            f"{seen[times > 1][0]} twice"
        )
