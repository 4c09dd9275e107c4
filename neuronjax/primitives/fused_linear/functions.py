"""The fused linear layer: the public function and its emitter."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.fused_linear.macro import NAME, fused_linear_family
from neuronjax.primitives.fused_linear.rules import facts
from neuronjax.primitives.options import NORM_CONFIG, ActFnType, NormType, member


@contracts.contracted(facts)
def fused_linear(
    x: Float[Array, "*batch d_in"],
    w: Shaped[Array, "d_in d_out"],
    bias: Float[Array, " d_out"] | None = None,
    residual: Float[Array, "*batch d_out"] | None = None,
    *,
    w_scale: Float[Array, "..."] | float | None = None,
    norm_type: NormType | str = NormType.NO_NORM,
    gamma: Float[Array, " d_in"] | None = None,
    beta: Float[Array, " d_in"] | None = None,
    eps: float = 1e-6,
    activation_fn: ActFnType | str | None = None,
) -> Float[Array, "*batch d_out"]:
    r"""Applies a linear layer with all that may stand around it, in this order.

    $$\mathrm{out} = \mathrm{act}\big((\mathrm{norm}(x)\, W) \cdot w_{scale} +
      \mathrm{bias}\big) + \mathrm{residual}$$

    Args:
        x: `[*batch, d_in]`, bfloat16, float16, float32 or float64.
        w: `[d_in, d_out]`, one of these, or fp8, whose values are constants.
        bias: `[d_out]`, added before the activation.
        residual: `[*batch, d_out]`, added last, inside the macro.
        w_scale: multiplies the product: a number, `[]`, or `[d_out]`, one value a
            column. It has a derivative, beside an fp8 weight too.
        norm_type: `NO_NORM`, `RMS_NORM`, `RMS_NORM_SKIP_GAMMA` or `LAYER_NORM`, over
            `d_in`.
        gamma: the norm's gain, `[d_in]`: given for `RMS_NORM`, optional for
            `LAYER_NORM`.
        beta: the offset of `LAYER_NORM`, `[d_in]`.
        eps: added to the mean square or the variance, finite and not negative; in the
            units of `x**2`.
        activation_fn: `SiLU`, `GELU` (by the error function), `GELU_Tanh_Approx`,
            `Swish` (`x * sigmoid(1.702 x)`) or None.

    Returns:
        `[*batch, d_out]` in the dtype of `x`. Factors are multiplied in the wider dtype
        of `x` and `w`, an fp8 one in that of `x`; everything else is float32, or
        float64, and rounded once. Checkpoint names: `fused_linear_out`, of the norm
        `fused_linear_mean` and `fused_linear_rstd`, and with an activation
        `fused_linear_pre_activation`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.

    Source:
        The definition of the NAME `FusedLinear`; for the norms Zhang and Sennrich 2019,
        https://arxiv.org/abs/1910.07467, equation 4, and Ba, Kiros and Hinton 2016,
        https://arxiv.org/abs/1607.06450, equation 4.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.array([[3.0, 4.0]]), jnp.array([[1.0], [2.0]])
        >>> fused_linear(x, w, jnp.array([1.0]), w_scale=0.5).tolist()
        [[6.5]]
        >>> fused_linear(x, w, residual=x[:, :1], norm_type="RMS_NORM_SKIP_GAMMA")
        Array([[6.11127]], dtype=float32)
    """
    return fused_linear_kernel(
        x,
        w,
        bias,
        residual,
        w_scale=w_scale,
        norm_type=norm_type,
        gamma=gamma,
        beta=beta,
        eps=eps,
        activation_fn=activation_fn,
    )


@contracts.contracted(facts)
def fused_linear_kernel(
    x: Float[Array, "*batch d_in"],
    w: Shaped[Array, "d_in d_out"],
    bias: Float[Array, " d_out"] | None = None,
    residual: Float[Array, "*batch d_out"] | None = None,
    *,
    w_scale: Float[Array, "..."] | float | None = None,
    norm_type: NormType | str = NormType.NO_NORM,
    gamma: Float[Array, " d_in"] | None = None,
    beta: Float[Array, " d_in"] | None = None,
    eps: float = 1e-6,
    activation_fn: ActFnType | str | None = None,
    **hints: Any,
) -> Float[Array, "*batch d_out"]:
    """Emits `FusedLinear`.

    Args:
        x: as in `fused_linear`.
        w: as in `fused_linear`.
        bias: as in `fused_linear`.
        residual: as in `fused_linear`.
        w_scale: as in `fused_linear`.
        norm_type: as in `fused_linear`.
        gamma: as in `fused_linear`.
        beta: as in `fused_linear`.
        eps: as in `fused_linear`.
        activation_fn: as in `fused_linear`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[*batch, d_out]` in the dtype of `x`.
    """
    if w_scale is not None and not hasattr(w_scale, "dtype"):
        w_scale = jnp.asarray(w_scale, accumulator(x.dtype))
    activation = member(ActFnType, activation_fn)
    config = dict(
        norm=NORM_CONFIG[member(NormType, norm_type)],
        activation=None if activation is None else activation.name,
        eps=float(eps),
        is_fp8_kernel=is_fp8(w.dtype),
        **hints,
    )
    operands = (x, w, w_scale, bias, residual, gamma, beta)
    return fused_linear_family(*operands, name=NAME, **config)[0]
