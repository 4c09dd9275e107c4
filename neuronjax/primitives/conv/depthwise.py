"""The convolution of each channel alone: the public function and its emitter."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.conv import depthwise_rules as rules
from neuronjax.primitives.conv.macro import DEPTHWISE, depthwise_family

Pair = tuple[int, int]


@contracts.contracted(rules.facts)
def depthwise_conv1d_implicit_gemm(
    img_ref: Float[Array, "batch channels 1 width"],
    filter_ref: Float[Array, "channels 1 1 taps"],
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0)),
    stride: Pair = (1, 1),
    rhs_dilation: Pair = (1, 1),
    lhs_dilation: Pair = (1, 1),
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    in_perm: Sequence[int] | None = None,
    kern_perm: Sequence[int] | None = None,
    out_perm: Sequence[int] | None = None,
) -> Float[Array, "batch channels 1 out"]:
    r"""Convolves each channel with its own filter along the last axis.

    $$\mathrm{out}_{n, c, 0, q} = \sum_s \mathrm{filter}_{c, 0, 0, s}\;
      \mathrm{xpad}_{n,\, c,\, q \cdot \mathrm{stride} + s}$$

    No tap is flipped, and nothing is summed over channels. `xpad` has `padding[1]`
    zeros around the width; there are `Q = (W + left + right - S) // stride + 1`
    results.

    Args:
        img_ref: `[N, C, 1, W]`, bfloat16, float16, float32 or float64.
        filter_ref: `[C, 1, 1, S]` in the dtype of `img_ref`.
        padding: zeros of height and width; those of the height, which is 1, must be
            `(0, 0)`.
        stride: of height and width; that of the height must be 1.
        rhs_dilation: positions between taps: `(1, 1)`.
        lhs_dilation: positions between those of the image: `(1, 1)`.
        feature_group_count: groups of channels: must be `C`. The default holds for one
            channel alone.
        batch_group_count: must be 1.
        in_perm: the order of the image's axes, None or `(0, 1, 2, 3)`: operands lie as
            they are described here.
        kern_perm: the same of the filter's axes.
        out_perm: the same of the result's axes.

    Returns:
        `[N, C, 1, Q]` in the dtype of `img_ref`, summed in float32, or float64 for
        float64. Its checkpoint name is `depthwise_conv1d_out`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip
            splits `C` over two cores and would lose the last of an odd number; here any
            `C` holds, and `neuronjax.can` reports the limit.

    Source:
        aws-neuron/nki-library, `depthwise_conv1d_implicit_gemm` of its experimental
        kernels.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]).reshape(1, 2, 1, 3)
        >>> w = jnp.array([[1.0, 2.0], [1.0, -1.0]]).reshape(2, 1, 1, 2)
        >>> causal = ((0, 0), (1, 0))
        >>> depthwise_conv1d_implicit_gemm(x, w, causal, feature_group_count=2)[0, :, 0]
        Array([[  2.,   5.,   8.],
               [-10., -10., -10.]], dtype=float32)
    """
    return depthwise_conv1d_kernel(
        img_ref, filter_ref, stride=stride[1], padding=padding[1]
    )


@contracts.contracted(rules.facts)
def depthwise_conv1d_kernel(
    img_ref: Float[Array, "batch channels 1 width"],
    filter_ref: Float[Array, "channels 1 1 taps"],
    *,
    stride: int = 1,
    padding: Pair = (0, 0),
    **hints: Any,
) -> Float[Array, "batch channels 1 out"]:
    """Emits `DepthwiseConv1D`.

    Args:
        img_ref: as in `depthwise_conv1d_implicit_gemm`.
        filter_ref: as in `depthwise_conv1d_implicit_gemm`.
        stride: of the width.
        padding: zeros before and behind the width.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[N, C, 1, Q]` in the dtype of `img_ref`.
    """
    config = dict(stride=int(stride), padding=tuple(map(int, padding)), **hints)
    return depthwise_family(img_ref, filter_ref, name=DEPTHWISE, **config)[0]
