"""The projection to a vocabulary and its loss as one layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.primitives.cross_entropy import linear_cross_entropy
from neuronjax.primitives.fused_linear import fused_linear


class LinearCrossEntropy(nnx.Module):
    """The twin of `neuronjax.linear_cross_entropy`, with the projection's weight.

    The logits of all tokens never exist at once. `cross_entropy`, which has no
    parameters, needs no layer.

    Args:
        d_model: width of the hidden states.
        vocab: classes.
        reduction: `"mean"`, `"sum"` or `"none"`.
        ignore_index: the target of tokens that do not count.
        label_smoothing: from 0 to 1.
        z_loss: from 0 on.
        block_size: tokens whose logits exist at a time; chosen unless named.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameter.
        rngs: where the initial values come from.

    The weight `[d_model, vocab]` carries the partition names `(None, "tensor")`.
    """

    def __init__(
        self,
        d_model: int,
        vocab: int,
        *,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        block_size: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init, names = nnx.initializers.lecun_normal(), (None, "tensor")
        self.kernel = parameter(init, (d_model, vocab), names, rngs, param_dtype)
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.block_size, self.dtype = block_size, dtype

    def __call__(
        self,
        x: Float[Array, "*tokens d_model"],
        targets: Int[Array, "*tokens"],
        weights: Float[Array, "*tokens"] | None = None,
    ) -> Float[Array, "..."]:
        """The loss of hidden states and the classes that follow them."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return linear_cross_entropy(
            x,
            at_dtype(self.kernel, self.dtype),
            targets,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            weights=weights,
            block_size=self.block_size,
        )

    def logits(self, x: Float[Array, "*tokens d_model"]) -> Array:
        """The logits themselves, `[*tokens, vocab]`: for sampling."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return fused_linear(x, at_dtype(self.kernel, self.dtype))
