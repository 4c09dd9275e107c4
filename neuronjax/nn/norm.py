"""Norms as layers."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import require_dtypes, require_from_zero, require_sizes
from neuronjax.primitives.reduce import layer_norm, rms_norm


class RMSNorm(nnx.Module):
    """The twin of `neuronjax.rms_norm`.

    Args:
        d_model: width of the last axis.
        eps: added to the mean square.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameter.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> RMSNorm(2, eps=0.0, rngs=nnx.Rngs(0))(jnp.array([2.0, -2.0])).tolist()
        [1.0, -1.0]
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
        require_sizes("RMSNorm", d_model=d_model)
        require_from_zero("RMSNorm", eps=eps)
        require_dtypes("RMSNorm", dtype, param_dtype)
        ones = nnx.initializers.ones_init()
        self.scale = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.eps, self.dtype = eps, dtype

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Array:
        """Normalises the last axis of `x`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return rms_norm(x, at_dtype(self.scale, self.dtype), eps=self.eps)


class LayerNorm(nnx.Module):
    """The twin of `neuronjax.layer_norm`.

    Args:
        d_model: width of the last axis.
        eps: added to the variance.
        bias: add a learned offset.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> LayerNorm(2, eps=0.0, rngs=nnx.Rngs(0))(jnp.array([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        d_model: int,
        *,
        eps: float = 1e-6,
        bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_sizes("LayerNorm", d_model=d_model)
        require_from_zero("LayerNorm", eps=eps)
        require_dtypes("LayerNorm", dtype, param_dtype)
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        rows = (d_model,), (None,), rngs, param_dtype
        self.scale = parameter(ones, *rows)
        self.bias = parameter(zeros, *rows) if bias else None
        self.eps, self.dtype = eps, dtype

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Array:
        """Centres and normalises the last axis of `x`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        bias = None if self.bias is None else at_dtype(self.bias, self.dtype)
        return layer_norm(x, at_dtype(self.scale, self.dtype), bias, eps=self.eps)
