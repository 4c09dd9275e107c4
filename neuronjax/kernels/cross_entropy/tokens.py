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

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import is_divided, shards

# Columns of narrow logits that are widened at a time, and of wide ones where a loop is
# needed. XLA's CPU backend sums up to LONGEST entries of a row on all cores; of longer
# rows it makes a scalar loop on one: 350 ms against 63 for 1024 x 128256.
CHUNK, WIDE_CHUNK, LONGEST, PARTS = 1024, 4096, 2**15, 32


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


class Reduced(NamedTuple):
    """What all columns say of each token.

    Attributes:
        base: what was subtracted: their maximum, 0 where that is infinite.
        scaled: `sum exp(x - base)`.
        total: their sum; absent where no equation needs it.
    """

    base: jax.Array
    scaled: jax.Array
    total: jax.Array | None


def lse_of(seen: Reduced) -> jax.Array:
    """The log-sum-exp; -inf, a constant, where every logit is."""
    empty = seen.scaled == 0
    log = jnp.log(jnp.where(empty, 1, seen.scaled))
    return jnp.where(empty, -jnp.inf, seen.base + log)


def reduced(
    logits: Float[Array, "*tokens vocab"],
    chunk: int | None = None,
    *,
    picked: Float[Array, "*tokens"],
    with_total: bool = False,
    by_bits: bool = True,
) -> Reduced:
    """The vocabulary in chunks of columns, in the accumulator's dtype.

    Every exponent is at most 0. Without `chunk`, logits of 32 bits and more are one
    chunk, which XLA reads in place. Narrow ones are cut as bits (`by_bits`): XLA would
    widen all of them ahead of the loop. Bits have no derivative.
    """
    vocab, acc = logits.shape[-1], accumulator(logits.dtype)
    parts = _parts(logits)
    if chunk is None and not _is_narrow(logits) and parts:
        return _at_once(logits.astype(acc), picked, parts, with_total)
    default = CHUNK if _is_narrow(logits) else WIDE_CHUNK
    chunk = min(chunk or default, vocab)
    more = (vocab - 1) // chunk
    head = vocab - more * chunk
    if not more:
        return _at_once(logits.astype(acc), picked, 1, with_total)
    held = _bits(logits) if by_bits else logits

    def columns(start, size: int) -> jax.Array:
        cut = lax.dynamic_slice_in_dim(held, start, size, held.ndim - 1)
        return _floats(cut, logits.dtype).astype(acc)

    def step(seen: Running, start) -> tuple[Running, None]:
        return _merged(seen, columns(start, chunk)), None

    starts = head + chunk * jnp.arange(more, dtype=jnp.int32)
    seen = lax.scan(step, _first(columns(0, head), with_total), starts)[0]
    return Reduced(_finite(seen.largest), seen.scaled, seen.total)


def _parts(logits: jax.Array) -> int:
    """In how many parts a row is summed; 0 where none are even, which takes a loop."""
    vocab = logits.shape[-1]
    if not isinstance(vocab, int) or vocab <= LONGEST or is_divided(logits):
        return 1
    even = (n for n in range(2, PARTS + 1) if vocab % n == 0 and vocab // n <= LONGEST)
    return next(even, 0)


def _at_once(x: jax.Array, picked: jax.Array, parts: int, with_total: bool) -> Reduced:
    """The maximum of all columns first, then the sum.

    The base waits for whatever else is read of the logits. So the exponentials, which
    the gradient reads too, come last: XLA stores them where the gradient will be, and
    over donated logits it needs no copy of them.
    """
    largest = _over_columns(jnp.max, lax.stop_gradient(x), parts)
    total = _over_columns(jnp.sum, x, parts) if with_total else None
    base = _finite(largest)
    for read in (picked, total):
        if read is not None:
            seen = lax.stop_gradient(read)
            base = jnp.where(jnp.isnan(seen), seen, base)
    scaled = _over_columns(jnp.sum, jnp.exp(x - base[..., None]), parts)
    return Reduced(base, scaled, total)


def _over_columns(fun: Callable[..., jax.Array], x: jax.Array, parts: int) -> jax.Array:
    """`fun` of each row, by parts: XLA would join them, were there no barrier."""
    if parts == 1:
        return fun(x, axis=-1)
    each = fun(x.reshape(*x.shape[:-1], parts, -1), axis=-1)
    return fun(lax.optimization_barrier(each), axis=-1)


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
    """The logit of each target; where there is none, that of some class or 0."""
    if shards(logits, -1) > 1:  # a gather has no type for columns that a mesh divides
        here = targets[..., None] == lax.iota(jnp.int32, logits.shape[-1])
        picked = jnp.where(here, logits, jnp.zeros((), logits.dtype))
        return jnp.sum(picked.astype(accumulator(logits.dtype)), axis=-1)
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
    seen: Reduced,
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
    base: Float[Array, "*tokens"] | None = None,
) -> Float[Array, "*tokens vocab"]:
    """The gradient of the logits: one pass, no scatter, each column asks whose it is.

    Columns are compared as int32: exact for every size, as float32 is up to 2**24. With
    the `base` of the forward, `exp(x - base)` is what that has computed: in one program
    it is computed once.
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
    lse, nothing = lse.astype(acc), lse == -jnp.inf
    if base is None:
        base = jnp.where(nothing, 0, lse)
    else:
        base = lax.stop_gradient(base.astype(acc))
        share = share * jnp.where(nothing, 0, jnp.exp(base - lse))
    return grad + share[..., None] * jnp.exp(logits.astype(acc) - base[..., None])
