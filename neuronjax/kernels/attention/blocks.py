"""What the blockwise attention leaves share: layouts, blocks, and who sees whom.

Inside, every array is `[num_kv_heads, group, seq, width]` with batch folded into
`num_kv_heads`; keys and values have no group axis. Rows are cut into equal blocks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from neuronjax.kernels.shard_common import uniform

Folded = Float[Array, "_ _ _"]  # [heads, seq, width] or transposed; heads hold batch
Mask = Bool[Array, "_ _ kv_seq"]  # [1 or heads, 1 or q_seq, kv_seq], True = keep
Carry = TypeVar("Carry")
Size = Any  # an int, or a symbolic size while exporting


class Plan(NamedTuple):
    """How one call is cut: static numbers only."""

    causal: bool
    q_seq: int
    kv_seq: int  # keys that any row can see: a causal call drops the rest
    q_block: int
    kv_block: int
    kv_blocks: int

    @property
    def q_blocks(self) -> int:
        return -(-self.q_seq // self.q_block)


def make_plan(causal: bool, q_seq: int, kv_seq: int, block: int) -> Plan:
    """Equal blocks of at most `block`; causal ones are square, or there is one."""
    kv_seq = min(q_seq, kv_seq) if causal else kv_seq
    q_block, kv_block = _even(q_seq, block), _even(kv_seq, block)
    if causal and kv_seq > block:
        kv_block = q_block
    return Plan(causal, q_seq, kv_seq, q_block, kv_block, -(-kv_seq // kv_block))


def _even(seq: int, block: int) -> int:
    """Spreads `seq` over the fewest blocks, each a multiple of 16 rows."""
    even = math.ceil(seq / math.ceil(seq / block))
    return even if seq <= block else min(block, -(-even // 16) * 16)


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


def product(spec: str, a: jax.Array, b: jax.Array, acc: jnp.dtype) -> jax.Array:
    """`jnp.einsum` with sums of dtype `acc`."""
    return jnp.einsum(spec, a, b, preferred_element_type=acc)


def seen_by(
    plan: Plan, mask: jax.Array | None, i: jax.Array | int, j: jax.Array | int
) -> jax.Array:
    """Boolean `[.., .., q_block, kv_block]`: which keys of block `j` block `i` sees."""
    cols = j * plan.kv_block + jnp.arange(plan.kv_block)
    rows = i * plan.q_block + jnp.arange(plan.q_block)[:, None]
    seen = cols < plan.kv_seq
    if plan.causal:  # top-left: row 0 sees key 0 alone, whatever the lengths are
        seen &= cols <= rows
    seen = jnp.broadcast_to(seen, (plan.q_block, plan.kv_block))[None, None]
    if mask is None:
        return seen
    part = cut(mask, j, plan.kv_block, -1)
    return seen & (part if mask.shape[-2] == 1 else cut(part, i, plan.q_block))


def prepare_mask(mask: jax.Array | None, plan: Plan, num_kv_heads: Size):
    """`[1|heads, 1|q_seq, kv_seq]` to `[1|kv_heads, 1|group, 1|rows, keys]`, padded."""
    if mask is None:
        return None
    mask = mask.astype(bool)[..., : plan.kv_seq]
    mask = mask[None] if mask.shape[0] == 1 else grouped(mask, num_kv_heads)
    mask = mask if mask.shape[-2] == 1 else pad_rows(mask, plan.q_block)
    return pad_rows(mask, plan.kv_block, -1)


def visit(
    plan: Plan,
    mask: jax.Array | None,
    i: jax.Array | int,
    fold: Callable[[jax.Array | int, Carry, jax.Array | None], Carry],
    carry: Carry,
    *,
    static: bool,
) -> Carry:
    """Folds the key blocks that query block `i` sees: `fold(j, carry, seen)`.

    The loop's length is dynamic, so a block that nobody sees costs nothing. Without
    `mask` only the last block (the diagonal, or the ragged end) needs one: it is peeled
    off, and the others, which are seen whole, get `seen=None`.
    """

    def masked(j, carry):
        return fold(j, carry, seen_by(plan, mask, i, j))

    def whole(j, carry):
        return fold(j, carry, None)

    last = plan.kv_blocks - 1
    if static:
        return lax.fori_loop(0, plan.kv_blocks, jax.checkpoint(masked), carry)
    if mask is not None:
        end = jnp.minimum(i + 1, last + 1) if plan.causal and last else last + 1
        return lax.fori_loop(0, end, masked, carry)
    if plan.causal:
        last = jnp.minimum(i, last) if last else 0
    elif plan.kv_seq % plan.kv_block == 0:
        return lax.fori_loop(0, plan.kv_blocks, whole, carry)
    if plan.kv_blocks > 1:
        carry = lax.fori_loop(0, last, whole, carry)
    return masked(last, carry)


def like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, made inside a leaf, varying over the mesh axes of `others`."""
    return uniform(x, *others)[0]
