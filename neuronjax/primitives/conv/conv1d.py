"""The convolution over all channels: the public function and its emitter."""

from typing import Any

from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.conv import conv1d_rules as rules
from neuronjax.primitives.conv.macro import CONV1D, conv1d_family
from neuronjax.primitives.options import ActFnType, member


@contracts.contracted(rules.facts)
def conv1d(
    x_in: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    bias: Float[Array, " d_out"] | None = None,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
    activation_fn: ActFnType | str | None = None,
    lnc_shard: bool = False,
) -> Float[Array, "batch d_out out"]:
    r"""Convolves `x_in` with `filters` along its last axis.

    $$y_{bol} = \mathrm{act}\Big(\mathrm{bias}_o + \sum_{k, c} \mathrm{filters}_{kco}\;
      \mathrm{xpad}_{b,\, c,\, l \mathrm{stride} + k \mathrm{dilation}}\Big)$$

    It is a cross-correlation: no tap is flipped. `xpad` has `padding` zeros around the
    positions, and there are
    `L_out = (L + left + right - dilation * (K - 1) - 1) // stride + 1` results.

    Args:
        x_in: `[B, C_in, L]`, bfloat16, float16, float32 or float64.
        filters: `[K, C_in, C_out]`, in the dtype of `x_in`: the taps come first, as
            they do not in PyTorch's `[C_out, C_in, K]`.
        bias: `[C_out]`, in the dtype of `x_in`, added before the sums are rounded.
        stride: positions from one result to the next, at least 1.
        padding: zeros `(left, right)`, each at least 0.
        dilation: positions from one tap to the next, at least 1.
        activation_fn: `SiLU`, `GELU` (by the error function), `GELU_Tanh_Approx`,
            `Swish` or None. Swish is `x * sigmoid(1.702 x)`, as in the vendor's kernel
            and in `mlp`; the vendor's reference of the convolution has SiLU there.
        lnc_shard: the two cores of a logical core split `C_out`. It changes no value:
            `conv1d_plan` with `cores=2` shows it, `sharding.sharded_conv1d` does it on
            a mesh.

    Returns:
        `[B, C_out, L_out]` in the dtype of `x_in`; sums, bias and activation are
        float32, or float64 for float64. Its checkpoint names are `conv1d_out` and, with
        an activation, `conv1d_pre_activation`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The window
            must fit into the padded positions: an empty result is refused.

    Source:
        aws-neuron/nki-library, `conv1d` of its experimental kernels.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(1.0, 7.0).reshape(1, 1, 6)
        >>> conv1d(x, jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1), stride=2)
        Array([[[321., 543.]]], dtype=float32)
    """
    return conv1d_kernel(
        x_in,
        filters,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        activation_fn=activation_fn,
        lnc_shard=lnc_shard,
    )


@contracts.contracted(rules.facts)
def conv1d_kernel(
    x_in: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    bias: Float[Array, " d_out"] | None = None,
    *,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
    activation_fn: ActFnType | str | None = None,
    lnc_shard: bool = False,
    form: str = "fast",
    **hints: Any,
) -> Float[Array, "batch d_out out"]:
    """Emits `Conv1D`.

    Args:
        x_in: as in `conv1d`.
        filters: as in `conv1d`.
        bias: as in `conv1d`.
        stride: as in `conv1d`.
        padding: as in `conv1d`.
        dilation: as in `conv1d`.
        activation_fn: as in `conv1d`.
        lnc_shard: as in `conv1d`; the stacked form multiplies each core's columns
            apart.
        form: how the leaf adds the products: `"fast"`, a convolution of XLA, or
            `"stacked"`, the matmuls of `conv1d_plan`. Both agree to rounding.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[B, C_out, L_out]` in the dtype of `x_in`.
    """
    activation = member(ActFnType, activation_fn)
    config = dict(
        stride=int(stride),
        padding=tuple(map(int, padding)),
        dilation=int(dilation),
        activation=None if activation is None else activation.name,
        form=form,
        cores=2 if lnc_shard else 1,
        **hints,
    )
    return conv1d_family(x_in, filters, bias, name=CONV1D, **config)[0]
