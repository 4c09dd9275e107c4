"""What the blockwise attention leaves share: layouts, blocks and products.

Inside, every array is `[num_kv_heads, group, seq, width]` with batch folded into
`num_kv_heads`; keys and values have no group axis. Rows are cut into equal blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.shard_common import uniform

Folded = Float[Array, "_ _ _"]  # [heads, seq, width] or transposed; heads hold batch
Size = Any  # an int, or a symbolic size while exporting


def lowest(dtype: jnp.dtype) -> float:
    """The score of a key that is not seen: no finite bias makes a score lower.

    It may be the maximum of a row that sees nothing, or that sees keys of this very
    score, so weights are cleared where nothing is seen.
    """
    return float(jnp.finfo(dtype).min)


def unseen(dtype: jnp.dtype) -> float:
    """A finite score far below any real one, safe to subtract from: no -inf - -inf."""
    return float(jnp.finfo(dtype).min) / 4


def rows_first(x: jax.Array, is_laid_so: bool) -> jax.Array:
    """`x` as `[heads, seq, width]`, from `[heads, width, seq]` unless it is laid so.

    A transposed 16-bit factor is written out: jax 0.12 on a CPU folds the transpose
    into the product, and then has no kernel for it when the program runs.
    """
    if is_laid_so:
        return x
    return lax.optimization_barrier(x.mT) if x.dtype.itemsize == 2 else x.mT


def pad_rows(x: jax.Array, block: int, axis: int = -2) -> jax.Array:
    """Fills `axis` with zeros up to a whole number of blocks."""
    fill = -x.shape[axis] % block
    widths = [(0, fill if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if fill else x


def cut(x: jax.Array, i: jax.Array | int, block: int, axis: int = -2) -> jax.Array:
    """Block `i` of `axis`."""
    return lax.dynamic_slice_in_dim(x, i * block, block, axis % x.ndim)


def grouped(x: jax.Array, num_kv_heads: Size) -> jax.Array:
    """`[heads, ...]` to `[num_kv_heads, group, ...]`: neighbours share a key head."""
    return x.reshape(num_kv_heads, x.shape[0] // num_kv_heads, *x.shape[1:])


def unblock(x: jax.Array, seq: int) -> jax.Array:
    """`[blocks, kv_heads, group, block, width]` to `[heads, seq, width]`.

    One merge a step: that is what an explicit mesh can type.
    """
    return lax.collapse(lax.collapse(jnp.moveaxis(x, 0, 2), 2, 4)[:, :, :seq], 0, 2)


def clean(x: jax.Array, acc: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """`x` with its non-finite entries zeroed, and 0 or NaN for each row that had one.

    In a block where some rows don't see some keys, 0 * NaN would leak. There the
    product takes the cleaned factor, and the NaN is added where it is really seen.
    """
    finite = jnp.isfinite(x)
    poison = jnp.where(finite.all(-1), 0, jnp.nan).astype(acc)
    return jnp.where(finite, x, 0), poison


def row_products(out: jax.Array, d_out: jax.Array, acc: jnp.dtype) -> jax.Array:
    """`rowsum(out * d_out)`, `[.., rows, 1]`.

    Where the output is 0, as in a row that sees no key, a cotangent that is not finite
    counts as 0: 0 * NaN would reach the sink.
    """
    d_out = jnp.where(jnp.isfinite(d_out) | (out != 0), d_out, 0)
    return (out.astype(acc) * d_out.astype(acc)).sum(-1)[..., None]


def product(spec: str, a: jax.Array, b: jax.Array, acc: jnp.dtype) -> jax.Array:
    """`jnp.einsum` with sums of dtype `acc`."""
    return jnp.einsum(spec, a, b, preferred_element_type=acc)


def like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, made inside a leaf, varying over the mesh axes of `others`."""
    return uniform(x, *others)[0]
