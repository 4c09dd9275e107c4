"""The activations of the feed-forward block, each with its derivative.

Every function takes and returns the dtype that it is given: callers pass float32. The
names are those of aws-neuron/nki-library's `ActFnType`.
"""

import math
from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Float

Values = Float[Array, "*shape"]

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = (
    0.044715  # Hendrycks and Gimpel 2016, section 2, https://arxiv.org/abs/1606.08415
)
_SWISH_BETA = 1.702  # the same section: GELU is close to x * sigmoid(1.702 x)


def _sigmoid_gate(x: Values, beta: float) -> tuple[Values, Values]:
    gate = lax.logistic(beta * x)
    return x * gate, gate * (1 + beta * x * (1 - gate))


def silu(x: Values) -> tuple[Values, Values]:
    """`x * sigmoid(x)` and its derivative."""
    return _sigmoid_gate(x, 1.0)


def swish(x: Values) -> tuple[Values, Values]:
    """`x * sigmoid(1.702 x)` and its derivative: GELU's sigmoid form, not SiLU."""
    return _sigmoid_gate(x, _SWISH_BETA)


def gelu(x: Values) -> tuple[Values, Values]:
    """`x * Phi(x)` with the exact normal distribution function, and its derivative."""
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    pdf = lax.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return x * cdf, cdf + x * pdf


def gelu_tanh(x: Values) -> tuple[Values, Values]:
    """GELU's tanh form and its derivative."""
    t = lax.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope


ACTIVATIONS: dict[str, Callable[[jax.Array], tuple[jax.Array, jax.Array]]] = {
    "SiLU": silu,
    "GELU": gelu,
    "GELU_Tanh_Approx": gelu_tanh,
    "Swish": swish,
}


def activation(x: Values, kind: str) -> Values:
    """The activation called `kind`."""
    return ACTIVATIONS[kind](x)[0]


def activation_grad(x: Values, kind: str) -> tuple[Values, Values]:
    """The activation called `kind` and its derivative, which share their parts."""
    return ACTIVATIONS[kind](x)
