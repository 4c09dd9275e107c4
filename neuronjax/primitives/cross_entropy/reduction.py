"""From the losses of tokens to one number: which tokens count, and for how much."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.cross_entropy.tokens import is_inside
from neuronjax.primitives.cross_entropy.macro import places


class Labels(NamedTuple):
    """The targets of tokens.

    Attributes:
        place: the column of each target; where the logits are a part of the vocabulary
            it may lie outside of them.
        keep: which tokens are not ignored; absent where all count.
        inside: which targets are classes at all; absent where the vocabulary is whole.
        part_of: the classes of the whole vocabulary; absent where it is whole.
        axis: the mesh axis that divides it.
    """

    place: Array
    keep: Array | None
    inside: Array | None = None
    part_of: int | None = None
    axis: str | None = None


def labels_of(
    targets: Any, ignore_index: int | None, columns: int, axis: str | None
) -> Labels:
    """Reads targets; an ignored one becomes class 0, which the mask takes out."""
    given = jnp.asarray(targets)
    keep = _kept(given, ignore_index)
    whole = columns if axis is None else columns * lax.axis_size(axis)
    place = places(targets, whole)
    if keep is not None:
        place = jnp.where(keep, place, 0)
    if axis is None:
        return Labels(place, keep)
    inside = is_inside(place, whole)
    first = lax.axis_index(axis) * columns
    return Labels(place - first, keep, inside, whole, axis)


def _kept(targets: Array, ignore_index: int | None) -> Array | None:
    info = jnp.iinfo(targets.dtype)
    if ignore_index is None or not info.min <= ignore_index <= info.max:
        return None
    return targets != jnp.asarray(ignore_index, targets.dtype)


def finished(loss: Array, lse: Array, labels: Labels, z_loss: float) -> Array:
    """The loss of each token, from that of a part of the vocabulary or of all of it.

    Two scalars a token cross the axis: the lse of a part, and what is subtracted of it.
    """
    if labels.axis is not None:
        pair = jnp.stack([loss, lse])
        parts = lax.all_gather(pair, labels.axis, to="invarying")
        lse = jax.nn.logsumexp(parts[:, 1], axis=0)
        assert labels.inside is not None
        loss = jnp.where(labels.inside, lse + jnp.sum(parts[:, 0], axis=0), jnp.nan)
    if z_loss:
        loss = loss + z_loss * lse**2
    return loss if labels.keep is None else jnp.where(labels.keep, loss, 0)


def shares(
    keep: Array | None, weights: Array | None, like: Array, reduction: str
) -> Array:
    """What each token's loss is multiplied by; nothing to divide by gives 0."""
    share = jnp.ones_like(like) if weights is None else weights.astype(like.dtype)
    if keep is not None:
        share = jnp.where(keep, share, 0)
    if reduction != "mean":
        return share
    total = jnp.sum(share)
    return share / jnp.where(total == 0, 1, total)


def combined(loss: Array, labels: Labels, weights: Array | None, reduction: str):
    """The loss of each token, or their weighted sum or mean."""
    if reduction == "none" and weights is None:
        return loss
    each = shares(labels.keep, weights, loss, reduction) * loss
    return each if reduction == "none" else jnp.sum(each)
