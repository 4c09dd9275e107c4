"""The vendor's two functions, by its names."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from neuronjax.primitives import contracts
from neuronjax.primitives.cross_entropy.facts import facts
from neuronjax.primitives.cross_entropy.macro import (
    cross_entropy_bwd_kernel,
    cross_entropy_fwd_kernel,
)


@contracts.contracted(facts)
def cross_entropy_forward(
    logits_hbm: Float[Array, "positions vocab"],
    targets_hbm: Int[Array, " positions"],
    positions_per_batch: int = 32,
    chunk_size: int = 32768,
    dtype: DTypeLike = jnp.bfloat16,
) -> tuple[Float[Array, " positions"], Float[Array, " positions"]]:
    r"""The loss of each position, and the log-sum-exp that its gradient needs.

    $$\mathrm{lse}_p = \log \sum_v e^{x_{pv}}, \qquad
      \mathrm{loss}_p = \mathrm{lse}_p - x_{p, y_p}$$

    Args:
        logits_hbm: `[P, V]`, any floating dtype.
        targets_hbm: `[P]`, integers.
        positions_per_batch: how many positions the chip takes at a time; a hint.
        chunk_size: columns that are reduced at a time, online; one of more than `V` is
            one of `V`. It changes rounding alone.
        dtype: of both results. The arithmetic is float32, or float64, whatever it is.

    Returns:
        `(loss, lse)`, each `[P]`; nothing is reduced over positions. Both have
        derivatives. Checkpoint names: `cross_entropy_fwd_loss`, `_lse`, `_base`, and
        where the lse is rounded `_wide_lse`, which the backward reads.

    Raises:
        ValueError: the arguments break a rule, or a target that is known while tracing
            is no class. Under `jit` such a position has loss NaN and no gradient. The
            chip's limits (chunks no wider than `V` or 65536, 128 positions, 24 MiB) are
            reported by `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, `cross_entropy.py` of the experimental losses.

    Example:
        >>> import jax.numpy as jnp
        >>> loss, lse = cross_entropy_forward(
        ...     jnp.zeros((1, 4)), jnp.array([2]), chunk_size=4, dtype=jnp.float32
        ... )
        >>> loss.round(4), lse.round(4)
        (Array([1.3863], dtype=float32), Array([1.3863], dtype=float32))
    """
    return cross_entropy_fwd_kernel(
        logits_hbm,
        targets_hbm,
        dtype=dtype,
        chunk_size=chunk_size,
        positions_per_batch=int(positions_per_batch),
    )


@contracts.contracted(facts)
def cross_entropy_backward(
    logits_hbm: Float[Array, "positions vocab"],
    targets_hbm: Int[Array, " positions"],
    lse_state_hbm: Float[Array, " positions"],
    reduction: str = "mean",
    positions_per_batch: int = 32,
    chunk_size: int = 32768,
    dtype: DTypeLike = jnp.bfloat16,
    inplace: bool = True,
) -> Float[Array, "positions vocab"]:
    r"""The gradient of the mean or the sum of `cross_entropy_forward`'s losses.

    $$dx_{pv} = s \left(e^{x_{pv} - \mathrm{lse}_p} - [v = y_p]\right), \qquad
      s = 1/P \text{ for the mean}, \; 1 \text{ for the sum}$$

    Args:
        logits_hbm: `[P, V]`, any floating dtype.
        targets_hbm: `[P]`, integers.
        lse_state_hbm: `[P]`, as the forward gave it. Rounded to bfloat16 it moves the
            softmax by up to a hundredth.
        reduction: `"mean"` divides by `P`, all positions; `"sum"` does not.
        positions_per_batch: a hint.
        chunk_size: a hint: one pass whatever it is.
        dtype: what the gradient is rounded to.
        inplace: the result takes the buffer of the logits where they are donated, as by
            `jax.jit(..., donate_argnums=0)`, and so has their dtype. Values are the
            same, and logits that are not donated survive. Without it the result has
            `dtype`.

    Returns:
        `[P, V]`.

    Raises:
        ValueError: as `cross_entropy_forward`.

    Source:
        aws-neuron/nki-library, `cross_entropy.py` of the experimental losses.

    Example:
        >>> import jax.numpy as jnp
        >>> logits, lse = jnp.zeros((1, 4)), jnp.log(jnp.array([4.0]))
        >>> cross_entropy_backward(logits, jnp.array([2]), lse, chunk_size=4)
        Array([[ 0.25,  0.25, -0.75,  0.25]], dtype=float32)
    """
    return cross_entropy_bwd_kernel(
        logits_hbm,
        targets_hbm,
        lse_state_hbm,
        reduction=reduction,
        dtype=dtype,
        inplace=bool(inplace),
        chunk_size=int(chunk_size),
        positions_per_batch=int(positions_per_batch),
    )
