"""Running sums: the public function, the macros `CumSum` and `CumSumBwd`.

The output carries the checkpoint name `cum_sum_out`.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neuronjax.kernels import cumsum as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.tile import MemrefTile

NAME, BACKWARD = "CumSum", "CumSumBwd"
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    shape = tuple(getattr(call.x, "shape", ()))
    return dict(
        shape=shape,
        rank=len(shape),
        axis=getattr(call, "axis", -1),
        dtype=getattr(call.x, "dtype", None),
        tile=isinstance(call.x, MemrefTile),
        batch=shape[0] if len(shape) > 1 else 1,
        seq=shape[1] if len(shape) > 2 else 1,
        n=shape[-1] if shape else 0,
    )


@contracts.contracted(_facts)
def cumsum(x: Float[Array, "*batch n"], axis: int = -1) -> Float[Array, "*batch n"]:
    r"""Sums along the last axis up to each element, that element included.

    $$y_i = \sum_{j \le i} x_j$$

    Args:
        x: `[*batch, n]`, at least one axis, any floating dtype of 16 bits or more.
        axis: the last one, as the integer -1 or `rank - 1`.

    Returns:
        An array of the shape and dtype of `x`. The sums are float32, or float64 for
        float64, and rounded once. Its checkpoint name is `cum_sum_out`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (2048 batches, 10 rows each, 8192 columns) are reported by
            `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, `core/cumsum/cumsum.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> cumsum(jnp.array([1.0, 2.0, 4.0])).tolist()
        [1.0, 3.0, 7.0]
    """
    return cum_sum_kernel(x)


@contracts.contracted(_facts)
def cum_sum_kernel(x: Array, **hints: Any) -> Array:
    """Emits `CumSum` along the last axis.

    Args:
        x: `[*batch, n]`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        An array of the shape and dtype of `x`.
    """
    return cumsum_family(x, name=NAME, **hints)[0]


def _emit_backward(operands, outs, cotangents, *, name, **config):
    return cumsum_backward(*cotangents, name=BACKWARD, **config)


def _example(name: str, dtype: Any, batch: int) -> Example:
    x = jax.random.normal(jax.random.key(2), (batch, 2, 5), dtype)
    return Example((x,), {}, (0,), (0,))


# JAX has a primitive of the name `cumsum`.
cumsum_backward = MacroFamily(
    "cum_sum_bwd",
    (BACKWARD,),
    kernel.cumsum_bwd,
    plain=kernel.cumsum_plain,
    outputs=("dx",),
    example=_example,
)
cumsum_family = MacroFamily(
    "cum_sum",
    (NAME,),
    kernel.cumsum_fwd,
    plain=kernel.cumsum_plain,
    outputs=("out",),
    backward=_emit_backward,
    example=_example,
)


def _arguments(shape=(2, 3), dtype="float32", **changes: Any):
    return lambda function: dict(dict(x=np.zeros(shape, dtype)), **changes)


_BOTH = ("cumsum", "cum_sum_kernel")
contracts.add(
    only_hints("cum_sum_kernel", _arguments()),
    Contract(
        "cumsum.tensor",
        _BOTH,
        "{function}: CumSum has no tiled form: x must be a tensor",
        lambda c: c.tile,
        example=lambda function: dict(x=MemrefTile.from_tensor(jnp.zeros((2, 8)), 1)),
    ),
    Contract(
        "cumsum.rank",
        _BOTH,
        "{function}: x must have at least one axis, got {shape}",
        lambda c: c.rank < 1,
        example=_arguments(shape=()),
    ),
    Contract(
        "cumsum.dtype",
        _BOTH,
        "{function}: x must be bfloat16, float16, float32 or float64, got {dtype}",
        lambda c: c.dtype not in _DTYPES,
        example=_arguments(dtype="int32"),
    ),
    Contract(
        "cumsum.axis",
        ("cumsum",),
        "{function}: axis must be the last one, -1 or {rank} - 1, got {axis!r}",
        lambda c: (
            not isinstance(c.axis, int | np.integer) or c.axis not in (-1, c.rank - 1)
        ),
        example=_arguments(axis=0),
        stage=2,
    ),
    Contract(
        "cumsum.chip_batch",
        _BOTH,
        "{function}: the chip takes up to 2048 batches for x, got {shape}",
        size=Size("batch", lambda c: c.batch, minimum=0, maximum=2048),
        example=_arguments(shape=(2049, 1)),
        tag="hw",
        stage=3,
    ),
    Contract(
        "cumsum.chip_rows",
        _BOTH,
        "{function}: the chip takes up to 10 rows a batch for x, got {shape}",
        size=Size("S", lambda c: c.seq, minimum=0, maximum=10),
        example=_arguments(shape=(1, 11, 2)),
        tag="hw",
        stage=3,
    ),
    Contract(
        "cumsum.chip_columns",
        _BOTH,
        "{function}: the chip takes up to 8192 columns for x, got {shape}",
        size=Size("n", lambda c: c.n, minimum=0, maximum=8192),
        example=_arguments(shape=(1, 8193)),
        tag="hw",
        stage=3,
    ),
)
