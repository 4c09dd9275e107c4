"""Decode attention over a mesh: the batch is split, and the heads.

A group of query heads stays with its key head, and a sequence with its rows of the
cache, so every device attends alone. A cache of blocks belongs to no sequence: it is
split by heads, and whole along the batch's axis.

What crosses the wire. Forward: nothing. Backward: nothing, but for what sequences
share: one all-reduce for each of the sink, the rotation's frequencies and a cache of
blocks adds their gradients over the batch's axis.
"""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from neuronjax.primitives.attention.decode import attention_tkg_fwd_kernel
from neuronjax.sharding.mesh import require_axes

_NAME = "sharded_attention_tkg"


def sharded_attention_tkg(
    mesh: Mesh,
    q: Float[Array, "batch num_heads seq _"],
    k_active: Shaped[Array, "batch num_kv_heads seq _"] | None,
    v_active: Shaped[Array, "batch num_kv_heads seq value_dim"] | None,
    k_prior: Shaped[Array, "rows num_kv_heads _ _"],
    v_prior: Shaped[Array, "rows num_kv_heads _ value_dim"],
    *,
    batch: str | None = None,
    heads: str | None = "tensor",
    **options: Any,
) -> Array | tuple[Array, Array]:
    r"""`attention_tkg_fwd_kernel` with the batch and the heads split over `mesh`.

    $$o_t = \frac{\sum_j e^{\langle q_t, k_j \rangle} v_j}{e^{\mathrm{sink}} + \sum_j
    e^{\langle q_t, k_j \rangle}}$$

    Args:
        mesh: the devices.
        q: `[B, Hq, s, d]`.
        k_active: new keys `[B, Hk, s, d]`, or `None`.
        v_active: new values `[B, Hk, s, value_dim]`, or `None`.
        k_prior: `[B, Hk, d, slots]`, or `[B, Hk, slots, d]` with `tp_k_prior`; with a
            table `[num_blocks, Hk, block_len, d]`, whole along the batch's axis.
        v_prior: `[B, Hk, slots, value_dim]`, or `[num_blocks, Hk, block_len,
            value_dim]`.
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        heads: the mesh axis that splits heads; `None` keeps them whole.
        **options: further arguments of `attention_tkg_fwd_kernel`, by name and of the
            whole batch and all heads. Where the batch is split, a table names blocks of
            the whole cache.

    Returns:
        What `attention_tkg_fwd_kernel` returns, split as `(batch, heads)`.

    Raises:
        ValueError: the mesh lacks an axis, the batch or the heads do not divide, a flat
            cache has spare rows where the batch is split, or the whole call breaks a
            rule of `attention_tkg_fwd_kernel`.

    Source:
        aws-neuron/nki-library, `core/attention/attention_tkg.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> q, new, cache = (jnp.ones((1, *s, 4)) for s in ((4, 1), (2, 1), (2, 8)))
        >>> sharded_attention_tkg(
        ...     *(make_mesh(tensor=1), q, new, new, cache, cache),
        ...     lengths=jnp.array([3]),
        ...     tp_k_prior=True,
        ... ).shape
        (1, 4, 4, 1)
    """
    require_axes(_NAME, mesh, batch=batch, heads=heads)
    given = dict(q=q, k_active=k_active, v_active=v_active)
    given |= dict(k_prior=k_prior, v_prior=v_prior, **options)
    # The rules on values are read here: on a device every operand is traced.
    jax.eval_shape(lambda: attention_tkg_fwd_kernel(**given))
    specs = _specs(batch, heads, given.get("active_blocks_table") is not None)
    arrays = {k: x for k, x in given.items() if k in specs and x is not None}
    static = {k: x for k, x in given.items() if k not in arrays}
    _require_shares(mesh, arrays, specs, batch)

    def one_device(arrays):
        return attention_tkg_fwd_kernel(**arrays, **static)

    lead = P(batch, heads)
    return jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=({name: specs[name] for name in arrays},),
        out_specs=lead if given.get("inv_freqs") is None else (lead, lead),
    )(arrays)


def _specs(batch: str | None, heads: str | None, blocks: bool) -> dict[str, P]:
    """How every operand lies."""
    lead = P(batch, heads)
    cache = P(None, heads) if blocks else lead
    by_sequence = ("lengths", "rope_pos_ids", "start_pos_ids", "active_blocks_table")
    return dict(
        dict.fromkeys(("q", "k_active", "v_active"), lead),
        **dict.fromkeys(("k_prior", "v_prior"), cache),
        **dict.fromkeys(by_sequence, P(batch)),
        mask=P(None, batch, heads),
        inv_freqs=P(),
        sink=P(heads),
    )


def _require_shares(
    mesh: Mesh, arrays: dict[str, Array], specs: dict[str, P], batch: str | None
) -> None:
    """Refuses axes that the devices cannot share evenly."""
    for name, x in arrays.items():
        for axis, size in zip(specs[name], x.shape, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{_NAME}: sequences and heads must be multiples of the "
                    f"{mesh.shape[axis]} devices of {axis!r}, got {name} {x.shape}"
                )
    rows, sequences = arrays["v_prior"].shape[0], arrays["q"].shape[0]
    flat = specs["v_prior"][0] is not None
    if batch is not None and flat and rows != sequences:
        raise ValueError(
            f"{_NAME}: where {batch!r} splits the batch, a flat cache must have a row "
            f"for each of the {sequences} sequences, got {rows}"
        )
