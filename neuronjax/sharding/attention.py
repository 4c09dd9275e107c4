"""Attention over a mesh: the batch is split, and the heads.

A group of query heads stays with its key head, so every device attends alone.

What crosses the wire. Forward: nothing. Backward: nothing, but for what devices share:
one all-reduce for each set of axes adds the gradients of the sinks, biases and scales
that are whole along them.
"""

from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Float

from neuronjax.sharding.attention_operands import split_attention
from neuronjax.sharding.mesh import require_axes


def sharded_attention(
    mesh: Mesh,
    q: Float[Array, "batch num_heads _ _"],
    k: Float[Array, "batch num_kv_heads _ _"],
    v: Float[Array, "batch num_kv_heads kv_seq value_dim"],
    *,
    batch: str | None = None,
    heads: str | None = "tensor",
    **options: Any,
) -> Array | tuple[Array, ...]:
    """`attention_cte` with the batch and the heads split over `mesh`.

    Args:
        mesh: the devices.
        q: `[B, Hq, Sq, d]`; the last two axes as `attention_cte` takes them.
        k: `[B, Hk, d, Sk]`, likewise.
        v: `[B, Hk, Sk, value_dim]`.
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        heads: the mesh axis that splits heads; `None` keeps them whole.
        **options: further arguments of `attention_cte`, by name. Where its leading axis
            is the heads of all sequences these have two: `k_prior` and `v_prior`
            `[B, Hk, ..]`; `sink` `[1 or B, Hq, 1]`; `mask` and `bias`
            `[1 or B, 1 or Hq, 1 or Sq, 1 or kv_seq]`, split along the axes that are not
            1. `prior_used_len`, the bounds and `cp_offset` are whole everywhere. The
            weights that `dropout_key` drops are those of one device.

    Returns:
        What `attention_cte` returns, batch and heads as two axes, split as
        `(batch, heads)`.

    Raises:
        ValueError: the mesh lacks an axis, the batch or the heads do not divide, or a
            sink, a mask or a bias has another shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> q, k = jnp.ones((1, 4, 3, 8)), jnp.ones((1, 2, 8, 3))
        >>> v = jnp.ones((1, 2, 3, 5))
        >>> sharded_attention(make_mesh(tensor=1), q, k, v).shape
        (1, 4, 3, 5)
    """
    require_axes("sharded_attention", mesh, batch=batch, heads=heads)
    operands = dict(q=q, k=k, v=v, **options)
    return split_attention(
        "sharded_attention", mesh, operands, batch=batch, heads=heads
    )
