"""The rules of calls on index lists: what they read, and one row each."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.known import known

_INPUTS = (jnp.dtype("float32"), jnp.dtype("int32"))


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def _known(x: Any) -> int | None:
    """The one value of a concrete array; None for a traced or absent one."""
    held = known(x)
    return None if held is None else int(held.reshape(-1)[0])


def _is_integer(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


def nonzero_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `find_nonzero_indices` or its variant."""
    shape, start = _shape(call.input_tensor), getattr(call, "col_start_id", None)
    tokens, columns = shape if len(shape) == 2 else (0, 0)
    n_cols = getattr(call, "n_cols", None)
    first = _known(start) if _shape(start) == (1,) and _is_integer(start) else None
    try:
        index = jnp.dtype(getattr(call, "index_dtype", "int32"))
    except TypeError:
        index = jnp.dtype("float32")
    signed = jnp.issubdtype(index, jnp.signedinteger)
    return dict(
        shape=shape,
        dtype=getattr(call.input_tensor, "dtype", None),
        T=tokens,
        C=columns,
        n_cols=n_cols,
        start=start,
        start_shape=_shape(start),
        known=first,
        count=columns if n_cols is None else n_cols,
        index=signed,
        largest=int(jnp.iinfo(index).max) if signed else 0,
        chunk=getattr(call, "chunk_size", None),
    )


def flatten_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `indexed_flatten`."""
    shape, offsets = _shape(call.input_tensor), _shape(call.row_offsets)
    rows, width = shape if len(shape) == 2 else (0, 0)
    start = call.row_offsets_start
    ready = _shape(start) == (1,) and _is_integer(start)
    sizes = (call.f_len, call.output_len, call.padding_val)
    whole = all(isinstance(n, int | np.integer) for n in sizes)
    return dict(
        shape=shape,
        E=rows,
        T=width,
        N=offsets[0] if len(offsets) == 1 else 0,
        offsets_shape=offsets,
        start=start,
        start_ok=start is None or ready,
        start_given=f"{getattr(start, 'dtype', type(start).__name__)} of shape "
        f"{_shape(start)}",
        known=_known(start) if ready else None,
        whole=whole,
        positive=whole and call.f_len > 0 and call.output_len > 0,
        integers=_is_integer(call.input_tensor) and _is_integer(call.row_offsets),
        dtype=getattr(call.input_tensor, "dtype", None),
        dtypes=f"{getattr(call.input_tensor, 'dtype', None)} and "
        f"{getattr(call.row_offsets, 'dtype', None)}",
    )


def add_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `dynamic_elementwise_add`."""
    shape, other = _shape(call.input_a), _shape(call.input_b)
    tiles = call.num_m_tiles
    ready = _shape(tiles) == (1, 1) and _is_integer(tiles)
    return dict(
        a_shape=shape,
        b_shape=other,
        M=shape[0] if len(shape) == 2 else 0,
        H=shape[1] if len(shape) == 2 else 0,
        a_dtype=getattr(call.input_a, "dtype", None),
        b_dtype=getattr(call.input_b, "dtype", None),
        ready=ready,
        tiles_shape=_shape(tiles),
        tiles_dtype=getattr(tiles, "dtype", None),
        known=_known(tiles) if ready else None,
    )


def _window_misfits(c: SimpleNamespace) -> bool:
    return c.known is not None and not 0 <= c.known <= c.C - c.count


def _nonzero(shape=(4, 2), dtype="float32", **changes: Any):
    given = dict(input_tensor=np.zeros(shape, dtype))
    return lambda function: dict(given, **changes)


_ONE = np.zeros(1, np.int32)
_NONZERO, _WITH_COUNT = "find_nonzero_indices", "find_nonzero_indices_with_count"


def _row(
    function: str | tuple[str, ...], rule: str, message: str, *args, **kwargs
) -> None:
    """Enters a row; its stage is the first unless named."""
    text = "{function}: " + message
    functions = function if isinstance(function, tuple) else (function,)
    contracts.add(Contract(f"{functions[0]}.{rule}", functions, text, *args, **kwargs))


