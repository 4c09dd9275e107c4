"""The four computations straight from the equations, on all logits at once."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.cross_entropy.logits import count, kept, stored
from neuronjax.kernels.dtypes import accumulator, promoted


def cross_entropy_plain(
    logits, targets, keep, *, name: str, out_dtype: str | None, **config: Any
) -> tuple:
    """`(loss, lse)`, and with `residual` what `cross_entropy_fwd` adds."""
    x = kept(keep, logits.astype(accumulator(logits.dtype)))
    loss, lse = (kept(keep, y) for y in _losses(x, targets, **_options(config)))
    dtype = out_dtype or lse.dtype
    outs = loss.astype(dtype), lse.astype(dtype)
    if not config.get("residual"):
        return outs
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1))
    base = jnp.where(jnp.isfinite(largest), largest, 0)
    return (*outs, lse, base) if out_dtype else (*outs, base)


def cross_entropy_plain_bwd(
    logits, targets, keep, lse, d_loss, d_lse, base=None, *, name: str, **config: Any
) -> tuple:
    """`(dlogits,)`."""
    x = kept(keep, logits.astype(accumulator(logits.dtype)))
    share = jnp.ones_like(lse, x.dtype) if d_loss is None else d_loss.astype(x.dtype)
    if config["reduction"] == "mean":
        share = share / count(lse)
    more = jnp.zeros_like(share) if d_lse is None else d_lse.astype(x.dtype)
    grad = _gradient(x, targets, lse.astype(x.dtype), share, more, **_options(config))
    return (stored(kept(keep, grad), config["out_dtype"], config["stored_dtype"]),)


def linear_cross_entropy_plain(
    x, w, targets, coefficients, *, name: str, form: str, **config: Any
) -> tuple:
    """`(loss, lse)`, or the weighted sum of losses."""
    loss, lse = _losses(_logits(x, w), targets, **_options(config))
    if form == "tokens":
        return loss, lse
    each = loss + config.get("z_loss", 0.0) * lse**2
    return (jnp.sum(coefficients.astype(each.dtype) * each),)


def linear_cross_entropy_plain_bwd(
    x, w, targets, lse, d_loss, d_lse, *, name: str, **config: Any
) -> tuple:
    """`(dx, dw)`."""
    z = _logits(x, w)
    wide = (y.astype(z.dtype) for y in (lse, d_loss, d_lse))
    g = _gradient(z, targets, *wide, **_options(config))
    dx, dw = g @ w.astype(g.dtype).T, x.astype(g.dtype).T @ g
    return dx.astype(x.dtype), dw.astype(w.dtype)


def _options(config: dict[str, Any]) -> dict[str, Any]:
    smoothing, part_of = config.get("smoothing"), config.get("part_of")
    return dict(smoothing=float(smoothing or 0), part_of=part_of or 0)


def _logits(x, w):
    dtype = promoted(x.dtype, w.dtype)
    acc = accumulator(dtype)
    return jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=acc)


def _labels(targets, vocab: int, smoothing: float, part_of: int, dtype):
    hit = jax.nn.one_hot(targets, vocab, dtype=dtype)
    return (1 - smoothing) * hit + smoothing / (part_of or vocab)


def _losses(x, targets, smoothing: float, part_of: int):
    lse = jax.nn.logsumexp(x, axis=-1)
    labels = _labels(targets, x.shape[-1], smoothing, part_of, x.dtype)
    linear = jnp.sum(jnp.where(labels == 0, 0, labels * x), axis=-1)
    if part_of:
        return -linear, lse
    known = (targets >= 0) & (targets < x.shape[-1])
    return jnp.where(known, lse - linear, jnp.nan), lse


def _gradient(x, targets, lse, d_loss, d_lse, smoothing: float, part_of: int):
    labels = _labels(targets, x.shape[-1], smoothing, part_of, x.dtype)
    share = d_lse
    if not part_of:
        d_loss = jnp.where((targets >= 0) & (targets < x.shape[-1]), d_loss, 0)
        share = d_loss + d_lse
    softmax = jnp.exp(x - lse[..., None])
    return share[..., None] * softmax - d_loss[..., None] * labels
