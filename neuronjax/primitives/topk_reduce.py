"""The combine of sparse expert exchange: the function, `TopKReduce` and its backward.

The output carries the checkpoint name `top_k_reduce_out`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neuronjax.kernels import topk_reduce as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import FLOATS
from neuronjax.primitives.tile import MemrefTile

NAME, BACKWARD = "TopKReduce", "TopKReduceBwd"
PUBLIC, EMITTER = "topk_reduce", "top_k_reduce_kernel"
_BOTH = (PUBLIC, EMITTER)
_PACKED = tuple(map(jnp.dtype, ("bfloat16", "float16")))


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    packed = call.function == PUBLIC
    rows = call.input if packed else call.rows
    index = None if packed else call.index
    shape = tuple(getattr(rows, "shape", ()))
    columns = shape[-1] if len(shape) == 2 else 1
    return dict(
        tile=isinstance(rows, MemrefTile) or isinstance(index, MemrefTile),
        shape=shape,
        width=columns - kernel.INDEX_COLUMNS if packed else columns,
        dtype=getattr(rows, "dtype", None),
        index_shape=tuple(getattr(index, "shape", ())),
        index_dtype=getattr(index, "dtype", None),
    )


@contracts.contracted(_facts)
def topk_reduce(
    input: Float[Array, "rows width"], T: int, K: int
) -> Float[Array, "tokens d_model"]:
    r"""Sums the rows that experts sent back for each token, in the tokens' order.

    $$\mathrm{out}_t = \sum_{r:\ \mathrm{gid}_r = t} \mathrm{input}_{r, :H}, \qquad
      \mathrm{gid}_r = \mathrm{int32}(\mathrm{input}_{r, H:})$$

    It selects nothing: the rows were routed before. A row whose index is no token of
    `[0, T)` is never read; the buffer's unused rows, filled with -1.0, are such.

    Args:
        input: `[rows, H + 2]`, bfloat16 or float16: the receive buffer of a sparse
            all-to-all. The last two columns are the bits of one int32 token index, the
            low half in column `H`, the high half in column `H + 1`.
        T: tokens of the result.
        K: how many rows a token has: the chip adds the first `K` of up to 8. Here all
            rows of a token are added, be they fewer or more.

    Returns:
        `[T, H]` in the dtype of `input`, summed in float32 and rounded once; 0 for a
        token without rows. Its checkpoint name is `top_k_reduce_out`. The gradient of
        row `r` is that of `out[gid[r]]`; of the index columns, and of rows without a
        token, it is 0.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`T` 128, `K` 8, an even `H`) are reported by `neuronjax.can` and do
            not hold here.

    Source:
        aws-neuron/nki-library, `topk_reduce` of the experimental collectives.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> index = lax.bitcast_convert_type(jnp.array([1, 0, 1]), jnp.bfloat16)
        >>> rows = jnp.array([[1.0], [2.0], [4.0]], jnp.bfloat16)
        >>> topk_reduce(jnp.concatenate([rows, index], axis=1), T=3, K=2).tolist()
        [[2.0], [5.0], [0.0]]
    """
    packed = jnp.asarray(input)
    rows = packed[:, : -kernel.INDEX_COLUMNS]
    return top_k_reduce_kernel(rows, kernel.packed_index(packed), T=T, K=K)


@contracts.contracted(_facts)
def top_k_reduce_kernel(
    rows: Float[Array, "rows d_model"],
    index: Int[Array, " rows"],
    *,
    T: int,
    K: int,
    **hints: Any,
) -> Float[Array, "tokens d_model"]:
    """Emits `TopKReduce`.

    Args:
        rows: `[rows, H]`, any floating dtype.
        index: `[rows]` int32, the token of each row.
        T: as in `topk_reduce`.
        K: as in `topk_reduce`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[T, H]` in the dtype of `rows`.
    """
    config = dict(tokens=int(T), k=int(K), **hints)
    return topk_reduce_family(rows, index, name=NAME, **config)[0]


def _emit_backward(operands, outs, cotangents, *, name, **config):
    _, index = operands
    (d_out,) = cotangents
    return (*topk_reduce_backward(d_out, index, name=BACKWARD, **config), None)


def _static_leaf(*operands: Any, **config: Any) -> tuple:
    return kernel.topk_reduce_fwd(*operands, **config, static=True)


def _example(name: str, dtype: Any, batch: int) -> Example:
    """Two rows for a token, one, and none; two rows name no token."""
    index = jnp.array([2, 0, -1, 2, 4], jnp.int32)
    rows = len(index) if name == NAME else 4
    x = jax.random.normal(jax.random.key(4), (rows, batch), dtype)
    return Example((x, index), dict(tokens=4, k=2), (1, None), (1,))


topk_reduce_backward = MacroFamily(
    "top_k_reduce_bwd",
    (BACKWARD,),
    kernel.topk_reduce_bwd,
    plain=kernel.topk_reduce_plain_bwd,
    outputs=("d_rows",),
    example=_example,
)
topk_reduce_family = MacroFamily(
    "top_k_reduce",
    (NAME,),
    kernel.topk_reduce_fwd,
    plain=kernel.topk_reduce_plain,
    outputs=("out",),
    backward=_emit_backward,
    static=_static_leaf,
    example=_example,
)


def _arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(T=2, K=1, shape=(3, 4), dtype=jnp.bfloat16)
        given |= changes
        x = np.zeros(given.pop("shape"), given.pop("dtype"))
        index = given.pop("index", np.zeros(3, np.int32))
        if function == PUBLIC:
            return dict(given, input=x)
        return dict(given, rows=x, index=index)

    return build


def _tiled(function: str) -> dict[str, Any]:
    tile = MemrefTile.from_tensor(jnp.zeros((3, 4), jnp.bfloat16), 0)
    name = "input" if function == PUBLIC else "rows"
    return _arguments()(function) | {name: tile}


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    text = "{function}: " + message
    contracts.add(Contract(f"topk_reduce.{rule}", functions, text, *args, **kwargs))


contracts.add(only_hints(EMITTER, _arguments()))
_row(
    "tensor",
    _BOTH,
    "TopKReduce has no tiled form: its operands must be tensors",
    lambda c: c.tile,
    example=_tiled,
)
_row(
    "rank",
    (PUBLIC,),
    "input must have shape [rows, H + 2] with H at least 1, got {shape}",
    lambda c: not c.tile and (len(c.shape) != 2 or c.width < 1),
    example=_arguments(shape=(3, 2)),
)
_row(
    "rank_rows",
    (EMITTER,),
    "rows must have shape [rows, H] with H at least 1, got {shape}",
    lambda c: not c.tile and (len(c.shape) != 2 or c.width < 1),
    example=_arguments(shape=(3, 0)),
)
_row(
    "packed_dtype",
    (PUBLIC,),
    "input must be bfloat16 or float16, whose two columns hold an int32, got {dtype}",
    lambda c: c.dtype not in _PACKED,
    example=_arguments(dtype=np.float32),
)
_row(
    "dtype",
    (EMITTER,),
    "rows must be bfloat16, float16, float32 or float64, got {dtype}",
    lambda c: c.dtype not in FLOATS,
    example=_arguments(dtype=np.int32),
)
_row(
    "index",
    (EMITTER,),
    "index must be int32 of shape [rows], as many as {shape} has, got {index_dtype} "
    "{index_shape}",
    lambda c: not c.tile and (c.index_shape != c.shape[:1] or c.index_dtype != "int32"),
    example=_arguments(index=np.zeros(2, np.int32)),
)
_row(
    "counts",
    _BOTH,
    "T and K must be integers from 1 to 2147483647, the last int32, known while "
    "tracing, got {T} and {K}",
    lambda c: any(not is_count(x) or x > 2**31 - 1 for x in (c.T, c.K)),
    example=_arguments(K=0),
)
_row(
    "chip_tokens",
    _BOTH,
    "the chip takes T up to 128, got {T}",
    size=Size("T", lambda c: int(c.T), maximum=128),
    example=_arguments(T=129),
    tag="hw",
    stage=3,
)
_row(
    "chip_k",
    _BOTH,
    "the chip takes K up to 8, got {K}",
    size=Size("K", lambda c: int(c.K), maximum=8),
    example=_arguments(K=9),
    tag="hw",
    stage=3,
)
_row(
    "chip_width",
    _BOTH,
    "the chip splits H over its two cores and takes an even one, got {shape}",
    size=Size("H", lambda c: c.width, multiple=2),
    example=_arguments(shape=(3, 5)),
    tag="hw",
    stage=3,
)
