"""The loss of each token from its logits, and the gradient of the logits.

    lse = log sum_v exp(x_v)
    loss = lse - (1 - smoothing) x_target - smoothing / vocab * sum_v x_v
    dx_v = (d_loss + d_lse) exp(x_v - lse)
           - d_loss ((1 - smoothing) [v == target] + smoothing / vocab)

Logits may be a part of the vocabulary; `part_of` is then the size of the whole, and
`loss` stands without its `lse`, so that its parts can be added. A target in another
part adds nothing.

A target outside the whole vocabulary has loss NaN, a constant: it gives no gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.dtypes import accumulator

# Columns of narrow logits that are widened at a time.
CHUNK = 1024


class Running(NamedTuple):
    """What the columns seen so far say of each token.

    Attributes:
        largest: their maximum; -inf before there is one.
        scaled: `sum exp(x - largest)`.
        total: their sum; absent where no equation needs it.
    """

    largest: jax.Array
    scaled: jax.Array
    total: jax.Array | None


def lse_of(seen: Running) -> jax.Array:
    """The log-sum-exp; -inf, a constant, where every logit is."""
    empty = seen.scaled == 0
    log = jnp.log(jnp.where(empty, 1, seen.scaled))
    return jnp.where(empty, -jnp.inf, _finite(seen.largest) + log)


def reduced(
    logits: Float[Array, "*tokens vocab"],
    chunk: int | None = None,
    *,
    with_total: bool = False,
    by_bits: bool = True,
) -> Running:
    """One pass over the vocabulary, chunk by chunk, in the accumulator's dtype.

    Every exponent is at most 0. Without `chunk`, logits of 32 bits and more are one
    chunk, which XLA reads in place. Narrow ones are cut as bits (`by_bits`): XLA would
    widen all of them ahead of the loop. Bits have no derivative.
    """
    vocab, acc = logits.shape[-1], accumulator(logits.dtype)
    chunk = min(chunk or (CHUNK if _is_narrow(logits) else vocab), vocab)
    more = (vocab - 1) // chunk
    head = vocab - more * chunk
    held = _bits(logits) if by_bits else logits

    def columns(start, size: int) -> jax.Array:
        cut = lax.dynamic_slice_in_dim(held, start, size, held.ndim - 1)
        return _floats(cut, logits.dtype).astype(acc)

    def step(seen: Running, start) -> tuple[Running, None]:
        return _merged(seen, columns(start, chunk)), None

    if not more:
        return _first(logits.astype(acc), with_total)
    starts = head + chunk * jnp.arange(more, dtype=jnp.int32)
    return lax.scan(step, _first(columns(0, head), with_total), starts)[0]


def _first(x: jax.Array, with_total: bool) -> Running:
    largest = lax.stop_gradient(jnp.max(x, axis=-1))
    scaled = jnp.sum(jnp.exp(x - _finite(largest)[..., None]), axis=-1)
    return Running(largest, scaled, jnp.sum(x, axis=-1) if with_total else None)


def _merged(seen: Running, x: jax.Array) -> Running:
    here = lax.stop_gradient(jnp.max(x, axis=-1))
    largest = jnp.maximum(seen.largest, here)
    base = _finite(largest)
    # Not from the base of before: where nothing was finite, that is 0 and not -inf.
    scaled = seen.scaled * jnp.exp(seen.largest - base)
    scaled = scaled + jnp.sum(jnp.exp(x - base[..., None]), axis=-1)
    total = None if seen.total is None else seen.total + jnp.sum(x, axis=-1)
    return Running(largest, scaled, total)


def _finite(largest: jax.Array) -> jax.Array:
    """The maximum, or 0 where subtracting it would leave infinity minus infinity."""
    return jnp.where(jnp.isfinite(largest), largest, 0)


def target_logit(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    *,
    by_bits: bool = True,
) -> Float[Array, "*tokens"]:
    """The logit of each target; that of a class at the edge where there is none."""
    held = _bits(logits) if by_bits else logits
    place = jnp.clip(targets, 0, logits.shape[-1] - 1)[..., None]
    picked = jnp.take_along_axis(held, place, -1, mode="promise_in_bounds")[..., 0]
    return _floats(picked, logits.dtype).astype(accumulator(logits.dtype))


def _is_narrow(x: jax.Array) -> bool:
    return x.dtype.itemsize < 4


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if _is_narrow(x) else x


def _floats(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def is_inside(targets: Int[Array, "*tokens"], vocab: int) -> Bool[Array, "*tokens"]:
    """Whether each target is one of the columns."""
    return (targets >= 0) & (targets < vocab)


def token_loss(
    seen: Running,
    picked: Float[Array, "*tokens"],
    targets: Int[Array, "*tokens"],
    vocab: int,
    smoothing: float,
    part_of: int | None,
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """`(loss, lse)` of each token.

    `lse` waits for whatever else was read of the logits, which then comes before the
    gradient: only so XLA writes it over donated logits, and does not copy them.
    """
    inside = is_inside(targets, vocab)
    lse = jnp.where(jnp.isnan(picked), picked, lse_of(seen))
    linear = jnp.where(inside, (1 - smoothing) * picked, 0)
    if seen.total is not None:
        lse = jnp.where(jnp.isnan(seen.total), seen.total, lse)
        linear = linear + smoothing / (part_of or vocab) * seen.total
    if part_of:
        return -linear, lse
    return jnp.where(inside, lse - linear, jnp.nan), lse


def logits_gradient(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    lse: Float[Array, "*tokens"],
    d_loss: Float[Array, "*tokens"],
    d_lse: Float[Array, "*tokens"] | None,
    smoothing: float,
    part_of: int | None,
) -> Float[Array, "*tokens vocab"]:
    """The gradient of the logits: one pass, no scatter, each column asks whose it is.

    Columns are compared as int32: exact for every size, as float32 is up to 2**24.
    """
    vocab, acc = logits.shape[-1], accumulator(logits.dtype)
    share = d_lse
    if not part_of:
        d_loss = jnp.where(is_inside(targets, vocab), d_loss, 0)
        share = d_loss if d_lse is None else d_loss + d_lse
    label = (targets[..., None] == lax.iota(jnp.int32, vocab)).astype(acc)
    if smoothing:
        label = (1 - smoothing) * label + smoothing / (part_of or vocab)
    grad = -d_loss[..., None] * label
    if share is None:
        return grad
    base = jnp.where(lse == -jnp.inf, 0, lse).astype(acc)[..., None]
    return grad + share[..., None] * jnp.exp(logits.astype(acc) - base)
