"""RMSNorm with fp8 rows as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_from_zero,
    require_sizes,
    require_word,
)
from neuronjax.primitives.rmsnorm_quant import RmsNormQuantKernelArgs, rmsnorm_quant


class RMSNormQuant(nnx.Module):
    """The twin of `neuronjax.rmsnorm_quant`: the norm and its rows in fp8.

    For inference: fp8 codes carry no derivative, so differentiating it is refused.

    Args:
        d_model: width of the last axis.
        eps: added to the mean square.
        norm: normalise; else quantize only, without a parameter.
        quantization_type: `"ROW"`, a scale for each row, or `"STATIC"`, one that a call
            gives.
        lower_bound: what magnitudes are clipped to where it is above 1e-6, for `"ROW"`.
        packed: for `"ROW"`: the rows packed with their scales, or both apart.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameter.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = RMSNormQuant(2, eps=0.0, packed=False, rngs=nnx.Rngs(0))
        >>> codes, scale = layer(jnp.array([[3.0, -3.0]]))
        >>> (codes.astype(jnp.float32) * scale).tolist()
        [[1.0, -1.0]]
    """

    def __init__(
        self,
        d_model: int,
        *,
        eps: float = 1e-6,
        norm: bool = True,
        quantization_type: str = "ROW",
        lower_bound: float = 0.0,
        packed: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        words = ("ROW", "STATIC")
        require_sizes("RMSNormQuant", d_model=d_model)
        require_from_zero("RMSNormQuant", eps=eps, lower_bound=lower_bound)
        require_word("RMSNormQuant", "quantization_type", quantization_type, words)
        require_dtypes("RMSNormQuant", dtype, param_dtype)
        ones = nnx.initializers.ones_init()
        gain = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.scale = gain if norm else None
        self.settings = RmsNormQuantKernelArgs(
            lower_bound, "RMS_NORM" if norm else "NO_NORM", quantization_type, eps
        )
        self.packed = packed if quantization_type == "ROW" else None
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "*batch d_model"],
        input_dequant_scale: Float[Array, "128 1"] | None = None,
    ) -> Array | tuple[Array, Array]:
        """The codes of `x`, and the scales of its rows as `packed` says."""
        x = x if self.dtype is None else x.astype(self.dtype)
        scale = None if self.scale is None else at_dtype(self.scale, self.dtype)
        return rmsnorm_quant(
            x, scale, self.settings, input_dequant_scale, packed=self.packed
        )
