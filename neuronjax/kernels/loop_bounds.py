"""Run-time bounds of loops that a mapped axis does not map."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def _extreme(reduce: Callable[[jax.Array], jax.Array]) -> Callable:
    """A reduction whose result is the same for all members of a mapped axis.

    A loop whose bound is mapped would select every carry at every step. Without any
    member the loop has none to run for: the bound is 0.
    """

    @custom_vmap
    def over_all(x):
        return jnp.zeros((), x.dtype) if 0 in x.shape else reduce(x)

    @over_all.def_vmap
    def _(size, mapped, x):
        return over_all(x), False

    return over_all


least, most = _extreme(jnp.min), _extreme(jnp.max)
