"""Cross-entropy on logits that are there, forwards and backwards.

The equations are in `tokens`. Milakov and Gimelshein 2018, Online normalizer
calculation for softmax, algorithm 3, https://arxiv.org/abs/1805.02867.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.cross_entropy.tokens import (
    logits_gradient,
    reduced,
    target_logit,
    token_loss,
)
from neuronjax.kernels.dtypes import accumulator


def cross_entropy_fwd(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    keep: Bool[Array, "*tokens"] | None,
    *,
    name: str,
    out_dtype: str | None,
    chunk: int | None = None,
    smoothing: float = 0.0,
    part_of: int | None = None,
    residual: bool = False,
    by_bits: bool = True,
    **hints: Any,
) -> tuple[Array, ...]:
    """Returns `(loss, lse)` in `out_dtype`.

    With `residual` also what the backward reads: the wide `lse`, where the other is
    rounded, and what was subtracted of the logits, a constant. The vocabulary is
    reduced in chunks of `chunk` columns; unless named, as is fastest. A token that is
    not kept has loss and lse 0, whatever its logits are.
    """
    if not by_bits:  # to be differentiated, where 0 times NaN is NaN
        logits = kept(keep, logits)
    picked = target_logit(logits, targets, by_bits=by_bits)
    options = dict(with_total=bool(smoothing), by_bits=by_bits)
    seen = reduced(logits, chunk, picked=picked, **options)
    loss, lse = token_loss(seen, picked, targets, logits.shape[-1], smoothing, part_of)
    loss, lse = kept(keep, loss), kept(keep, lse)
    dtype = out_dtype or loss.dtype
    outs = loss.astype(dtype), lse.astype(dtype)
    if not residual:
        return outs
    base = lax.stop_gradient(kept(keep, seen.base))
    return (*outs, lse, base) if out_dtype else (*outs, base)


def cross_entropy_static_fwd(*operands: Any, **config: Any) -> tuple[Array, ...]:
    """The same, differentiable."""
    return cross_entropy_fwd(*operands, **config, by_bits=False)


def cross_entropy_bwd(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    keep: Bool[Array, "*tokens"] | None,
    lse: Float[Array, "*tokens"],
    d_loss: Float[Array, "*tokens"] | None,
    d_lse: Float[Array, "*tokens"] | None,
    base: Float[Array, "*tokens"] | None = None,
    *,
    name: str,
    reduction: str,
    out_dtype: str,
    stored_dtype: str,
    smoothing: float = 0.0,
    part_of: int | None = None,
    is_static: bool = False,
    **hints: Any,
) -> tuple[Array]:
    """Returns `(dlogits,)`: the softmax comes from `lse`, nothing is reduced again.

    With `base`, what the forward subtracted, its exponentials are used again. An absent
    `d_loss` is 1 for every token; `reduction="mean"` divides by their number.
    Values are rounded to `out_dtype` and stored in `stored_dtype`. A token that is not
    kept has gradient 0, whatever its logits are.
    """
    if is_static:  # to be differentiated, where 0 times NaN is NaN
        logits = kept(keep, logits)
    acc = accumulator(logits.dtype)
    ones = jnp.ones_like(lse, acc) if d_loss is None else d_loss.astype(acc)
    share = ones / count(lse) if reduction == "mean" else ones
    more = None if d_lse is None else d_lse.astype(acc)
    rule = smoothing, part_of, base
    grad = logits_gradient(logits, targets, lse, share, more, *rule)
    return (stored(kept(keep, grad), out_dtype, stored_dtype),)


def cross_entropy_static_bwd(*operands: Any, **config: Any) -> tuple[Array]:
    """The same, differentiable."""
    return cross_entropy_bwd(*operands, **config, is_static=True)


def kept(keep: jax.Array | None, x: jax.Array) -> jax.Array:
    """`x`, and 0 for tokens that are not kept."""
    if keep is None:
        return x
    rows = keep[..., None] if x.ndim > keep.ndim else keep
    return jnp.where(rows, x, jnp.zeros((), x.dtype))


def count(x: jax.Array) -> Any:
    """How many elements `x` has; symbolic sizes are known when the program runs."""
    count = math.prod(x.shape)
    return count if isinstance(count, int) else jnp.asarray(count, x.dtype)


def stored(x: jax.Array, out_dtype: str, stored_dtype: str) -> jax.Array:
    """Rounded to `out_dtype`, also where that is narrower than what it is stored in."""
    narrow = jnp.finfo(out_dtype)
    if narrow.bits < jnp.finfo(stored_dtype).bits:
        x = lax.reduce_precision(x, narrow.nexp, narrow.nmant)
    return x.astype(stored_dtype)
