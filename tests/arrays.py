"""Arrays for tests, made by NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(x: Any, dtype: Any) -> jax.Array:
    """`x` as an array of `dtype`.

    Its values are rounded by NumPy: `jnp.asarray` would compile a program for each
    shape, which takes longer than most of what tests do with the array.
    """
    return jax.device_put(np.asarray(x, jnp.dtype(dtype)))
