"""The macros `NeuronReduceMacro` and `NeuronReduceMacroBwd`.

Outputs carry the checkpoint names `reduce_out`, and `reduce_mean` (LayerNorm) and
`reduce_rstd`, the statistics, or `reduce_reduced`, what was reduced before the gain:
what `NeuronReduceMacroBwd` reads.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.reduce import leaf, plain
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.reduce.rules import OPERANDS, axes_of, facts

NAME, BACKWARD = "NeuronReduceMacro", "NeuronReduceMacroBwd"
PRODUCT, PRODUCT_BWD = f"{NAME} (product)", f"{BACKWARD} (product)"


@contracts.contracted(facts)
def neuron_reduce_macro_kernel(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | float | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    op: str = "norm",
    norm: str | None = None,
    axis: int | Sequence[int] | None = -1,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_before_scale: bool = False,
    hidden_actual: int | None = None,
    keepdims: bool = False,
) -> Float[Array, "..."]:
    """Emits `NeuronReduceMacro`: the norms that projections fuse, and reductions.

    Args:
        x: `[*batch, d_model]`, or any shape with other axes named.
        scale: of a norm the gain, of the shape of the normalised axes (`[d_model]`) or
            one value, for `rms_skip_gamma` None; of a reduction what multiplies the
            result and broadcasts to it.
        bias: LayerNorm's offset, of the shape of the normalised axes.
        op: `"norm"`, or `"add"`, `"max"`, `"min"`, `"mul"`, `"absmax"` or `"sumsq"`.
        norm: of `"norm"` `"rms"` (where None), `"rms_skip_gamma"`, `"layer"` or `"l2"`;
            of a reduction None, or `"rms"` or `"l2"`: `x` is divided by that root
            first.
        axis: the axes to normalise or reduce; None for all.
        eps: added to the mean square, the sum of squares or the variance.
        offset: added to the gain of a norm by a root of squares.
        cast_before_scale: round to the dtype of `x` before that gain.
        hidden_actual: elements that count in the mean of a root-mean-square norm.
        keepdims: leave reduced axes with size 1.

    Returns:
        An array of the dtype of `x`: of its shape, or reduced.
    """
    if scale is not None and not hasattr(scale, "dtype"):
        scale = jnp.asarray(scale, accumulator(x.dtype))
    norm = "rms" if op == "norm" and norm is None else norm
    config = dict(
        op=op,
        norm=norm,
        axis=axes_of(axis, x.ndim),
        keepdims=bool(keepdims),
        eps=float(eps),
        offset=float(offset),
        cast_before_scale=bool(cast_before_scale),
        hidden_actual=None if hidden_actual is None else int(hidden_actual),
    )
    return reduce_family(x, scale, bias, name=NAME, **config)[0]


def _leaf_bwd(*operands, name, given, **config):
    return leaf.reduce_bwd(*operands, name=name, **config)


def _plain_bwd(*operands, name, given, **config):
    return plain.reduce_plain_bwd(*operands, name=name, **config)


def _outputs(*, norm, op="norm", **_):
    if op != "norm":
        return ("out", "reduced") if norm is None else ("out", "reduced", "rstd")
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
    """LayerNorm with an offset, or a product behind a norm over two axes.

    Backwards too, with a cotangent for each statistic.
    """
    keys = iter(jax.random.split(jax.random.key(3), 8))
    x = jax.random.normal(next(keys), (batch, 3, 8), dtype)
    operands: tuple[Any, ...]
    if name in (PRODUCT, PRODUCT_BWD):
        x = x[..., :2]
        scale = jax.random.normal(next(keys), (batch, 1, 1), dtype)
        config = dict(op="mul", norm="rms", axis=(1, 2), keepdims=True, eps=1e-2)
        operands, split = (x, scale, None), (0, 0)
    else:
        vectors = [jax.random.normal(next(keys), (8,), dtype) for _ in range(2)]
        config = dict(op="norm", norm="layer", eps=1e-2)
        operands, split = (x, *vectors), (0, None, None)
    if name in (NAME, PRODUCT):
        return Example(operands, config, split, (0, 0, 0))
    outs = plain.reduce_plain(*operands, name=NAME, **config)
    cotangents = [jax.random.normal(next(keys), o.shape, o.dtype) for o in outs]
    config = dict(config, given=OPERANDS[: len(split)])
    return Example((*operands, *outs, *cotangents), config, split + 6 * (0,), split)


reduce_backward = MacroFamily(
    "reduce_bwd",
    (BACKWARD,),
    _leaf_bwd,
    plain=_plain_bwd,
    outputs=_gradients,
    example=_example,
    variants=(PRODUCT_BWD,),
)
reduce_family = MacroFamily(
    "reduce",
    (NAME,),
    leaf.reduce_fwd,
    plain=plain.reduce_plain,
    outputs=_outputs,
    backward=_emit_backward,
    example=_example,
    variants=(PRODUCT,),
)
