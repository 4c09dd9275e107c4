"""Losses of a large vocabulary as layers, with the projection and without."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_fraction,
    require_from_zero,
    require_sizes,
    require_word,
)
from neuronjax.primitives.cross_entropy import cross_entropy, linear_cross_entropy
from neuronjax.primitives.fused_linear import fused_linear

_REDUCTIONS = ("mean", "sum", "none")


def _require(layer: str, reduction, label_smoothing, z_loss) -> None:
    require_word(layer, "reduction", reduction, _REDUCTIONS)
    require_from_zero(layer, z_loss=z_loss)
    require_fraction(layer, label_smoothing=label_smoothing)


class CrossEntropy(nnx.Module):
    """The twin of `neuronjax.cross_entropy`: it has settings, no parameters.

    Args:
        reduction: `"mean"`, `"sum"` or `"none"`.
        ignore_index: the target of tokens that do not count.
        label_smoothing: from 0 to 1.
        z_loss: from 0 on.
        axis: inside `shard_map`, the mesh axis that divides the classes.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = CrossEntropy(ignore_index=-1)
        >>> round(float(loss(jnp.zeros((2, 4)), jnp.array([3, -1]))), 4)  # log 4
        1.3863
    """

    def __init__(
        self,
        *,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        axis: str | None = None,
    ):
        _require("CrossEntropy", reduction, label_smoothing, z_loss)
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.axis = axis

    def __call__(
        self,
        logits: Float[Array, "*tokens vocab"],
        targets: Int[Array, "*tokens"],
        weights: Float[Array, "*tokens"] | None = None,
    ) -> Float[Array, "..."]:
        """The loss of logits and the classes that they should name."""
        return cross_entropy(
            logits,
            targets,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            weights=weights,
            axis=self.axis,
        )


class LinearCrossEntropy(nnx.Module):
    """The twin of `neuronjax.linear_cross_entropy`, with the projection's weight.

    The logits of all tokens never exist at once.

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

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> loss = LinearCrossEntropy(8, 16, rngs=nnx.Rngs(0))
        >>> loss(jnp.ones((2, 8)), jnp.array([3, 15])).shape
        ()
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
        require_sizes("LinearCrossEntropy", d_model=d_model, vocab=vocab)
        _require("LinearCrossEntropy", reduction, label_smoothing, z_loss)
        if block_size is not None:
            require_sizes("LinearCrossEntropy", block_size=block_size)
        require_dtypes("LinearCrossEntropy", dtype, param_dtype)
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
