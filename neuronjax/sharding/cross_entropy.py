"""The loss with its vocabulary, and its tokens, over a mesh.

What crosses the wire. Forward: over the vocabulary's axis one all-gather of two scalars
a token, the log-sum-exp of a part and what is subtracted of it; over the batch's axis
what the reduction adds. Backward: nothing for logits; for factors over the vocabulary's
axis one all-reduce, of the gradient of `x`, and over the batch's one, of that of `w`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from neuronjax.primitives.contracts import can
from neuronjax.primitives.cross_entropy.functions import (
    cross_entropy,
    linear_cross_entropy,
)
from neuronjax.primitives.cross_entropy.names import LINEAR_LOSS, LOSS
from neuronjax.primitives.cross_entropy.reduction import combined, labels_of
from neuronjax.sharding.mesh import laid, require_axes


def sharded_cross_entropy(
    mesh: Mesh,
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    *,
    axis: str | None = "tensor",
    batch: str | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    weights: Float[Array, "*tokens"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Float[Array, "..."]:
    r"""`cross_entropy` with the vocabulary divided over one axis of `mesh`.

    With parts `p` of the vocabulary, and the equation of `cross_entropy`:

    $$\mathrm{lse}_t = \log \sum_p e^{\mathrm{lse}_{tp}}$$

    Args:
        mesh: the devices.
        logits: `[*tokens, V]`.
        targets: `[*tokens]`, classes of the whole vocabulary.
        axis: the mesh axis that splits `V`; `None` keeps it whole.
        batch: the mesh axis that splits the first axis of the tokens; `None` keeps it
            whole. A mean is that of all tokens.
        reduction: as in `cross_entropy`; so are the other options.
        ignore_index: likewise.
        weights: likewise.
        label_smoothing: likewise.
        z_loss: likewise.

    Returns:
        As `cross_entropy`; the losses of tokens are split as tokens are.

    Raises:
        ValueError: the mesh lacks an axis, its devices cannot share `V` or the tokens
            evenly, or an argument breaks a rule of `cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> loss = sharded_cross_entropy(
        ...     make_mesh(tensor=1), jnp.zeros((2, 4)), jnp.array([0, 3]))
        >>> round(float(loss), 4)
        1.3863
    """
    outer: dict[str, Any] = dict(
        reduction=reduction, ignore_index=ignore_index, weights=weights
    )
    inner: dict[str, Any] = dict(label_smoothing=label_smoothing, z_loss=z_loss)
    given = dict(logits=logits, targets=targets, **outer, **inner)
    _require(mesh, LOSS, given, dict(axis=axis, batch=batch))
    _divided(LOSS, mesh, axis, V=logits.shape[-1])
    tokens = logits.shape[:-1]
    _divided(LOSS, mesh, batch, tokens=tokens[0] if tokens else 1)

    def local(logits: Array, targets: Array) -> Array:
        options = dict(inner, reduction="none", ignore_index=ignore_index)
        return cross_entropy(logits, targets, axis=axis, **options)

    rows = P(batch, *[None] * (len(tokens) - 1)) if tokens else P()
    split = P(*rows, axis), rows
    loss = _on_mesh(mesh, local, split, rows, (logits, targets))
    return _reduced(loss, targets, logits.shape[-1], **outer)


def sharded_linear_cross_entropy(
    mesh: Mesh,
    x: Float[Array, "*tokens d_model"],
    w: Float[Array, "d_model vocab"],
    targets: Int[Array, "*tokens"],
    *,
    axis: str | None = "tensor",
    batch: str | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    weights: Float[Array, "*tokens"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    block_size: int | None = None,
) -> Float[Array, "..."]:
    r"""`linear_cross_entropy` with the vocabulary divided over one axis of `mesh`.

    With columns `p` of `w` on each device:

    $$\ell_t = \mathrm{cross\_entropy}\left(\left[x_t W_p\right]_p,\ y_t\right)$$

    Each device makes the logits of its part of the vocabulary, block by block, in the
    forward and again in the backward: four products a block.

    Args:
        mesh: the devices.
        x: `[*tokens, H]`, whole on every device of `axis`.
        w: `[H, V]`.
        targets: `[*tokens]`, classes of the whole vocabulary.
        axis: the mesh axis that splits `V`; `None` keeps it whole.
        batch: the mesh axis that splits the first axis of the tokens; `None` keeps it
            whole. A mean is that of all tokens.
        reduction: as in `cross_entropy`; so are the other options.
        ignore_index: likewise.
        weights: likewise.
        label_smoothing: likewise.
        z_loss: likewise.
        block_size: as in `linear_cross_entropy`.

    Returns:
        As `cross_entropy`; the losses of tokens are split as tokens are.

    Raises:
        ValueError: the mesh lacks an axis, its devices cannot share `V` or the tokens
            evenly, or an argument breaks a rule of `linear_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> x, w, y = jnp.eye(2), jnp.zeros((2, 4)), jnp.array([0, 3])
        >>> loss = sharded_linear_cross_entropy(make_mesh(tensor=1), x, w, y)
        >>> round(float(loss), 4)
        1.3863
    """
    outer: dict[str, Any] = dict(
        reduction=reduction, ignore_index=ignore_index, weights=weights
    )
    inner: dict[str, Any] = dict(label_smoothing=label_smoothing, z_loss=z_loss)
    inner["block_size"] = block_size
    given = dict(x=x, w=w, targets=targets, **outer, **inner)
    _require(mesh, LINEAR_LOSS, given, dict(axis=axis, batch=batch))
    _divided(LINEAR_LOSS, mesh, axis, V=w.shape[-1])
    tokens = x.shape[:-1]
    _divided(LINEAR_LOSS, mesh, batch, tokens=tokens[0] if tokens else 1)

    def local(x: Array, w: Array, targets: Array) -> Array:
        options = dict(inner, reduction="none", ignore_index=ignore_index)
        return linear_cross_entropy(x, w, targets, axis=axis, **options)

    rows = P(batch, *[None] * (len(tokens) - 1)) if tokens else P()
    split = P(*rows, None), P(None, axis), rows
    loss = _on_mesh(mesh, local, split, rows, (x, w, targets))
    return _reduced(loss, targets, w.shape[-1], **outer)


def _require(
    mesh: Mesh, function: str, given: dict[str, Any], axes: dict[str, str | None]
) -> None:
    """Refuses what the mesh lacks, and what the function on one device refuses."""
    require_axes(f"sharded_{function}", mesh, **axes)
    report = can(function, **given)
    if not report:
        lines = [v.message for v in report.violations if v.tag == "math"]
        raise ValueError("\n".join(f"sharded_{line}" for line in lines))


def _divided(function: str, mesh: Mesh, axis: str | None, **sizes: int) -> None:
    count = 1 if axis is None else mesh.shape[axis]
    for name, size in sizes.items():
        if size % count:
            raise ValueError(
                f"sharded_{function}: {name} must be a multiple of the {count} devices "
                f"of {axis!r}, got {size}"
            )


def _on_mesh(
    mesh: Mesh, local: Callable, split: tuple[P, ...], rows: P, arrays: tuple
) -> Array:
    arrays = tuple(laid(mesh, x, spec) for x, spec in zip(arrays, split, strict=True))
    return jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=rows)(*arrays)


def _reduced(
    loss: Array,
    targets: Any,
    vocab: int,
    *,
    reduction: str,
    ignore_index: int | None,
    weights: Array | None,
) -> Array:
    """The losses of all tokens, as they lie, or what the reduction makes of them."""
    labels = labels_of(targets, ignore_index, vocab, None)
    return combined(loss, labels, weights, reduction)
