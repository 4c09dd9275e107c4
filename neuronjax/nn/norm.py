"""RMSNorm as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.primitives.reduce import rms_norm


class RMSNorm(nnx.Module):
    """The twin of `neuronjax.rms_norm`.

    Args:
        d_model: width of the last axis.
        eps: added to the mean square.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameter.
        rngs: where the initial values come from.
    """

    def __init__(
        self,
        d_model: int,
        *,
        eps: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        ones = nnx.initializers.ones_init()
        self.scale = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.eps, self.dtype = eps, dtype

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Array:
        """Normalises the last axis of `x`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return rms_norm(x, at_dtype(self.scale, self.dtype), eps=self.eps)
