"""The norms of models and the reductions: all emit `NeuronReduceMacro`."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.reduce.macro import neuron_reduce_macro_kernel
from neuronjax.primitives.reduce.rules import facts


@contracts.contracted(facts)
def reduce(
    x: Float[Array, "..."],
    op: str,
    axis: int | Sequence[int] | None = None,
    *,
    scale: Float[Array, "..."] | float | None = None,
    norm: str | None = None,
    eps: float = 1e-6,
    keepdims: bool = False,
) -> Float[Array, "..."]:
    r"""Reduces `x` over any axes, or normalises it.

    $$z = \begin{cases} x & \text{without a norm} \\
      x \,/\, \sqrt{\sum x^2 / N + \epsilon} & \text{with one}
      \end{cases}, \qquad
      y = \mathrm{scale} \cdot \mathrm{op}(z)$$

    What `op` is, and its derivative by an element `z`:

    - `"add"`: the sum, 0 of nothing; 1.
    - `"mul"`: the product, 1 of nothing; the product of all others, zeros or not.
    - `"sumsq"`: the sum of squares, 0 of nothing; `2 z`.
    - `"max"`, `"min"`: the extreme; 1, shared equally among equal extremes.
    - `"absmax"`: the largest magnitude; the same times the sign, that of 0 being 1.
    - `"norm"`: `z` itself, not reduced; that of the norm.

    `N` is the number of elements for `"rms"` and 1 for `"l2"`. A NaN makes its result
    NaN. The gradient of an extreme, and of a norm, that is NaN is NaN for all elements
    of it; that of the other ops where the derivative above reads the NaN.

    Args:
        x: any shape of at least one axis, any floating dtype of 16 bits or more.
        op: as above.
        axis: the axes to reduce or normalise over, `None` for all.
        scale: multiplies the result: a number, or an array that broadcasts to it. For
            `"norm"` a gain of the shape of the normalised axes, in their order in `x`.
        norm: `None`, `"rms"` or `"l2"`; `"norm"` needs one.
        eps: added under the root, finite and not negative; in the units of `x**2`.
        keepdims: leave reduced axes with size 1.

    Returns:
        The reduction, or for `"norm"` an array of the shape of `x`, in the dtype of
        `x`: float32 arithmetic, or float64 for float64, rounded once. Checkpoint names:
        `reduce_out`, `reduce_reduced` (before the scale), with a norm `reduce_rstd`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. Extremes
            and norms of nothing have no value.

    Source:
        The definition of the NAME `NeuronReduceMacro`; for the norm Zhang and Sennrich
        2019, https://arxiv.org/abs/1910.07467, equation 4.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[3.0, -4.0], [0.0, 2.0]])
        >>> reduce(x, "absmax", 1).tolist()
        [4.0, 2.0]
        >>> reduce(x, "add", scale=0.25).item()
        0.25
        >>> [round(v, 6) for v in reduce(x, "norm", 1, norm="l2", eps=0.0)[0].tolist()]
        [0.6, -0.8]
    """
    if op == "norm" and norm == "rms" and scale is None:
        norm = "rms_skip_gamma"
    return neuron_reduce_macro_kernel(
        x, scale, op=op, norm=norm, axis=axis, eps=eps, keepdims=keepdims
    )


@contracts.contracted(facts)
def rms_norm(
    x: Float[Array, "*batch d_model"],
    scale: Float[Array, " d_model"] | None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
) -> Float[Array, "*batch d_model"]:
    r"""Normalises `x` by its root mean square over the last axis.

    $$y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot
      (\mathrm{scale} + \mathrm{offset})$$

    Where the sum of a row's squares exceeds the largest float32 (3.4e38, so from
    elements of about 1.8e19 on), the root is infinite and the row becomes zeros.

    Args:
        x: activations, `[*batch, d_model]`, any floating dtype.
        scale: learned gain, `[d_model]`, dimensionless; None for a gain of one.
        eps: added to the mean square, finite and not negative; in the units of `x**2`.
        offset: added to `scale`. Gemma stores `scale - 1`: there it is 1.
        cast_before_scale: round the normalised values to the dtype of `x` before the
            gain, as Hugging Face's Llama does; by default the result is rounded once.
        hidden_actual: columns that count in the mean; the rest hold zeros.

    Returns:
        An array of the shape and dtype of `x`; the statistics are float32, or float64
        for float64. Checkpoint names: `reduce_out`, `reduce_rstd`.

    Raises:
        ValueError: `scale` is not `[d_model]`, or a dtype or setting does not fit.

    Source:
        Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([2.0, -2.0]), scale=jnp.ones(2), eps=0.0)
        Array([ 1., -1.], dtype=float32)
    """
    return neuron_reduce_macro_kernel(
        x,
        scale,
        norm="rms_skip_gamma" if scale is None else "rms",
        eps=eps,
        offset=offset,
        cast_before_scale=cast_before_scale,
        hidden_actual=hidden_actual,
    )


@contracts.contracted(facts)
def layer_norm(
    x: Float[Array, "*batch d_model"],
    scale: Float[Array, " d_model"] | None,
    bias: Float[Array, " d_model"] | None = None,
    *,
    eps: float = 1e-6,
) -> Float[Array, "*batch d_model"]:
    r"""Centres `x` over the last axis and divides it by its standard deviation.

    $$y = \frac{x - \operatorname{mean}(x)}
      {\sqrt{\operatorname{var}(x) + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias}$$

    As in `rms_norm`, a row whose squares exceed the range of float32 loses its values:
    the bias is left.

    Args:
        x: activations, `[*batch, d_model]`, any floating dtype.
        scale: learned gain, `[d_model]`, dimensionless; None for a gain of one.
        bias: learned offset, `[d_model]`, in the units of the result.
        eps: added to the (population) variance, finite and not negative; in the units
            of `x**2`.

    Returns:
        An array of the shape and dtype of `x`; the statistics are float32, or float64
        for float64. Checkpoint names: `reduce_out`, `reduce_mean`, `reduce_rstd`.

    Raises:
        ValueError: `scale` or `bias` is not `[d_model]`, or a dtype or setting does not
            fit.

    Source:
        Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450, equation 4.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), eps=0.0)
        Array([-1.,  1.], dtype=float32)
    """
    return neuron_reduce_macro_kernel(x, scale, bias, norm="layer", eps=eps)
