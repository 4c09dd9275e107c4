"""The gated feed-forward block as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_from_zero,
    require_option,
    require_sizes,
)
from neuronjax.primitives.mlp import mlp, mlp_fused_add_kernel
from neuronjax.primitives.options import ActFnType


class MLP(nnx.Module):
    """The twin of `neuronjax.mlp`: RMSNorm, gate and up, activation, down.

    Args:
        d_model: width of the residual stream.
        d_ff: width between the projections.
        activation: `"SiLU"`, `"GELU"`, `"GELU_Tanh_Approx"` or `"Swish"`.
        norm: fuse an RMSNorm in front.
        norm_eps: added to the mean square.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Gate and up carry the partition names `(None, "tensor")`, down `("tensor", None)`.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> MLP(8, 12, rngs=nnx.Rngs(0))(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "SiLU",
        norm: bool = True,
        norm_eps: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_sizes("MLP", d_model=d_model, d_ff=d_ff)
        require_option("MLP", "activation", activation, ActFnType)
        require_from_zero("MLP", norm_eps=norm_eps)
        require_dtypes("MLP", dtype, param_dtype)
        init, ones = nnx.initializers.lecun_normal(), nnx.initializers.ones_init()
        split, rows = (None, "tensor"), ("tensor", None)
        self.gate = parameter(init, (d_model, d_ff), split, rngs, param_dtype)
        self.up = parameter(init, (d_model, d_ff), split, rngs, param_dtype)
        self.down = parameter(init, (d_ff, d_model), rows, rngs, param_dtype)
        gain = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.norm = gain if norm else None
        self.activation, self.norm_eps, self.dtype = activation, norm_eps, dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        residual: Float[Array, "batch seq d_model"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """Returns `MLP(x)`, plus `residual` where given, added inside the macro."""
        x = x if self.dtype is None else x.astype(self.dtype)
        weights = [at_dtype(w, self.dtype) for w in (self.gate, self.up, self.down)]
        gamma = None if self.norm is None else at_dtype(self.norm, self.dtype)[None]
        norm = "NO_NORM" if self.norm is None else "RMS_NORM"
        if residual is None:
            (out,) = mlp(
                x,
                *weights,
                normalization_weights_tensor=gamma,
                normalization_type=norm,
                activation_fn=self.activation,
                eps=self.norm_eps,
            )
            return out
        return mlp_fused_add_kernel(
            x,
            *weights,
            mlp_out=x,
            attn_out=residual.astype(x.dtype),
            gamma=gamma,
            norm="none" if gamma is None else "rms",
            activation=self.activation,
            eps=self.norm_eps,
        )
