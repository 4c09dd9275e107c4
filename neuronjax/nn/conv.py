"""Convolutions along one axis as layers."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_option,
    require_padding,
    require_sizes,
)
from neuronjax.primitives.conv import conv1d, depthwise_conv1d_implicit_gemm
from neuronjax.primitives.options import ActFnType


class Conv1D(nnx.Module):
    """The twin of `neuronjax.conv1d`: `[batch, channels_in, length]` to channels_out.

    Args:
        channels_in: channels of the input.
        channels_out: channels of the output.
        taps: length of a filter.
        stride: positions from one result to the next.
        padding: zeros left and right.
        dilation: positions from one tap to the next.
        activation: `"SiLU"`, `"GELU"`, `"GELU_Tanh_Approx"`, `"Swish"` or `None`.
        bias: add a bias.
        dtype: dtype of the computation; `None` keeps that of the input, which the
            parameters then take.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Filters `[taps, channels_in, channels_out]` carry the partition names
    `(None, None, "tensor")`, the bias `("tensor",)`.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = Conv1D(2, 4, 3, padding=(1, 1), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 2, 5))).shape
        (1, 4, 5)
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        taps: int,
        *,
        stride: int = 1,
        padding: tuple[int, int] = (0, 0),
        dilation: int = 1,
        activation: str | None = None,
        bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(channels_in=channels_in, channels_out=channels_out, taps=taps)
        require_sizes("Conv1D", **sizes, stride=stride, dilation=dilation)
        require_padding("Conv1D", padding)
        require_option("Conv1D", "activation", activation, ActFnType, none=True)
        require_dtypes("Conv1D", dtype, param_dtype)
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        shape, names = (taps, channels_in, channels_out), (None, None, "tensor")
        self.filters = parameter(init, shape, names, rngs, param_dtype)
        offset = parameter(zeros, shape[2:], names[2:], rngs, param_dtype)
        self.bias = offset if bias else None
        self.stride, self.padding, self.dilation = stride, tuple(padding), dilation
        self.activation, self.dtype = activation, dtype

    def __call__(
        self, x: Float[Array, "batch channels_in length"]
    ) -> Float[Array, "batch channels_out out"]:
        """Convolves `x` along its last axis."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return conv1d(
            x,
            at_dtype(self.filters, x.dtype),
            None if self.bias is None else at_dtype(self.bias, x.dtype),
            self.stride,
            self.padding,
            self.dilation,
            self.activation,
        )


class DepthwiseConv1D(nnx.Module):
    """The twin of `neuronjax.depthwise_conv1d_implicit_gemm`: each channel alone.

    Args:
        channels: channels of input and output.
        taps: length of a filter.
        stride: positions from one result to the next.
        padding: zeros left and right; `(taps - 1, 0)` is causal.
        dtype: dtype of the computation; `None` keeps that of the input, which the
            parameters then take.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    Filters `[channels, 1, 1, taps]` carry the partition names
    `("tensor", None, None, None)`.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = DepthwiseConv1D(2, 4, padding=(3, 0), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 2, 1, 5))).shape
        (1, 2, 1, 5)
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        stride: int = 1,
        padding: tuple[int, int] = (0, 0),
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(channels=channels, taps=taps, stride=stride)
        require_sizes("DepthwiseConv1D", **sizes)
        require_padding("DepthwiseConv1D", padding)
        require_dtypes("DepthwiseConv1D", dtype, param_dtype)
        # A result sums the taps of its own channel alone.
        init = nnx.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2, batch_axis=0
        )
        shape, names = (channels, 1, 1, taps), ("tensor", None, None, None)
        self.filters = parameter(init, shape, names, rngs, param_dtype)
        self.stride, self.padding, self.dtype = stride, tuple(padding), dtype

    def __call__(
        self, x: Float[Array, "batch channels 1 width"]
    ) -> Float[Array, "batch channels 1 out"]:
        """Convolves each channel of `x` along its last axis."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return depthwise_conv1d_implicit_gemm(
            x,
            at_dtype(self.filters, x.dtype),
            padding=((0, 0), self.padding),
            stride=(1, self.stride),
            feature_group_count=x.shape[1],
        )
