"""Cross-entropy of `x @ w`, whose logits never exist all at once.

With `z = x w` and `g` the gradient of a token's loss with respect to its row of `z`, as
in `tokens`:

    dx = g w^T,    dw = x^T g

Tokens come in blocks. A sum of losses whose weights are known is differentiated while a
block's logits are there: three products a block. Where the cotangents come later, the
backward makes the logits again: four.

Wijmans et al. 2024, Cut your losses in large-vocabulary language models,
https://arxiv.org/abs/2411.09009, and Hsu et al. 2024, Liger kernel,
https://arxiv.org/abs/2410.10989, section 3.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from neuronjax.kernels.cross_entropy.tokens import (
    logits_gradient,
    reduced,
    target_logit,
    token_loss,
)
from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.shard_common import contract, is_divided, shards, uniform

# Tokens of a block, and its logits: 256 rows of 32000 in float32 are 32 MB.
ROWS, LOGITS = 256, 256 * 2**17
# A block's share of a large `dw` is made and added in parts: XLA keeps a product apart
# from what it is added to, and the whole would double `dw`.
PARTS, LARGE = 4, 2**22


def linear_cross_entropy_fwd(
    x: Float[Array, "tokens d_model"],
    w: Float[Array, "d_model vocab"],
    targets: Int[Array, " tokens"],
    coefficients: Float[Array, " tokens"] | None,
    *,
    name: str,
    form: str,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    part_of: int | None = None,
    rows: int = ROWS,
    gradient: bool = False,
    **hints: Any,
) -> tuple[Array, ...]:
    """Returns `(loss, lse)` of each token, or with `form="total"` their weighted sum.

    `total = sum coefficients * (loss + z_loss * lse**2)`. With `gradient` it comes as
    `(total, that of each token, dx, dw)`, the gradients wide and not yet scaled by the
    cotangent of the total.
    """
    rule = smoothing, part_of

    def block(dw, xb, labels, weight=None):
        z = _logits(xb, w)
        loss, lse, base = _losses(z, labels, *rule)
        if form == "tokens":
            return dw, (loss, lse)
        each = loss + z_loss * lse**2 if z_loss else loss
        if not gradient:
            return dw, (each,)
        weight = weight.astype(z.dtype)
        d_lse = 2 * z_loss * weight * lse if z_loss else None
        g = logits_gradient(z, labels, lse, weight, d_lse, *rule, base)
        dxb, dw = _products(dw, xb, g, w)
        return dw, (each, dxb)

    given = (x, targets) if coefficients is None else (x, targets, coefficients)
    dw, outs = _over_blocks(
        block, _zeros(w, *given) if gradient else None, rows, *given
    )
    if form == "tokens":
        return tuple(outs)
    assert coefficients is not None
    each, *dx = outs
    total = jnp.sum(coefficients.astype(each.dtype) * each)
    return (total, each, *dx, dw) if gradient else (total,)


def linear_cross_entropy_bwd(
    x: Float[Array, "tokens d_model"],
    w: Float[Array, "d_model vocab"],
    targets: Int[Array, " tokens"],
    lse: Float[Array, " tokens"],
    d_loss: Float[Array, " tokens"],
    d_lse: Float[Array, " tokens"],
    *,
    name: str,
    smoothing: float = 0.0,
    part_of: int | None = None,
    rows: int = ROWS,
    **settings: Any,
) -> tuple[Array, Array]:
    """Returns `(dx, dw)` from each token's cotangents; the logits are made again."""

    def block(dw, xb, labels, *rest):
        z = _logits(xb, w)
        lse, d_loss, d_lse = (y.astype(z.dtype) for y in rest)
        g = logits_gradient(z, labels, lse, d_loss, d_lse, smoothing, part_of)
        dxb, dw = _products(dw, xb, g, w)
        return dw, (dxb,)

    given = (x, targets, lse, d_loss, d_lse)
    dw, (dx,) = _over_blocks(block, _zeros(w, *given), rows, *given)
    return dx.astype(x.dtype), dw.astype(w.dtype)


def rows_for(vocab: int) -> int:
    """How many tokens a block has: 256, and fewer where it would be over 128 MiB.

    Example:
        >>> rows_for(128256), rows_for(262144)
        (256, 128)
    """
    rows = ROWS
    while rows > 1 and rows * vocab > LOGITS:
        rows //= 2
    return rows


