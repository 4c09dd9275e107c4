"""Products with an fp8 weight: the scale goes into the product's epilogue.

No weight is widened as a whole: a block of its rows or columns at a time is widened and
multiplied. Measured on a 2-core CPU, float32 activations: one row by 4096 x 4096 takes
3 ms with 2 MB of temporaries, widened as a whole 20 ms with 67 MB, and a float32 weight
3 ms; 2048 rows by 1024 x 2816 take as long as with a float32 weight. Only an explicit
mesh, where a block's layout would have to be named, gets the whole weight.

Every fp8 value is a bfloat16 value, so bfloat16 and fp8 activations are multiplied in
bfloat16 without an error, at half the time of float32.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.own_derivative import own_derivative
from neuronjax.kernels.shard_common import uniform

Scale = Float[Array, ""] | Float[Array, " d_out"]

# A block's rows of the weight, and its columns; both measured.
BLOCK_ROWS, BLOCK_COLUMNS = 256, 512
# Up to this many rows of activations a sum over blocks is cheaper than its parts.
FEW_ROWS = 128
# Up to this many float32 rows three bfloat16 products are cheaper than one of float32.
SPLIT_ROWS = 2


def scaled_linear_fwd(
    x: Shaped[Array, "*rows d_in"],
    w: Shaped[Array, "d_in d_out"],
    scale: Scale,
    *,
    dtype: DTypeLike,
) -> Float[Array, "*rows d_out"]:
    """Returns `(x @ w) * scale` in at least float32; factors are multiplied in `dtype`.

    `w` is fp8. `scale` is one value or one for each column. Weight and scale are
    constants: the derivative is that of `x` alone. One or two float32 rows go in as
    three bfloat16 values each, whose sum they are: nothing is lost.
    """
    scale = lax.stop_gradient(scale).astype(accumulator(x.dtype))
    return _product(x, w, scale, dtype=jnp.dtype(dtype), back=False)


def scaled_linear_bwd(
    dy: Float[Array, "*rows d_out"],
    w: Shaped[Array, "d_in d_out"],
    scale: Scale,
    *,
    dtype: DTypeLike,
) -> Float[Array, "*rows d_in"]:
    """Returns the cotangent of `x` of `scaled_linear_fwd`: `(dy * scale) @ w^T`.

    Weight and scale are constants. The scaled cotangent is rounded to `dtype`.
    """
    acc = accumulator(dy.dtype)
    scaled = dy.astype(acc) * lax.stop_gradient(scale).astype(acc)
    one = jnp.ones((), acc)
    return _product(scaled.astype(dtype), w, one, dtype=jnp.dtype(dtype), back=True)


def _moved(primals, tangents, *, dtype: jnp.dtype, back: bool) -> jax.Array:
    """Linear in `x`; this form can be transposed without rounding a cotangent."""
    x, w, scale = primals
    wide = accumulator(x.dtype)
    return _whole(tangents[0].astype(wide), w, wide, back) * scale


@own_derivative(_moved)
def _product(
    x: jax.Array, w: jax.Array, scale: jax.Array, *, dtype: jnp.dtype, back: bool
) -> jax.Array:
    """`(x @ w) * scale`, or with `back` `(x @ w^T) * scale`, accumulated wide."""
    rows, kept = math.prod(x.shape[:-1]), w.shape[0 if back else 1]
    if is_explicit(x, w) or not _is_large(w):
        return _whole(x, w, dtype, back).astype(scale.dtype) * scale
    few = isinstance(rows, int) and rows <= FEW_ROWS
    factors, parts = _factors(x.reshape(rows, x.shape[-1]), dtype)
    if few and not back:
        y = _sum_of_blocks(factors, w)
        y = y.reshape(parts, rows, kept).sum(0) if parts > 1 else y
        y = y.astype(scale.dtype) * scale
    else:
        scale = jnp.broadcast_to(scale, kept)
        y = _each_block(factors, w, scale, parts, 0 if back else 1)
    return y.reshape(*x.shape[:-1], kept)


def is_explicit(*arrays: jax.Array) -> bool:
    """Whether one of the arrays lies on a mesh with an explicit axis."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(AxisType.Explicit in mesh.axis_types for mesh in meshes)


def _is_large(w: jax.Array) -> bool:
    return w.size >= 2 * BLOCK_ROWS * BLOCK_COLUMNS


