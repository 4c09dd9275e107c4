"""QKV over a mesh: the batch is split, and the heads.

The columns of the fused weight are all query heads, then key heads, then value heads: a
plain split of them would give one device queries only. `shard_qkv_columns` reorders
them once, device by device; each device then projects its own heads.

What crosses the wire. Forward: nothing. Backward: one all-reduce over the heads' axis,
of the gradient of the activations; where the batch is split, one over its axis, of the
weights' gradients, and one over both, of the gradient of the norm's gain. XLA joins
those that run over the same axes: with the batch whole there is one.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.primitives.options import QKVOutputLayout, QuantizationType, member
from neuronjax.primitives.qkv import qkv_cte
from neuronjax.sharding.mesh import require_axes

Columns = TypeVar("Columns", bound=Any)


def shard_qkv_columns(
    weight: Float[Columns, "*d_model columns"],
    num_q_heads: int,
    num_kv_heads: int,
    shards: int,
) -> Columns:
    """Reorders fused columns so that shard `i` of them is device `i`'s heads.

    Args:
        weight: a fused weight `[H, I]`, or a bias `[1, I]`.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.
        shards: devices on the heads' axis.

    Returns:
        The same columns: for each device its query, its key, its value heads.

    Raises:
        ValueError: the heads do not divide.

    Example:
        >>> import numpy as np
        >>> shard_qkv_columns(np.arange(8), num_q_heads=4, num_kv_heads=2, shards=2)
        array([0, 1, 4, 6, 2, 3, 5, 7])
    """
    return _take(weight, head_order(num_q_heads, num_kv_heads, shards))


def unshard_qkv_columns(
    weight: Float[Columns, "*d_model columns"],
    num_q_heads: int,
    num_kv_heads: int,
    shards: int,
) -> Columns:
    """The inverse of `shard_qkv_columns`; for outputs of `sharded_qkv` too.

    Args:
        weight: columns in sharded order.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.
        shards: devices on the heads' axis.

    Returns:
        The columns in the order of `qkv`.

    Raises:
        ValueError: the heads do not divide.
    """
    return _take(weight, np.argsort(head_order(num_q_heads, num_kv_heads, shards)))


def head_order(num_q_heads: int, num_kv_heads: int, shards: int) -> np.ndarray:
    """The heads, device by device, as numbers in the order of `qkv`.

    Args:
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.
        shards: devices on the heads' axis.

    Raises:
        ValueError: the heads do not divide.
    """
    if num_q_heads % shards or num_kv_heads % shards:
        raise ValueError(
            f"head_order: num_q_heads = {num_q_heads} and num_kv_heads = "
            f"{num_kv_heads} must be multiples of the {shards} devices"
        )
    heads = np.arange(num_q_heads + 2 * num_kv_heads)
    parts = np.split(heads, [num_q_heads, num_q_heads + num_kv_heads])
    return np.concatenate([p.reshape(shards, -1) for p in parts], 1).ravel()


def _take(weight: Columns, order: np.ndarray) -> Columns:
    if weight.shape[-1] % order.size:
        raise ValueError(
            f"shard_qkv_columns: columns must be a multiple of {order.size} heads, got "
            f"{weight.shape}"
        )
    heads = weight.reshape(*weight.shape[:-1], order.size, -1)
    return heads[..., order, :].reshape(weight.shape)


def sharded_qkv(
    mesh: Mesh,
    input: Float[Array, "batch seq d_model"],
    fused_qkv_weights: Float[Array, "d_model columns"],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    batch: str | None = None,
    heads: str | None = "tensor",
    **options: Any,
) -> Array | tuple[Array, ...]:
    """`qkv_cte` with the batch and the heads split over `mesh`.

    The scale of a ROW weight is split like its columns, caches like the heads they
    hold, and flat caches like the batch; nothing of either crosses the wire.

    Args:
        mesh: the devices.
        input: `[B, S, H]`, and like it the residuals among the options.
        fused_qkv_weights: `[H, I]`, columns in the order of `shard_qkv_columns`.
        num_q_heads: query heads, of all devices together.
        num_kv_heads: key heads, and value heads, of all devices together.
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        heads: the mesh axis that splits heads; `None` keeps them whole.
        **options: further arguments of `qkv_cte`; `bias` and the scale of a ROW weight
            in the order of the columns. `MX` only with `heads=None`.

    Returns:
        What `qkv_cte` returns, columns (or heads, for `NBSd`) in sharded order:
        `[B, S, I]` split as `(batch, None, heads)`, or `[N, B, S, d]` as
        `(heads, batch)`; with caches these too, `[.., .., heads]`.

    Raises:
        ValueError: the mesh lacks an axis, the heads do not divide, or block caches
            meet a split batch: every device would write its own tokens alone.
    """
    require_axes("sharded_qkv", mesh, batch=batch, heads=heads)
    shards = 1 if heads is None else mesh.shape[heads]
    head_order(num_q_heads, num_kv_heads, shards)
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
    static = {k: v for k, v in options.items() if k not in arrays}
    specs = _specs(arrays, static, batch, heads)
    layout = member(QKVOutputLayout, static.get("output_layout", "BSD"))
    by_head = layout is QKVOutputLayout.NBSd
    out_specs: Any = P(heads, batch) if by_head else P(batch, None, heads)
    if "k_cache" in arrays:
        out_specs = (out_specs, specs["k_cache"], specs["v_cache"])
    local = jax.shard_map(
        lambda x, w, more: qkv_cte(
            x,
            w,
            num_q_heads=num_q_heads // shards,
            num_kv_heads=num_kv_heads // shards,
            **more,
            **static,
        ),
        mesh=mesh,
        in_specs=(P(batch), P(None, heads), specs),
        out_specs=out_specs,
    )
    return local(jnp.asarray(input), fused_qkv_weights, arrays)


def _specs(
    arrays: dict[str, Any], static: dict[str, Any], batch: Any, heads: Any
) -> dict[str, P]:
    """How each array among the options is split."""
    by_token = "mlp_prev attention_prev cos_cache sin_cache slot_mapping".split()
    specs = dict(bias=P(None, heads)) | dict.fromkeys(by_token, P(batch))
    kind = member(QuantizationType, static.get("quantization_type", "NONE"))
    if kind in (QuantizationType.ROW, QuantizationType.MX):
        specs["qkv_w_scale"] = P(None, heads)
    blocks = "slot_mapping" in arrays
    if blocks and batch is not None:
        raise ValueError(
            "sharded_qkv: batch must be None for block caches, which all sequences "
            f"share, got {batch!r}"
        )
    cache = P(None if blocks else batch, None, heads)
    specs |= dict.fromkeys(("k_cache", "v_cache"), cache)
    return {k: specs.get(k, P()) for k in arrays}