_row(
    _NONZERO,
    "rank",
    "input_tensor must have shape [T, C] without an axis of size 0, got {shape}",
    lambda c: len(c.shape) != 2 or 0 in c.shape,
    example=_nonzero(shape=(4,)),
)
_row(
    _WITH_COUNT,
    "rank",
    "input_tensor must have shape [1, T], got {shape}",
    lambda c: len(c.shape) != 2 or c.shape[0] != 1 or c.T == 0,
    example=_nonzero(shape=(2, 4)),
)
_row(
    (_NONZERO, _WITH_COUNT),
    "dtype",
    "input_tensor must be float32 or int32, got {dtype}",
    lambda c: c.dtype not in _INPUTS,
    example=_nonzero(shape=(1, 4), dtype="float16"),
)
_row(
    _NONZERO,
    "window",
    "col_start_id, [1] integer, and n_cols, a positive integer, go together, got "
    "{start_shape} and {n_cols}",
    lambda c: (
        (c.start is None) != (c.n_cols is None)
        or (c.start is not None and (c.start_shape != (1,) or not _is_integer(c.start)))
        or (c.n_cols is not None and not (isinstance(c.n_cols, int) and c.n_cols > 0))
    ),
    example=_nonzero(n_cols=2),
)
_row(
    _NONZERO,
    "index_dtype",
    "index_dtype must be a signed integer dtype, got {index_dtype}",
    lambda c: not c.index,
    example=_nonzero(index_dtype="uint32"),
)
_row(
    _NONZERO,
    "index_width",
    "index_dtype must hold -1 and the largest index, T - 1 of T = {T}, got "
    "{index_dtype}",
    lambda c: isinstance(c.T, int) and c.T - 1 > c.largest,
    example=_nonzero(shape=(129, 2), index_dtype="int8"),
    stage=2,
)
_row(
    _NONZERO,
    "chunk",
    "chunk_size must be a positive Python integer or None, got {chunk}",
    lambda c: (
        c.chunk is not None
        and not (isinstance(c.chunk, int | np.integer) and c.chunk > 0)
    ),
    example=_nonzero(chunk_size="x"),
)
_row(
    _NONZERO,
    "inside",
    "the columns from {known}, {count} of them, must lie inside the {C} of "
    "input_tensor",
    _window_misfits,
    example=_nonzero(col_start_id=_ONE + 1, n_cols=2),
    stage=2,
)
_row(
    _NONZERO,
    "chip_tokens",
    "the chip takes T in multiples of 128 for input_tensor, got {shape}",
    size=Size("T", lambda c: c.T, multiple=128),
    example=_nonzero(shape=(130, 2)),
    tag="hw",
    stage=3,
)
_row(
    _NONZERO,
    "chip_chunk",
    "the chip takes chunk_size in multiples of 128 that divide T, got {chunk}",
    lambda c: c.chunk is not None and (c.chunk % 128 or c.T % c.chunk),
    example=_nonzero(shape=(256, 2), chunk_size=192),
    tag="hw",
    stage=3,
)
_row(
    _NONZERO,
    "chip_columns",
    "the chip's two cores take an even number of columns, got {count}",
    size=Size("C_out", lambda c: c.count, multiple=2, minimum=2),
    example=_nonzero(shape=(128, 3)),
    tag="hw",
    stage=3,
)


def _flatten(shape=(2, 4), offsets=2, **changes: Any):
    given: dict[str, Any] = dict(
        input_tensor=np.zeros(shape, np.int32),
        f_len=2,
        output_len=8,
        row_offsets=np.zeros(offsets, np.int32),
    )
    return lambda function: given | changes


_FLATTEN = "indexed_flatten"
_row(
    _FLATTEN,
    "rank",
    "input_tensor must have shape [E, T] and row_offsets [N], got {shape} and "
    "{offsets_shape}",
    lambda c: len(c.shape) != 2 or 0 in c.shape or len(c.offsets_shape) != 1,
    example=_flatten(shape=(4,)),
)
_row(
    _FLATTEN,
    "dtype",
    "input_tensor and row_offsets must be integers, got {dtypes}",
    lambda c: not c.integers,
    example=_flatten(input_tensor=np.zeros((2, 4), np.float32)),
)
_row(
    _FLATTEN,
    "static",
    "f_len and output_len must be positive Python integers, padding_val an integer, "
    "got {f_len}, {output_len} and {padding_val}",
    lambda c: not c.positive,
    example=_flatten(f_len=0),
)
_row(
    _FLATTEN,
    "start",
    "row_offsets_start must be [1] integer, got {start_given}",
    lambda c: not c.start_ok,
    example=_flatten(row_offsets_start=np.zeros(2, np.int32)),
)
_row(
    _FLATTEN,
    "blocks",
    "output_len and T must be multiples of f_len = {f_len}, got {output_len} and {T}",
    lambda c: c.output_len % c.f_len != 0 or c.T % c.f_len != 0,
    example=_flatten(f_len=3),
    stage=2,
)