def _whole(x: jax.Array, w: jax.Array, dtype: jnp.dtype, back: bool) -> jax.Array:
    factor = _factor_dtype(x.dtype, dtype)
    dims = (((x.ndim - 1,), (1 if back else 0,)), ((), ()))
    x = x.astype(dtype) if x.dtype.itemsize > dtype.itemsize else x
    return lax.dot_general(
        x.astype(factor),
        w.astype(factor),
        dims,
        preferred_element_type=accumulator(x.dtype, factor),
    )


def _factor_dtype(x: jnp.dtype, dtype: jnp.dtype) -> jnp.dtype:
    """The narrowest of bfloat16, float32 and float64 that holds the factors."""
    narrowest = x if x.itemsize < dtype.itemsize else dtype
    if narrowest.itemsize == 1 or narrowest == jnp.bfloat16:
        return jnp.dtype(jnp.bfloat16)
    return promoted(jnp.float32, narrowest)


def _factors(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, int]:
    """The rows as they are multiplied, and into how many values each was split."""
    factor, rows = _factor_dtype(x.dtype, dtype), x.shape[0]
    x = x.astype(dtype) if x.dtype.itemsize > dtype.itemsize else x
    few = isinstance(rows, int) and rows <= SPLIT_ROWS
    if factor == jnp.float32 and few:
        return split(x.astype(factor)), 3
    x = x.astype(factor)
    if factor == jnp.bfloat16 and rows == 1:
        # XLA on a CPU is slow for one narrow row and not for two: 3.7 ms against 2.9.
        return jnp.concatenate([x, jnp.zeros_like(x)]), 2
    return x, 1


def split(x: Float[Array, "rows d"]) -> Float[Array, "split_rows d"]:
    """Three bfloat16 rows for each float32 row, whose sum it is.

    All first parts come before all second ones.
    """
    found, rest = [], x
    for _ in range(3):
        # XLA may drop a cast there and back, and with it the rest; never this.
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        found.append(part.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isfinite(part), rest - part, 0)
    return jnp.concatenate(found)


def _block(w: jax.Array, start, size: int, axis: int, dtype: jnp.dtype) -> jax.Array:
    """A block of `w`, widened.

    It is cut out of bytes: XLA on a CPU would widen all of an fp8 array to cut it. The
    barrier keeps it from doing that, or a copy, before the loop.
    """
    start, w = lax.optimization_barrier((start, w))
    raw = lax.bitcast_convert_type(w, jnp.uint8)
    block = lax.dynamic_slice_in_dim(raw, start, size, axis)
    return lax.bitcast_convert_type(block, w.dtype).astype(dtype)


def _loop(size: int, block: int, body, out: jax.Array) -> jax.Array:
    """`out = body(start, size, out)` over whole blocks, then over what is left."""
    block = min(size, block)
    count, left = divmod(size, block)

    def step(i, out):
        return body(i * block, block, out)

    out = lax.fori_loop(jnp.int32(0), jnp.int32(count), step, out)
    return body(jnp.int32(size - left), left, out) if left else out


def _sum_of_blocks(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` for few rows: a block of rows of `w` is read where it lies."""

    def body(start, size, total):
        part = lax.dynamic_slice_in_dim(x, start, size, 1)
        block = _block(w, start, size, 0, x.dtype)
        return total + jnp.dot(part, block, preferred_element_type=total.dtype)

    zeros = jnp.zeros((x.shape[0], w.shape[1]), accumulator(x.dtype))
    return _loop(w.shape[0], BLOCK_ROWS, body, uniform(zeros, x, w)[0])


def _each_block(
    x: jax.Array, w: jax.Array, scale: jax.Array, parts: int, axis: int
) -> jax.Array:
    """`x @ w` by blocks of columns (axis 1), `x @ w^T` by blocks of rows (axis 0)."""
    dims = (((1,), (1 - axis,)), ((), ()))
    rows = x.shape[0] // parts

    def body(start, size, out):
        block = _block(w, start, size, axis, x.dtype)
        acc = accumulator(x.dtype)
        y = lax.dot_general(x, block, dims, preferred_element_type=acc)
        y = y.reshape(parts, rows, size).sum(0) if parts > 1 else y
        y = y.astype(scale.dtype) * lax.dynamic_slice_in_dim(scale, start, size)
        return lax.dynamic_update_slice_in_dim(out, y, start, 1)

    zeros = jnp.zeros((rows, w.shape[axis]), scale.dtype)
    size = BLOCK_COLUMNS if axis else BLOCK_ROWS
    return _loop(w.shape[axis], size, body, uniform(zeros, x, w, scale)[0])
