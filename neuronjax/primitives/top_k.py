"""The k largest of each row, with their places."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from neuronjax.kernels.top_k import top_k_indices
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.tile import MemrefTile

_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
_STAGE, _STAGES = 16384, 128


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    shape = tuple(getattr(call.inp, "shape", ()))
    vocab, k = shape[-1] if shape else 0, call.k
    # How the chip's rotational scan cuts a row of V into stages, each of which keeps
    # at least its share of the k, in eights.
    stages, width, kept = 1, vocab, 0
    if isinstance(k, int | np.integer) and k > 0:
        k = int(k)
        stages = max(min(_STAGES, _ceil(k, 8)), _ceil(vocab, _STAGE), 1)
        kept, width = 8 * _ceil(_ceil(k, stages), 8), _ceil(vocab, stages)
    return dict(
        shape=shape,
        vocab=vocab,
        dtype=getattr(call.inp, "dtype", None),
        tile=isinstance(call.inp, MemrefTile),
        index=_integer(call.index_dtype),
        narrow=_is_narrow(call.index_dtype, vocab),
        stages=stages,
        kept=stages * kept,
        width=width,
    )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _integer(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.integer)
    except TypeError:
        return False


def _is_narrow(dtype: Any, vocab: int) -> bool:
    known = _integer(dtype) and isinstance(vocab, int)
    return known and vocab - 1 > int(jnp.iinfo(jnp.dtype(dtype)).max)


@contracts.contracted(_facts)
def topk(
    inp: Float[Array, "*rows vocab"],
    k: int,
    sorted: bool = True,
    *,
    index_dtype: DTypeLike = "int32",
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The `k` largest of each row, and where they are.

    Among equals the lowest index comes first, under any transformation. -inf is a value
    like any other; a NaN ranks above +inf; zeros of either sign are equal. Gradients
    flow to the chosen elements; the choice is a constant.

    Args:
        inp: `[*rows, V]`, at least two axes, any floating dtype of 16 bits or more.
        k: how many, between 1 and `V`.
        sorted: True for descending values. False allows any order: the result is the
            same descending one, for `k == V` too, where the chip returns the row as it
            is.
        index_dtype: of the indices, an integer that holds `V - 1`; the chip's are
            uint32.

    Returns:
        Values `[*rows, k]` in the dtype of `inp`, and indices with
        `inp[row, index] == value`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (how many stages a row is cut into and what they hold together) are
            reported by `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, the rotational top-k of `core/topk`.

    Example:
        >>> import jax.numpy as jnp
        >>> values, indices = topk(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 3)
        >>> values.tolist(), indices.tolist()
        ([[3.0, 3.0, 2.0]], [[1, 2, 3]])
    """
    index = top_k_indices(jnp.asarray(inp), int(k))
    values = jnp.take_along_axis(inp, index, axis=-1)
    return values, index.astype(jnp.dtype(index_dtype))


def _arguments(shape=(2, 5), dtype="float32", k=2, **changes: Any):
    return lambda function: dict(dict(inp=np.zeros(shape, dtype), k=k), **changes)


contracts.add(
    *only_flags("topk"),
    Contract(
        "topk.tensor",
        ("topk",),
        "{function}: top-k has no tiled form: inp must be a tensor",
        lambda c: c.tile,
        example=lambda function: dict(
            inp=MemrefTile.from_tensor(jnp.zeros((2, 8)), 1), k=2
        ),
    ),
    Contract(
        "topk.rank",
        ("topk",),
        "{function}: inp must have shape [*rows, V], at least two axes, got {shape}",
        lambda c: len(c.shape) < 2,
        example=_arguments(shape=(5,)),
    ),
    Contract(
        "topk.dtype",
        ("topk",),
        "{function}: inp must be bfloat16, float16, float32 or float64, got {dtype}",
        lambda c: c.dtype not in _DTYPES,
        example=_arguments(dtype="int32"),
    ),
    Contract(
        "topk.index_dtype",
        ("topk",),
        "{function}: index_dtype must be an integer dtype, got {index_dtype}",
        lambda c: not c.index,
        example=_arguments(index_dtype="float32"),
    ),
    Contract(
        "topk.index_width",
        ("topk",),
        "{function}: index_dtype must hold the largest index, V - 1 of V = {vocab}, "
        "got {index_dtype}",
        lambda c: c.narrow,
        example=_arguments(shape=(1, 129), index_dtype="int8"),
        stage=2,
    ),
    Contract(
        "topk.k",
        ("topk",),
        "{function}: k must be a Python integer between 1 and V = {vocab}, got {k}",
        lambda c: not (isinstance(c.k, int | np.integer) and 1 <= c.k <= c.vocab),
        example=_arguments(k=6),
        stage=2,
    ),
    Contract(
        "topk.chip_stages",
        ("topk",),
        "{function}: the chip takes rows cut into at most 128 stages, got {stages} for "
        "V = {vocab}",
        lambda c: c.stages > _STAGES,
        example=_arguments(shape=(1, 128 * _STAGE + 1)),
        tag="hw",
        stage=3,
    ),
    Contract(
        "topk.chip_candidates",
        ("topk",),
        "{function}: the chip takes a stage and all stages' candidates of at most "
        "16384 together, got {width} + {kept}",
        lambda c: c.stages > 1 and c.width + c.kept > _STAGE,
        example=_arguments(shape=(1, 32768), k=16),
        tag="hw",
        stage=3,
    ),
)