def _padding_misfits(c: SimpleNamespace) -> bool:
    info = jnp.iinfo(jax.dtypes.canonicalize_dtype(c.dtype))
    return not info.min <= c.padding_val <= info.max


_row(
    _FLATTEN,
    "padding",
    "padding_val must fit the dtype of input_tensor, got {padding_val} and {dtype}",
    _padding_misfits,
    example=_flatten(input_tensor=np.zeros((2, 4), np.uint8)),
    stage=2,
)
_row(
    _FLATTEN,
    "offsets",
    "row_offsets must hold one offset for each of the E = {E} rows, with "
    "row_offsets_start at least so many, got {N}",
    lambda c: c.N < c.E if c.start is not None else c.N != c.E,
    example=_flatten(offsets=3),
    stage=2,
)
_row(
    _FLATTEN,
    "inside",
    "the offsets from {known}, one for each of {E} rows, must lie inside the {N} of "
    "row_offsets",
    lambda c: c.known is not None and not 0 <= c.known <= c.N - c.E,
    example=_flatten(offsets=3, row_offsets_start=_ONE + 2),
    stage=2,
)
_row(
    _FLATTEN,
    "chip_output",
    "the chip takes output_len in multiples of 128, got {output_len}",
    size=Size("output_len", lambda c: c.output_len, multiple=128),
    example=_flatten(),
    tag="hw",
    stage=3,
)
_row(
    _FLATTEN,
    "chip_pieces",
    "the chip takes T / f_len in multiples of 16, got {T} and {f_len}",
    lambda c: c.T // c.f_len % 16 != 0,
    example=_flatten(),
    tag="hw",
    stage=3,
)


def _add(shape=(256, 512), **changes: Any):
    given: dict[str, Any] = dict.fromkeys(
        ("input_a", "input_b"), np.zeros(shape, np.float32)
    )
    return lambda function: given | dict(num_m_tiles=np.ones((1, 1), int)) | changes


_DYNAMIC = "dynamic_elementwise_add"
_row(
    _DYNAMIC,
    "shapes",
    "input_a and input_b must have one shape [M, H] and dtype, got {a_shape} "
    "{a_dtype} and {b_shape} {b_dtype}",
    lambda c: len(c.a_shape) != 2 or c.a_shape != c.b_shape or c.a_dtype != c.b_dtype,
    example=_add(input_b=np.zeros((128, 512), np.float32)),
)
_row(
    _DYNAMIC,
    "tiles",
    "num_m_tiles must be [1, 1] integer, got {tiles_dtype} of shape {tiles_shape}",
    lambda c: not c.ready,
    example=_add(num_m_tiles=np.ones(1, np.int32)),
)
_row(
    _DYNAMIC,
    "inside",
    "num_m_tiles must lie between 0 and M / 128 of M = {M}, got {known}",
    lambda c: c.known is not None and not 0 <= c.known <= -(-c.M // 128),
    example=_add(num_m_tiles=np.full((1, 1), 3)),
    stage=2,
)
_row(
    _DYNAMIC,
    "chip_rows",
    "the chip takes M in multiples of 128, got {a_shape}",
    size=Size("M", lambda c: c.M, multiple=128),
    example=_add(shape=(130, 512)),
    tag="hw",
    stage=3,
)
_row(
    _DYNAMIC,
    "chip_width",
    "the chip takes H in multiples of 512, got {a_shape}",
    size=Size("H", lambda c: c.H, multiple=512),
    example=_add(shape=(128, 64)),
    tag="hw",
    stage=3,
)
