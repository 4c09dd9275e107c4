"""Attention over a mesh: the batch is split, and the heads.

A group of query heads stays with its key head, so every device attends alone.

What crosses the wire. Forward: nothing. Backward: nothing.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.primitives.attention.prefill import attention_cte
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
        **options: further arguments of `attention_cte`.

    Returns:
        What `attention_cte` returns, batch and heads as two axes, split as
        `(batch, heads)`.

    Raises:
        ValueError: the mesh lacks an axis, or the batch or the heads do not divide.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> q, k = jnp.ones((1, 4, 3, 8)), jnp.ones((1, 2, 8, 3))
        >>> v = jnp.ones((1, 2, 3, 5))
        >>> sharded_attention(make_mesh(tensor=1), q, k, v).shape
        (1, 4, 3, 5)
    """
    require_axes("sharded_attention", mesh, batch=batch, heads=heads)
    _require_whole(mesh, batch, "batch", q.shape[0], k.shape[0], v.shape[0])
    _require_whole(mesh, heads, "heads", q.shape[1], k.shape[1], v.shape[1])

    def local(q, k, v):
        rows = q.shape[:2]
        outs = attention_cte(*(lax.collapse(x, 0, 2) for x in (q, k, v)), **options)
        return jax.tree.map(lambda x: x.reshape(*rows, *x.shape[1:]), outs)

    split = P(batch, heads)
    return jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)(q, k, v)


def _require_whole(mesh: Mesh, axis: str | None, word: str, *sizes: int) -> None:
    """Refuses sizes that the devices of `axis` cannot share evenly."""
    shards = 1 if axis is None else mesh.shape[axis]
    if any(size % shards for size in sizes):
        raise ValueError(
            f"sharded_attention: {word} of q, k and v must be multiples of the "
            f"{shards} devices of {axis!r}, got {sizes}"
        )
