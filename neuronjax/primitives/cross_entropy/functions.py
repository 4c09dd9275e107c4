"""The losses of models: options, reductions, and a vocabulary over a mesh axis."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives import contracts
from neuronjax.primitives.cross_entropy.facts import facts
from neuronjax.primitives.cross_entropy.linear_macro import linear_cross_entropy_kernel
from neuronjax.primitives.cross_entropy.macro import cross_entropy_fwd_kernel
from neuronjax.primitives.cross_entropy.reduction import (
    combined,
    finished,
    labels_of,
    shares,
)


@contracts.contracted(facts)
def cross_entropy(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Float[Array, "*tokens"] | None = None,
    axis: str | None = None,
) -> Float[Array, "..."]:
    r"""The cross-entropy of a softmax over a large vocabulary.

    $$\mathrm{lse}_t = \log \sum_v e^{x_{tv}}, \qquad
      \ell_t = \mathrm{lse}_t - (1 - \epsilon)\, x_{t, y_t}
      - \frac{\epsilon}{V} \sum_v x_{tv} + \zeta\, \mathrm{lse}_t^2$$

    Args:
        logits: `[*tokens, V]`, any floating dtype, in nats.
        targets: `[*tokens]`, integers, the class `y` of each token.
        reduction: `"none"` returns `w * loss` of each token, `"sum"` their sum,
            `"mean"` the sum divided by that of the weights: by the number of tokens
            that count. Where no token counts, the mean is 0.
        ignore_index: the target of tokens that do not count: their loss and gradient
            are 0, whatever their logits are.
        label_smoothing: `epsilon`, from 0 to 1.
        z_loss: `zeta`, from 0 on: keeps the lse near 0.
        weights: `[*tokens]`, of each token, 1 unless named; they have a gradient.
        axis: inside `shard_map`, the mesh axis that divides `V` evenly; `logits` are
            the part of this device, `targets` are classes of the whole. Two scalars a
            token cross it, in one all-gather, and nothing in the backward.

    Returns:
        A scalar, or `[*tokens]` for `"none"`: float32, or float64 for float64 logits.
        The gradient has the dtype of `logits`, and takes no N x V array beside itself.
        Checkpoint names: `cross_entropy_fwd_loss`, `_lse` and `_base`.

    Raises:
        ValueError: the arguments break a rule, or a target that is known while tracing
            is no class. Under `jit` such a token has loss NaN and no gradient.

    Source:
        Szegedy et al. 2015, https://arxiv.org/abs/1512.00567, section 7 (smoothing);
        Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5 (z-loss).

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.array([[1.0, 1, 1, 1], [0, 0, 0, 0], [2, 0, 0, 0]])
        >>> loss = cross_entropy(logits, jnp.array([2, -100, 0]), ignore_index=-100)
        >>> round(float(loss), 6)
        0.863524
    """
    labels = labels_of(targets, ignore_index, logits.shape[-1], axis)
    loss, lse = cross_entropy_fwd_kernel(
        logits,
        labels.place,
        labels.keep,
        smoothing=label_smoothing,
        part_of=labels.part_of,
    )
    loss = finished(loss, lse, labels, z_loss)
    return combined(loss, labels, weights, reduction)


@contracts.contracted(facts)
def linear_cross_entropy(
    x: Float[Array, "*tokens d_model"],
    w: Float[Array, "d_model vocab"],
    targets: Int[Array, "*tokens"],
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Float[Array, "*tokens"] | None = None,
    axis: str | None = None,
    block_size: int | None = None,
) -> Float[Array, "..."]:
    r"""The cross-entropy of the logits `x w`, which never exist all at once.

    $$\ell_t = \mathrm{cross\_entropy}(x_t W,\ y_t)$$

    Tokens come in blocks. `"mean"` and `"sum"` form the gradients of `x` and `w` in the
    forward pass, while a block's logits are there: three products a block. With
    `"none"` or `axis` the backward makes the logits again: four.

    Args:
        x: `[*tokens, H]`, any floating dtype.
        w: `[H, V]`.
        targets: `[*tokens]`, integers.
        reduction: as in `cross_entropy`; so are the other options.
        ignore_index: the target of tokens that do not count; their `x` reaches nothing.
        label_smoothing: from 0 to 1.
        z_loss: from 0 on.
        weights: `[*tokens]`.
        axis: inside `shard_map`, the mesh axis that divides the columns of `w` evenly.
        block_size: tokens whose logits exist at a time; unless named 256, or as many as
            have 64 MB of them.

    Returns:
        As `cross_entropy`. Products are summed in float32, or float64 for float64.
        Checkpoint names: `linear_cross_entropy_total`, `_each`, `_dx` and `_dw`; for
        `"none"` and `axis` `linear_cross_entropy_loss` and `_lse`.

    Raises:
        ValueError: as `cross_entropy`; or `x` and `w` do not fit. Under `jit` a target
            that is no class makes the loss of its token NaN.

    Source:
        Hsu et al. 2024, Liger kernel, https://arxiv.org/abs/2410.10989, section 3.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.eye(2), jnp.zeros((2, 4))
        >>> round(float(linear_cross_entropy(x, w, jnp.array([0, 3]))), 4)
        1.3863
    """
    tokens = x.shape[:-1]
    labels = labels_of(targets, ignore_index, w.shape[-1], axis)
    if labels.keep is not None:
        x = jnp.where(labels.keep[..., None], x, jnp.zeros((), x.dtype))
    rows = _rows(x, x.ndim - 1)
    options = dict(smoothing=label_smoothing, block_size=block_size)
    place = _rows(labels.place, len(tokens))
    if reduction != "none" and axis is None:
        like = jnp.zeros_like(labels.place, accumulator(x.dtype, w.dtype))
        share = shares(labels.keep, weights, like, reduction)
        options |= dict(z_loss=z_loss)
        return linear_cross_entropy_kernel(
            rows, w, place, _rows(share, len(tokens)), **options
        )
    options |= dict(part_of=labels.part_of)
    outs = linear_cross_entropy_kernel(rows, w, place, **options)
    loss, lse = (out.reshape(tokens) for out in outs)
    loss = finished(loss, lse, labels, z_loss)
    return combined(loss, labels, weights, reduction)


def _rows(x: Array, count: int) -> Array:
    """The first `count` axes as one."""
    return lax.collapse(x, 0, count) if count else x[None]
