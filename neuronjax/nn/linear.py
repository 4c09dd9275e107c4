"""The fused linear layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, norm_parameters, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_from_zero,
    require_option,
    require_sizes,
)
from neuronjax.primitives.fused_linear import fused_linear
from neuronjax.primitives.options import ActFnType, NormType


class FusedLinear(nnx.Module):
    """The twin of `neuronjax.fused_linear`: norm, product, bias, activation, residual.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        bias: add a bias.
        scale: multiply each column by a learned scale.
        norm_type: `"NO_NORM"`, `"RMS_NORM"`, `"RMS_NORM_SKIP_GAMMA"` or `"LAYER_NORM"`.
        norm_eps: added to the mean square or the variance.
        activation: `"SiLU"`, `"GELU"`, `"GELU_Tanh_Approx"`, `"Swish"` or `None`.
        names: the partition names of the weight's rows and columns. Bias and scale
            carry that of the columns, the norm's parameters none.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = FusedLinear(4, 6, activation="GELU", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 4))).shape
        (2, 6)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        bias: bool = True,
        scale: bool = False,
        norm_type: str = "NO_NORM",
        norm_eps: float = 1e-6,
        activation: str | None = None,
        names: tuple[str | None, str | None] = (None, "tensor"),
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_sizes("FusedLinear", d_in=d_in, d_out=d_out)
        require_option("FusedLinear", "norm_type", norm_type, NormType)
        require_from_zero("FusedLinear", norm_eps=norm_eps)
        require_option("FusedLinear", "activation", activation, ActFnType, none=True)
        require_dtypes("FusedLinear", dtype, param_dtype)
        init = nnx.initializers.lecun_normal()
        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        self.kernel = parameter(init, (d_in, d_out), names, rngs, param_dtype)
        columns = (d_out,), (names[1],), rngs, param_dtype
        self.bias = parameter(zeros, *columns) if bias else None
        self.scale = parameter(ones, *columns) if scale else None
        self.gamma, self.beta = norm_parameters(norm_type, d_in, rngs, param_dtype)
        self.norm_type, self.norm_eps = norm_type, norm_eps
        self.activation, self.dtype = activation, dtype

    def __call__(
        self,
        x: Float[Array, "*batch d_in"],
        residual: Float[Array, "*batch d_out"] | None = None,
    ) -> Float[Array, "*batch d_out"]:
        """Returns the layer of `x`, plus `residual` where given, inside the macro."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return fused_linear(
            x,
            at_dtype(self.kernel, self.dtype),
            self._value(self.bias),
            None if residual is None else residual.astype(x.dtype),
            w_scale=self._value(self.scale),
            norm_type=self.norm_type,
            gamma=self._value(self.gamma),
            beta=self._value(self.beta),
            eps=self.norm_eps,
            activation_fn=self.activation,
        )

    def _value(self, weight: nnx.Param | None) -> Array | None:
        return None if weight is None else at_dtype(weight, self.dtype)
