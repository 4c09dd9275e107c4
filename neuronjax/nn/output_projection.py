"""The projection of attention's heads as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import require_dtypes, require_sizes
from neuronjax.primitives.output_projection import (
    output_projection_cte,
    output_projection_tkg,
)


class OutputProjection(nnx.Module):
    """The twin of `neuronjax.output_projection_cte`, and decoding of `_tkg`.

    Args:
        num_heads: heads.
        head_dim: width of a head.
        d_model: width of the output.
        bias: add a bias.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    The rows of `kernel`, `num_heads * head_dim`, carry the partition names
    `("tensor", None)`; the bias has none.

    Raises:
        ValueError: a setting is out of range; when called, what the functions refuse.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> OutputProjection(2, 4, 8, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 4, 3))).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        d_model: int,
        *,
        bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(num_heads=num_heads, head_dim=head_dim, d_model=d_model)
        require_sizes("OutputProjection", **sizes)
        require_dtypes("OutputProjection", dtype, param_dtype)
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        shape, names = (num_heads * head_dim, d_model), ("tensor", None)
        self.kernel = parameter(init, shape, names, rngs, param_dtype)
        offset = parameter(zeros, shape[1:], (None,), rngs, param_dtype)
        self.bias = offset if bias else None
        self.dtype = dtype

    def __call__(
        self, heads: Float[Array, "batch num_heads head_dim seq"]
    ) -> Float[Array, "batch seq d_model"]:
        """Projects the heads of whole sequences, as attention with `tp_out` gives."""
        return output_projection_cte(*self._operands(heads))

    def decode(
        self, heads: Float[Array, "head_dim batch num_heads seq"]
    ) -> Float[Array, "tokens d_model"]:
        """Projects the heads of a decode step; row `b * seq + s` is token `s`."""
        return output_projection_tkg(*self._operands(heads))

    def _operands(self, heads: Array) -> tuple[Array, Array, Array | None]:
        heads = heads if self.dtype is None else heads.astype(self.dtype)
        bias = None if self.bias is None else at_dtype(self.bias, self.dtype)[None]
        return heads, at_dtype(self.kernel, self.dtype), bias
