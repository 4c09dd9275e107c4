"""The decode block over a mesh: its heads, and the sequences of its caches, divided.

Every rank projects its own query heads of all sequences, and attends with the heads of
all ranks to the cached keys and values of its own sequences.

What crosses the wire. Forward: two all-gathers, of the queries and of what attention
made of them; nothing else, `X_out` is a part of a sum. Backward: the queries' and the
heads' all-gather again, two all-to-alls back, and one all-reduce of the gradients of
what every rank holds whole (`X`, the columns of key and value, gains, tables, sinks).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.primitives.attention_block_tkg import attention_block_tkg
from neuronjax.primitives.options import QuantizationType, member
from neuronjax.sharding.mesh import require_axes

# Operands of which each rank holds the rows, or along another axis, of its sequences.
_BY_SEQUENCE = {
    "K_cache": P("ranks"),
    "V_cache": P("ranks"),
    "active_blocks_table": P("ranks"),
    "kv_cache_update_idx": P("ranks"),
    "attention_mask": P(None, "ranks"),
}
# Operands whose columns are the query heads, then the key head, then the value head.
_COLUMNS = ("W_qkv", "bias_qkv", "weight_dequant_scale_qkv")


def sharded_attention_block_tkg(
    mesh: Mesh,
    X: Float[Array, "batch seq d_model"],
    *,
    ranks: str = "tensor",
    **arguments: Any,
) -> tuple[Array, Array, Array]:
    """`attention_block_tkg` with heads and caches divided over one axis of `mesh`.

    Args:
        mesh: the devices.
        X: `[B, S, H]`, whole on every rank.
        ranks: the mesh axis of `R` ranks; rank `r` has query heads `r*N/R` on, and the
            caches of the sequences `r*B/R` on.
        **arguments: further arguments of `attention_block_tkg`, by name, as for one
            device: `N` heads, `B` sequences. Blocks of a block cache are divided in
            order, and a table and an index count within the blocks of their rank.

    Returns:
        `(X_out, K_out, V_out)`. `X_out` has an axis of ranks in front: `X_out[r]` is
        what rank `r` computed, its part of the sum over heads (`bias_out` is in that of
        rank 0), or without `W_out` its own heads. The caches are divided as they came;
        new tokens are `[D, B, S]` and `[B, 1, S, D]`, divided by sequence.

    Raises:
        ValueError: the mesh lacks the axis; the heads or sequences cannot be divided;
            or an argument breaks a rule of `attention_block_tkg`.

    Example:
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> X, W_qkv = jnp.ones((1, 1, 2)), jnp.eye(2, 6) + jnp.eye(2, 6, 4)
        >>> cache, seen = jnp.zeros((1, 3, 2)), jnp.ones((1, 1, 1, 1), bool)
        >>> X_out, *_ = sharded_attention_block_tkg(
        ...     make_mesh(tensor=1), X, W_qkv=W_qkv, K_cache=cache, V_cache=cache,
        ...     attention_mask=seen, update_cache=False,
        ... )
        >>> X_out.shape
        (1, 1, 1, 2, 1)
    """
    require_axes("sharded_attention_block_tkg", mesh, ranks=ranks)
    count = mesh.shape[ranks]
    width = _head_width(X, count, arguments)
    arrays = {key: x for key, x in arguments.items() if hasattr(x, "shape")}
    options = {key: x for key, x in arguments.items() if key not in arrays}
    parts, whole = _divided(arrays, width, options)

    def local(X, parts, whole):
        given = whole | {key: x for key, x in parts.items() if key not in _COLUMNS}
        for key in set(_COLUMNS) & set(parts):
            given[key] = jnp.concatenate([parts[key], whole[key]], 1)
        if given.get("bias_out") is not None:
            first = lax.axis_index(ranks) == 0
            given["bias_out"] = jnp.where(first, given["bias_out"], 0)
        group = dict(KVDP=count, KVDP_replica_group=ranks)
        x_out, *stored = attention_block_tkg(X, **given, **options, **group)
        return x_out[None], *stored

    specs = {key: _spec(key, ranks) for key in parts}
    stored = P(ranks) if options.get("update_cache", True) else None
    outs = P(ranks), stored or P(None, ranks), stored or P(ranks)
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, P()), out_specs=outs)(
        X, parts, whole
    )


def _head_width(X: Any, count: int, arguments: dict[str, Any]) -> int:
    """The columns of all query heads."""
    for name in ("W_qkv", "V_cache"):
        if getattr(arguments.get(name), "shape", ()) == ():
            raise ValueError(f"sharded_attention_block_tkg: {name} must be given")
    head, columns = arguments["V_cache"].shape[-1], arguments["W_qkv"].shape[-1]
    heads = columns // head - 2
    if heads < 1 or heads % count or X.shape[0] % count:
        raise ValueError(
            "sharded_attention_block_tkg: heads of W_qkv and sequences of X must be "
            f"multiples of the {count} ranks, got {heads} and {X.shape[0]}"
        )
    return heads * head


def _divided(
    arrays: dict[str, Any], width: int, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each rank holds a part of, and what it holds whole.

    The scales of STATIC belong to no column.
    """
    kind = member(QuantizationType, options.get("quantization_type_qkv"))
    columns = _COLUMNS if kind is QuantizationType.ROW else _COLUMNS[:2]
    parts, whole = {}, {}
    for key, x in arrays.items():
        if key in columns:
            parts[key], whole[key] = x[:, :width], x[:, width:]
        elif key in _BY_SEQUENCE or key == "W_out":
            parts[key] = x
        else:
            whole[key] = x
    return parts, whole


def _spec(key: str, ranks: str) -> P:
    if key in _COLUMNS:
        return P(None, ranks)
    if key == "W_out":
        return P(ranks)
    return P(*(ranks if axis else None for axis in _BY_SEQUENCE[key]))
