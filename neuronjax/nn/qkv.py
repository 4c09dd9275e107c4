"""The projection to query, key and value heads as a layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, norm_parameters, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_from_zero,
    require_multiple,
    require_option,
    require_sizes,
    require_word,
)
from neuronjax.primitives.options import NormType
from neuronjax.primitives.qkv import qkv


class QKV(nnx.Module):
    """The twin of `neuronjax.qkv`: residual, norm, product, bias and rotation.

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` is a multiple of it.
        head_dim: width of a head.
        bias: add a bias.
        norm_type: `"NO_NORM"`, `"RMS_NORM"`, `"RMS_NORM_SKIP_GAMMA"` or `"LAYER_NORM"`.
        norm_eps: added to the mean square or the variance.
        output_layout: `"BSD"` or `"NBSd"`.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    The columns of `kernel` (all query heads, then key heads, then value heads) carry
    the partition names `(None, "tensor")`, the bias `("tensor",)`.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> QKV(8, 2, 1, 4, rngs=nnx.Rngs(0))(jnp.ones((1, 3, 8))).shape
        (1, 3, 16)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        norm_type: str = "NO_NORM",
        norm_eps: float = 1e-6,
        output_layout: str = "BSD",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        require_sizes("QKV", **sizes, head_dim=head_dim)
        require_multiple("QKV", "num_heads", num_heads, "num_kv_heads", num_kv_heads)
        require_option("QKV", "norm_type", norm_type, NormType)
        require_from_zero("QKV", norm_eps=norm_eps)
        require_word("QKV", "output_layout", output_layout, ("BSD", "NBSd"))
        require_dtypes("QKV", dtype, param_dtype)
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        columns = (num_heads + 2 * num_kv_heads) * head_dim
        shape, names = (d_model, columns), (None, "tensor")
        self.kernel = parameter(init, shape, names, rngs, param_dtype)
        offset = parameter(zeros, shape[1:], names[1:], rngs, param_dtype)
        self.bias = offset if bias else None
        self.gamma, self.beta = norm_parameters(norm_type, d_model, rngs, param_dtype)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.norm_type, self.norm_eps = head_dim, norm_type, norm_eps
        self.output_layout, self.dtype = output_layout, dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"] | None = None,
        sin: Float[Array, "batch seq head_dim"] | None = None,
        mlp_prev: Float[Array, "batch seq d_model"] | None = None,
        attention_prev: Float[Array, "batch seq d_model"] | None = None,
    ) -> Array | tuple[Array, ...]:
        """Returns what `neuronjax.qkv` returns.

        Args:
            x: `[batch, seq, d_model]`.
            cos: `[batch, seq, head_dim]`; without tables nothing is rotated.
            sin: like `cos`.
            mlp_prev: added to `x` first, with `attention_prev`.
            attention_prev: like `mlp_prev`. The decode path, few tokens and no tables,
                returns the sum too.
        """
        rotated = cos is not None or sin is not None
        return qkv(
            self._at(x),
            at_dtype(self.kernel, self.dtype),
            self.output_layout,
            self._row(self.bias),
            fused_residual_add=mlp_prev is not None or attention_prev is not None,
            mlp_prev=self._at(mlp_prev),
            attention_prev=self._at(attention_prev),
            fused_norm_type=self.norm_type,
            gamma_norm_weights=self._row(self.gamma),
            layer_norm_bias=self._row(self.beta),
            norm_eps=self.norm_eps,
            fused_rope=rotated,
            cos_cache=cos,
            sin_cache=sin,
            d_head=self.head_dim,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
        )

    def _at(self, x: Array | None) -> Any:
        return x if x is None or self.dtype is None else x.astype(self.dtype)

    def _row(self, weight: nnx.Param | None) -> Array | None:
        return None if weight is None else at_dtype(weight, self.dtype)[None]
