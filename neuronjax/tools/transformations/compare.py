"""How a cell compares a macro with its plain reference, and how it fails."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.dtypes import accumulator, is_differentiable

VALUE, GRADIENT, SECOND = 2e-5, 1e-4, 5e-4


class Red(AssertionError):
    """A macro does not do under a transformation what its plain reference does."""


def require(holds: Any, message: str) -> None:
    """Fails the cell with `message` unless `holds`."""
    if not holds:
        raise Red(message)


def is_float(x: Any) -> bool:
    """Whether `x` takes part in differentiation: integers and fp8 values do not."""
    return is_differentiable(x.dtype)


def loss(fun: Callable) -> Callable:
    """A scalar in which every finite float output has a weight of its own."""

    def scalar(*args):
        total = 0.0
        for out in fun(*args):
            if is_float(out):
                wide = out.astype(accumulator(out.dtype))
                weight = np.cos(np.arange(out.size)).reshape(out.shape)
                seen = jnp.where(jnp.isfinite(wide), wide, 0)
                total = total + jnp.sum(jnp.sin(seen) * weight.astype(wide.dtype))
        return total

    return scalar


def grads(fun: Callable, n: int) -> Callable:
    """The gradients of `loss(fun)` for the first `n` arguments, jitted."""
    return jax.jit(jax.grad(loss(fun), tuple(range(n))))


def error(got: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest wanted value."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    difference = np.abs(np.where(same, 0, got) - np.where(same, 0, wanted))
    finite = np.abs(wanted[np.isfinite(wanted)])
    return difference.max(initial=0) / max(finite.max(initial=0), 1e-3)


def require_close(got: Any, wanted: Any, tolerance: float = VALUE) -> None:
    """Fails unless two pytrees of arrays have one structure and close values."""
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    require(
        len(got) == len(wanted), f"expected {len(wanted)} arrays, got {len(got)} arrays"
    )
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        types = [jax.typeof(x).str_short(short_dtypes=True) for x in (a, b)]
        same = a.shape == b.shape and a.dtype == b.dtype
        require(same, f"array {i}: expected {types[1]}, got {types[0]}")
        _require_near(i, a, b, tolerance)


def _require_near(i: int, a: Any, b: Any, tolerance: float) -> None:
    if jnp.issubdtype(b.dtype, jnp.inexact):
        # fp8: one step of the larger ones.
        limit, found = (tolerance if is_float(b) else 2**-3), error(a, b)
        require(
            found <= limit,
            f"array {i}: expected an error of at most {limit:.1e} of the largest value "
            f"of the plain reference, got {found:.1e}",
        )
    else:
        wrong = np.argwhere(np.asarray(a) != np.asarray(b))
        require(
            not len(wrong),
            f"array {i}: {len(wrong)} integers differ, the first at "
            f"{tuple(map(int, wrong[0])) if len(wrong) else ()}",
        )
