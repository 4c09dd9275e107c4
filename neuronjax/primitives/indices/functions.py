"""Index lists: where columns are not zero, rows packed into one list, first rows added.

`find_nonzero_indices` and `indexed_flatten` build the token lists of a mixture of
experts. These are plain functions of arrays, not macros.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Integer, Num

from neuronjax.kernels.indices import (
    bounded,
    columns_from,
    compact,
    flatten_rows,
    is_nonzero,
)
from neuronjax.primitives import contracts
from neuronjax.primitives.indices.rules import (
    add_facts,
    flatten_facts,
    nonzero_facts,
)


@contracts.contracted(nonzero_facts)
def find_nonzero_indices(
    input_tensor: Num[Array, "tokens columns"],
    col_start_id: Integer[Array, "1"] | None = None,
    n_cols: int | None = None,
    chunk_size: int | None = None,
    index_dtype: DTypeLike = "int32",
) -> tuple[Int[Array, "count tokens"], Int[Array, " count"]]:
    """For each column the rows where it is not zero, and how many.

    Args:
        input_tensor: `[T, C]`, float32 or int32. NaN and subnormal numbers count as
            not zero, -0.0 as zero.
        col_start_id: `[1]` integer, may be traced: the first column to look at; all
            columns without it. A column outside of the input, reached under jit, has
            no non-zeros.
        n_cols: how many columns, with `col_start_id`.
        chunk_size: how the chip walks `T`, a positive integer; changes no value.
        index_dtype: of the indices, a signed integer that holds `T - 1`.

    Returns:
        `(indices [C_out, T], counts int32 [C_out])`: row `c` holds the ascending row
        numbers of column `c`, then -1.

    Raises:
        ValueError: the arguments break a rule, or a concrete window of columns leaves
            the input. The chip's limits are reported by `neuronjax.can`.

    Source:
        aws-neuron/nki-library, `find_nonzero_indices`.

    Example:
        >>> import jax.numpy as jnp
        >>> indices, counts = find_nonzero_indices(jnp.array([[0, 1], [2, 3], [0, 4]]))
        >>> indices.tolist(), counts.tolist()
        ([[1, -1, -1], [0, 1, 2]], [1, 3])
    """
    x = jnp.asarray(input_tensor)
    if col_start_id is not None:
        assert n_cols is not None
        x = columns_from(x, jnp.asarray(col_start_id)[0], n_cols)
    indices, counts = compact(is_nonzero(x).T)
    return indices.astype(jnp.dtype(index_dtype)), counts


@contracts.contracted(nonzero_facts)
def find_nonzero_indices_with_count(
    input_tensor: Num[Array, "1 tokens"],
) -> Int[Array, "1 tokens_and_one"]:
    """Where a row is not zero, ascending, then -1, and in the last element how often.

    Args:
        input_tensor: `[1, T]`, float32 or int32. NaN and subnormal numbers count as
            not zero, -0.0 as zero.

    Returns:
        `[1, T + 1]` int32.

    Raises:
        ValueError: `input_tensor` is not `[1, T]` of float32 or int32.

    Source:
        aws-neuron/nki-library, `find_nonzero_indices_with_count`.

    Example:
        >>> import jax.numpy as jnp
        >>> find_nonzero_indices_with_count(jnp.array([[0, 7, 0, 5]])).tolist()
        [[1, 3, -1, -1, 2]]
    """
    indices, counts = compact(is_nonzero(jnp.asarray(input_tensor)))
    return jnp.concatenate([indices, counts[:, None]], axis=1)


@contracts.contracted(flatten_facts)
def indexed_flatten(
    input_tensor: Integer[Array, "rows width"],
    f_len: int,
    output_len: int,
    row_offsets: Integer[Array, " offsets"],
    row_offsets_start: Integer[Array, "1"] | None = None,
    padding_val: int = -1,
) -> Integer[Array, " size"]:
    """Writes rows into one list, each from its own offset on; the last row wins.

    The list is cut into blocks of `f_len`; piece `p` of row `e` goes to block
    `row_offsets[start + e] + p`. Rows are written in the order 0 to `E - 1`, so that a
    row overwrites the padding with which the one before it ends. Pieces that land
    outside are dropped.

    Args:
        input_tensor: `[E, T]` integers.
        f_len: elements of a block.
        output_len: elements of the list.
        row_offsets: `[N]` integers, in blocks; `N = E`, or at least that with a start.
        row_offsets_start: `[1]` integer, may be traced: which offset is that of row 0.
            A row whose offset would lie outside, under jit, is dropped.
        padding_val: what positions hold that no piece covers; it fits the dtype of
            `input_tensor`.

    Returns:
        `[output_len]` in the dtype of `input_tensor`.

    Raises:
        ValueError: the arguments break a rule, or a concrete start leaves the offsets.
            The chip's limits are reported by `neuronjax.can`.

    Source:
        aws-neuron/nki-library, `indexed_flatten`.

    Example:
        >>> import jax.numpy as jnp
        >>> rows = jnp.array([[1, 2, -1, -1], [3, 4, 5, 6]])
        >>> indexed_flatten(rows, 2, 8, jnp.array([0, 1])).tolist()
        [1, 2, 3, 4, 5, 6, -1, -1]
    """
    x, offsets = jnp.asarray(input_tensor), jnp.asarray(row_offsets)
    rows, count = x.shape[0], offsets.shape[0]
    number = jnp.arange(rows, dtype=jnp.int32)
    if row_offsets_start is not None:
        number = number + bounded(jnp.asarray(row_offsets_start)[0], -rows, count)
    valid = (number >= 0) & (number < count)
    return flatten_rows(
        x,
        offsets[jnp.where(valid, number, 0)],
        valid,
        block=int(f_len),
        blocks=int(output_len) // int(f_len),
        padding=int(padding_val),
    )


@contracts.contracted(add_facts)
def dynamic_elementwise_add(
    input_a: Num[Array, "rows d_model"],
    input_b: Num[Array, "rows d_model"],
    num_m_tiles: Integer[Array, "1 1"],
) -> Num[Array, "rows d_model"]:
    """Adds the first `128 * num_m_tiles` rows; the remaining rows are zero.

    Args:
        input_a: `[M, H]`, any numeric dtype.
        input_b: `[M, H]`, in the dtype of `input_a`.
        num_m_tiles: `[1, 1]` integer, may be traced: how many tiles of 128 rows count.
            Under jit a count beyond the last tile means all rows, a negative one none.

    Returns:
        `[M, H]` in the dtype of `input_a`. Gradients are those of the rows that count.

    Raises:
        ValueError: shapes or dtypes do not fit, or a concrete count leaves
            `[0, M / 128]`. The chip's limits are reported by `neuronjax.can`.

    Source:
        aws-neuron/nki-library, `dynamic_elementwise_add`.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones((256, 2))
        >>> out = dynamic_elementwise_add(ones, ones, jnp.array([[1]]))
        >>> float(out.sum())
        512.0
    """
    a, b = jnp.asarray(input_a), jnp.asarray(input_b)
    tiles = bounded(jnp.asarray(num_m_tiles)[0, 0], 0, -(-a.shape[0] // 128))
    tile = jnp.arange(a.shape[0], dtype=jnp.int32) // 128
    return jnp.where((tile < tiles)[:, None], a + b, jnp.zeros((), a.dtype))
