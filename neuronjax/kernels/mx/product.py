"""Products of rows with a block-scaled weight, which is never widened as a whole.

Both axes of a block lie on the contraction: a weight is `[P, R, N]` containers with
scales `[P/8, R, N]`, the rows are `[..., 4, P, R]`, and

    y[n] = sum over q, p, r of x[q, p, r] * element q of weight[p, r, n]

A block of columns is decoded, multiplied and dropped; then the next. Every value of the
formats, times a power of two, is a bfloat16: the factors are exact, the sums float32.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.mx.formats import Container, Format, decode, element, scaled
from neuronjax.kernels.mx.quantize import ROWS
from neuronjax.kernels.own_derivative import own_derivative

# Elements that are decoded at once: 1024 x 4096 e4m3fn for two rows takes 1.5 ms in
# blocks of this size, 1.8 ms as a whole.
DECODED = 1 << 18
Rows = Float[Array, "*rows 4 p r"]


def _decoded(packed, scale, q: int, kind: Format, dtype: DTypeLike):
    """Element `q` of each container, scaled: `[P, R, N]` in `dtype`."""
    p, r, n = packed.shape
    values = decode(element(packed, kind, q), kind).reshape(p // ROWS, ROWS, r, n)
    return scaled(values, scale[:, None]).astype(dtype).reshape(p, r, n)


def _columns(x, packed, scale, kind: Format, dtype: DTypeLike):
    """The product with one block of columns, decoded element by element."""
    acc, n = accumulator(dtype), packed.shape[2]
    terms = [
        jnp.dot(
            x[..., q, :],
            _decoded(packed, scale, q, kind, dtype).reshape(-1, n),
            preferred_element_type=acc,
        )
        for q in range(4)
    ]
    return (terms[0] + terms[1]) + (terms[2] + terms[3])


def _by_columns(x, packed, scale, kind: Format, dtype: DTypeLike):
    p, r, n = packed.shape
    width = _width(p * r, n)
    count, rest = divmod(n, width)
    if count <= 1:
        return _columns(x, packed, scale, kind, dtype)

    def block(_, start):
        # The barrier keeps XLA from decoding the whole weight before the loop.
        start, codes, powers = lax.optimization_barrier((start, packed, scale))
        codes = lax.dynamic_slice_in_dim(codes, start, width, axis=2)
        powers = lax.dynamic_slice_in_dim(powers, start, width, axis=2)
        return None, _columns(x, codes, powers, kind, dtype)

    starts = jnp.arange(count, dtype=jnp.int32) * width
    _, blocks = lax.scan(block, None, starts)
    y = jnp.moveaxis(blocks, 0, -2)
    y = y.reshape(*y.shape[:-2], count * width)
    if rest == 0:
        return y
    cut = functools.partial(lax.slice_in_dim, start_index=count * width, limit_index=n)
    last = _columns(x, cut(packed, axis=2), cut(scale, axis=2), kind, dtype)
    return jnp.concatenate([y, last], axis=-1)


def _width(rows: int, n: int) -> int:
    """How many columns are decoded at once; all of them where the weight is small.

    Two blocks at least, and none left over if that can be: outside of a loop XLA
    decodes the weights of all layers before it needs them.
    """
    wanted = max(-(-rows * n // DECODED), 2)
    if rows * n < DECODED // 8:
        return n
    even = (k for k in range(wanted, 4 * wanted) if n % k == 0)
    count = next(even, None)
    return n // count if count else max(DECODED // rows // 128, 1) * 128


def _product_tangent(primals, tangents, *, kind: Format):
    (x, packed, scale), dx = primals, tangents[0]
    dx = dx.reshape(*x.shape[:-2], -1)
    return _by_columns(dx, packed, scale, kind, accumulator(x.dtype))


@own_derivative(_product_tangent)
def product_fwd(
    x: Rows, packed: Container, scale: UInt8[Array, "p_blocks r n"], *, kind: Format
) -> Float[Array, "*rows n"]:
    """Returns the product; `x` is what `round_blocks` returned, or float64.

    It has a tangent in `x` alone, which is multiplied in float32: it is no bfloat16.
    """
    narrow = jnp.bfloat16 if accumulator(x.dtype) == jnp.float32 else x.dtype
    flat = x.astype(narrow).reshape(*x.shape[:-2], -1)
    if math.prod(x.shape[:-3]) == 1:
        # XLA on a CPU widens a narrow matrix for one row and not for two.
        flat = jnp.concatenate([flat, jnp.zeros_like(flat)])
        return _by_columns(flat, packed, scale, kind, narrow)[:1]
    return _by_columns(flat, packed, scale, kind, narrow)


def product_bwd(
    dy: Float[Array, "*rows n"],
    packed: Container,
    scale: UInt8[Array, "p_blocks r n"],
    *,
    kind: Format,
) -> Rows:
    """Returns the cotangent of `x` of `product_fwd`; weight and scale are constants.

    A block of rows of the weight is decoded at a time, so that nothing is summed
    across blocks.
    """
    dtype = promoted(dy.dtype, jnp.bfloat16)
    p, r, n = packed.shape
    count = _blocks(p // ROWS, r * n * ROWS)

    def block(_, part):
        packed, scale = part
        weights = (_decoded(packed, scale, q, kind, dtype) for q in range(4))
        return None, jnp.stack([_back(dy, w) for w in weights], axis=-2)

    if count == 1:
        dx = block(None, (packed, scale))[1]
    else:
        parts = (x.reshape(count, -1, r, n) for x in (packed, scale))
        dx = jnp.moveaxis(lax.scan(block, None, tuple(parts))[1], 0, -2)
    return dx.reshape(*dy.shape[:-1], 4, p, r)


def _back(dy, w):
    """`dy @ w^T` over the columns, the rows of `w` as one axis."""
    flat, dims = w.reshape(-1, w.shape[2]), (((dy.ndim - 1,), (1,)), ((), ()))
    dy = dy.astype(w.dtype)
    return lax.dot_general(dy, flat, dims, preferred_element_type=accumulator(w.dtype))


def _blocks(count: int, size: int) -> int:
    """Into how many equal blocks `count` pieces of `size` elements are cut."""
    wanted = min(max(count * size // DECODED, 1), count)
    return next(k for k in range(wanted, count + 1) if count % k == 0)
