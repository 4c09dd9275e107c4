"""The decode block over a mesh: its heads, and the sequences of its caches, divided.

Every rank projects its own query heads of all sequences, and attends with the heads of
all ranks to the cached keys and values of its own sequences.

What crosses the wire. Forward: two all-gathers, of the queries and of what attention
made of them; nothing else, `X_out` is a part of a sum. Backward: both again, which XLA
may join with the forward's; two all-to-alls back; and all-reduces of the gradients of
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
from neuronjax.primitives.contracts import can
from neuronjax.primitives.options import QuantizationType, member
from neuronjax.sharding.mesh import require_axes

_NAME = "sharded_attention_block_tkg"
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
            device: `N` heads, `B` sequences. `W_qkv`, `bias_qkv` and the scale of `ROW`
            may be pairs, of the query columns and those of key and value: each rank
            then holds its query columns alone, and no slice moves them. Blocks of a
            block cache are divided in order, and a table and an index count within the
            blocks of their rank.

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
    require_axes(_NAME, mesh, ranks=ranks)
    count = mesh.shape[ranks]
    _require_divisible(X, count, arguments)
    arrays = {
        key: x
        for key, x in arguments.items()
        if hasattr(x, "shape") or isinstance(x, tuple)
    }
    options = {key: x for key, x in arguments.items() if key not in arrays}
    _require_call(X, arrays, options)
    parts, whole = _divided(arrays, options)

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


def _require_call(X: Any, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuses what one device would, where values are known yet."""
    given = {
        key: jax.eval_shape(lambda *x: jnp.concatenate(x, 1), *x)
        if isinstance(x, tuple)
        else x
        for key, x in arrays.items()
    }
    report = can("attention_block_tkg", X, **given, **options)
    if not report:
        lines = [v.message for v in report.violations if v.tag == "math"]
        raise ValueError("\n".join(lines).replace("attention_block_tkg", _NAME))


def _require_divisible(X: Any, count: int, arguments: dict[str, Any]) -> None:
    """Refuses heads or sequences that the ranks cannot share evenly."""
    for name in ("W_qkv", "V_cache"):
        if arguments.get(name) is None:
            raise ValueError(f"{_NAME}: {name} must be given")
    heads = _query_columns(arguments["W_qkv"], arguments) // _head_dim(arguments)
    if heads < 1 or heads % count or X.shape[0] % count:
        raise ValueError(
            f"{_NAME}: heads of W_qkv and sequences of X must be multiples of the "
            f"{count} ranks, got {heads} and {X.shape[0]}"
        )


def _head_dim(arguments: dict[str, Any]) -> int:
    return arguments["V_cache"].shape[-1]


def _query_columns(columns: Any, arguments: dict[str, Any]) -> int:
    """How many columns belong to queries."""
    if isinstance(columns, tuple):
        return columns[0].shape[-1]
    return columns.shape[-1] - 2 * _head_dim(arguments)


def _divided(
    arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each rank holds a part of, and what it holds whole.

    The scales of STATIC belong to no column.
    """
    kind = member(QuantizationType, options.get("quantization_type_qkv"))
    columns = _COLUMNS if kind is QuantizationType.ROW else _COLUMNS[:2]
    parts, whole = {}, {}
    for key, x in arrays.items():
        if key in columns:
            width = _query_columns(x, arrays)
            pair = x if isinstance(x, tuple) else (x[:, :width], x[:, width:])
            parts[key], whole[key] = pair
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