def _logits(x: jax.Array, w: jax.Array) -> jax.Array:
    dtype = promoted(x.dtype, w.dtype)
    factors = x.astype(dtype), w.astype(dtype)
    return jnp.matmul(*factors, preferred_element_type=accumulator(dtype))


def _losses(
    z: jax.Array, targets: jax.Array, smoothing: float, part_of: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss and the lse of each token, and what was subtracted of its logits."""
    picked = target_logit(z, targets)
    seen = reduced(z, picked=picked, with_total=bool(smoothing))
    rule = z.shape[-1], smoothing, part_of
    return *token_loss(seen, picked, targets, *rule), seen.base


def _products(
    dw: jax.Array, x: jax.Array, g: jax.Array, w: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`dx` of a block, and `dw` with its share added.

    bfloat16 factors stay so, and `g` is rounded to it, which keeps its range. float16
    has no room for a gradient divided by the number of tokens: it is widened.
    """
    dtype = promoted(x.dtype, w.dtype)
    dtype = dtype if dtype == jnp.bfloat16 else accumulator(dtype)
    x, g, w = x.astype(dtype), g.astype(dtype), w.astype(dtype)
    return contract("rv,hv->rh", g, w, like=x), _with_share(dw, x, g, w)


def _with_share(dw: jax.Array, x: jax.Array, g: jax.Array, w: jax.Array) -> jax.Array:
    """`dw + x^T g`, by parts of its rows where it is large."""

    def share(xt: jax.Array) -> jax.Array:
        return contract("hr,rv->hv", xt, g, like=w)

    # Transposed first: a product over the first axis of both misses XLA's fast path.
    xt, size = x.T, _part_of(dw)
    if size is None:
        return dw + share(xt)

    def add(i, dw):
        held, rows = (lax.dynamic_slice_in_dim(y, i * size, size) for y in (dw, xt))
        return lax.dynamic_update_slice_in_dim(dw, held + share(rows), i * size, 0)

    return lax.fori_loop(0, PARTS, add, dw)


def _part_of(dw: jax.Array) -> int | None:
    """How many rows of `dw` a part has; `None` where it is not worth it, or divided."""
    whole = not all(isinstance(size, int) for size in dw.shape) or is_divided(dw)
    if whole or dw.size < LARGE or dw.shape[0] % PARTS:
        return None
    return dw.shape[0] // PARTS


def _zeros(w: jax.Array, *others: jax.Array) -> jax.Array:
    """Where `dw` is summed."""
    acc = accumulator(w.dtype, others[0].dtype)
    return uniform(jnp.zeros_like(w, acc), w, *others)[0]


def _over_blocks(
    block: Callable[..., tuple[Any, tuple]], carry: Any, rows: int, *arrays: jax.Array
) -> tuple[Any, tuple]:
    """Runs `block` over blocks of at most `rows` tokens, a carry from one to the next.

    Block `i` of `n` has the tokens `i, i + n, ...`: where a mesh splits the tokens,
    every device has its part of every block. Tokens that fill up the last are zeros,
    whose coefficients and cotangents are zeros too.
    """
    tokens, parts = arrays[0].shape[0], shards(arrays[0], 0)
    count, size = -(-tokens // rows), rows
    if isinstance(tokens, int):
        if count <= 1:
            return block(carry, *arrays)
        if parts > 1:  # every device cuts its own tokens, evenly
            own = tokens // parts
            count = next((n for n in range(count, own) if own % n == 0), own)
        size = -(-tokens // count)
    spare = size * count - tokens
    even = isinstance(spare, int) and spare == 0

    def cut(x: jax.Array) -> jax.Array:
        if not even:
            x = jnp.pad(x, [(0, spare), *[(0, 0)] * (x.ndim - 1)])
        return jnp.moveaxis(x.reshape(size, count, *x.shape[1:]), 1, 0)

    carry, outs = lax.scan(
        lambda carry, part: block(carry, *part), carry, tuple(map(cut, arrays))
    )
    joined = (lax.collapse(jnp.moveaxis(x, 0, 1), 0, 2) for x in outs)
    return carry, tuple(x if even else x[:tokens] for x in joined)
