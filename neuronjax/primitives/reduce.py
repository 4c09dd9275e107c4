"""The norm macro `NeuronReduceMacro`, and `rms_norm` and `layer_norm` upon it.

Outputs carry the checkpoint names `reduce_out`, `reduce_mean` (LayerNorm) and
`reduce_rstd`: the statistics that `NeuronReduceMacroBwd` reads.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neuronjax.kernels import reduce as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.tile import MemrefTile

NAME, BACKWARD = "NeuronReduceMacro", "NeuronReduceMacroBwd"
NORMS = ("rms", "rms_skip_gamma", "layer")
OPERANDS = ("x", "scale", "bias")
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    given: dict[str, Any] = {key: getattr(call, key, None) for key in OPERANDS}
    shape = getattr(call.x, "shape", ())
    width = shape[-1] if shape else 0
    misfit = [
        f"{key} of dtype {getattr(x, 'dtype', None)}"
        for key, x in given.items()
        if x is not None and not (hasattr(x, "dtype") and x.dtype in _DTYPES)
    ]
    unlike = [
        f"{key} must have shape [d_model] = ({width},), got {np.shape(given[key])}"
        for key in ("scale", "bias")
        if given[key] is not None and np.shape(given[key]) != (width,)
    ]
    settings = {
        key: getattr(call, key)
        for key in ("eps", "offset", "hidden_actual")
        if hasattr(call, key)
    }
    return given | dict(
        d_model=width,
        misfit=", ".join(misfit),
        unlike="; ".join(unlike),
        traced=traced(settings),
        shape=shape,
        tile=any(isinstance(x, MemrefTile) for x in given.values()),
        actual=getattr(call, "hidden_actual", None),
    )


def is_radicand(eps: float) -> bool:
    """Whether `eps` may be added under a root: finite and not negative."""
    return 0 <= float(eps) < math.inf


def traced(settings: dict[str, Any]) -> str:
    """The first setting that is no Python number, described; empty if none is."""
    for key, value in settings.items():
        try:
            float(0 if key == "hidden_actual" and value is None else value)
        except (TypeError, ValueError):
            return f"{key} of type {type(value).__name__}"
    return ""


@contracts.contracted(_facts)
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


@contracts.contracted(_facts)
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


@contracts.contracted(_facts)
def neuron_reduce_macro_kernel(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    op: str = "norm",
    norm: str = "rms",
    axis: int = -1,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
) -> Array:
    """Emits `NeuronReduceMacro`: the norms that projections fuse, as a macro.

    Args:
        x: `[*batch, d_model]`.
        scale: the gain, `[d_model]`; for `rms_skip_gamma` None.
        bias: LayerNorm's offset, `[d_model]`.
        op: `"norm"`; plain reductions are not built yet and refuse.
        norm: `"rms"`, `"rms_skip_gamma"` or `"layer"`.
        axis: the last one; others are not built yet and refuse.
        eps: added to the mean square or variance.
        offset: added to the gain of a root-mean-square norm.
        cast_before_scale: round to the dtype of `x` before that gain.
        hidden_actual: columns that count in its mean.

    Returns:
        An array of the shape and dtype of `x`.
    """
    built = op == "norm" and norm in NORMS and axis in (-1, x.ndim - 1)
    if not built:
        raise NotImplementedError(
            f"neuron_reduce_macro_kernel: op={op!r}, norm={norm!r}, axis={axis} is not "
            f"built yet; op='norm' over the last axis is, with norm one of {NORMS}"
        )
    config = dict(
        op=op,
        norm=norm,
        eps=float(eps),
        offset=float(offset),
        cast_before_scale=bool(cast_before_scale),
        hidden_actual=None if hidden_actual is None else int(hidden_actual),
    )
    return reduce_family(x, scale, bias, name=NAME, **config)[0]


def _leaf_bwd(*operands, name, given, **config):
    return kernel.reduce_bwd(*operands, name=name, **config)


def _plain_bwd(*operands, name, given, **config):
    return kernel.reduce_plain_bwd(*operands, name=name, **config)


def _outputs(*, norm, **_):
    return ("out", "mean", "rstd") if norm == "layer" else ("out", "rstd")


def _gradients(*, given, **_):
    return tuple(f"d_{operand}" for operand in given)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    pairs = zip(OPERANDS, operands, strict=True)
    given = tuple(key for key, operand in pairs if operand is not None)
    grads = reduce_backward(
        *operands, *outs, *cotangents, name=BACKWARD, given=given, **config
    )
    found = dict(zip(given, grads, strict=True))
    return tuple(found.get(key) for key in OPERANDS)


def _example(name: str, dtype: Any, batch: int) -> Example:
    """LayerNorm with an offset; backwards too, with a cotangent for each statistic."""
    keys = iter(jax.random.split(jax.random.key(3), 8))
    x = jax.random.normal(next(keys), (batch, 3, 8), dtype)
    vectors = [jax.random.normal(next(keys), (8,), dtype) for _ in ("scale", "bias")]
    operands, config = (x, *vectors), dict(op="norm", norm="layer", eps=1e-2)
    if name == NAME:
        return Example(operands, config, (0, None, None), (0, 0, 0))
    outs = kernel.reduce_plain(*operands, name=NAME, **config)
    cotangents = [jax.random.normal(next(keys), o.shape, o.dtype) for o in outs]
    split, config = (0, None, None), dict(config, given=OPERANDS)
    return Example((*operands, *outs, *cotangents), config, split + 6 * (0,), split)


reduce_backward = MacroFamily(
    "reduce_bwd",
    (BACKWARD,),
    _leaf_bwd,
    plain=_plain_bwd,
    outputs=_gradients,
    example=_example,
)
reduce_family = MacroFamily(
    "reduce",
    (NAME,),
    kernel.reduce_fwd,
    plain=kernel.reduce_plain,
    outputs=_outputs,
    backward=_emit_backward,
    example=_example,
)

_PUBLIC = ("rms_norm", "layer_norm")
_ALL = (*_PUBLIC, "neuron_reduce_macro_kernel")


def _ill_fitting(c: SimpleNamespace) -> bool:
    """Whether an operand or setting has no use for the norm that is asked for."""
    if c.norm == "layer":
        return bool(c.offset or c.cast_before_scale or c.actual)
    return c.bias is not None or (c.scale is None) != (c.norm == "rms_skip_gamma")


def _arguments(**changes: Any):
    x, scale = np.zeros((2, 8), np.float32), np.zeros(8, np.float32)
    return lambda function: dict(dict(x=x, scale=scale), **changes)


contracts.add(
    Contract(
        "reduce.tensors",
        _ALL,
        "{function}: NeuronReduceMacro has no tiled form: x, scale and bias must be "
        "tensors",
        lambda c: c.tile,
        example=lambda function: _arguments(
            x=MemrefTile.from_tensor(jnp.zeros((2, 8)), 1)
        )(function),
    ),
    Contract(
        "reduce.rank",
        _ALL,
        "{function}: x must have shape [*batch, d_model] without an axis of size 0, "
        "got {shape}",
        lambda c: not c.shape or 0 in c.shape,
        example=_arguments(x=np.zeros((0, 8), np.float32)),
    ),
    Contract(
        "reduce.dtype",
        _ALL,
        "{function}: operands must be bfloat16, float16, float32 or float64, got "
        "{misfit}",
        lambda c: c.misfit,
        example=_arguments(x=np.zeros((2, 8), jnp.int32)),
    ),
    Contract(
        "reduce.static",
        _ALL,
        "{function}: eps, offset and hidden_actual must be Python numbers, known while "
        "tracing, got {traced}",
        lambda c: c.traced,
        example=_arguments(eps=np.zeros(2, np.float32)),
    ),
    Contract(
        "reduce.eps",
        _ALL,
        "{function}: eps must be finite and not negative, got {eps}",
        lambda c: not is_radicand(c.eps),
        example=_arguments(eps=-1e-6),
        stage=2,
    ),
    Contract(
        "reduce.vectors",
        _ALL,
        "{function}: {unlike}",
        lambda c: c.unlike,
        example=_arguments(scale=np.zeros(4, np.float32)),
        stage=2,
    ),
    Contract(
        "reduce.hidden_actual",
        ("rms_norm", "neuron_reduce_macro_kernel"),
        "{function}: hidden_actual must lie between 1 and d_model = {d_model}, got "
        "{actual}",
        lambda c: c.actual is not None and not 1 <= c.actual <= c.d_model,
        example=_arguments(hidden_actual=9),
        stage=2,
    ),
    Contract(
        "reduce.operands",
        ("neuron_reduce_macro_kernel",),
        "{function}: scale is for norm rms and layer, bias for layer, offset, "
        "cast_before_scale and hidden_actual for the others, got norm {norm}",
        lambda c: c.op == "norm" and _ill_fitting(c),
        example=_arguments(bias=np.zeros(8, np.float32)),
        stage=2,
    ),
)
