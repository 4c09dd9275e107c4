"""How the operands of `attention_cte` lie on a mesh, for all its split forms.

Batch and heads are two axes here, which `attention_cte` has as one: split apart, each
can have a mesh axis of its own. A group of query heads stays with its key head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from neuronjax.primitives.attention.prefill import attention_cte
from neuronjax.primitives.attention.prefill_extras import head_keys
from neuronjax.primitives.contracts import can

_BY_HEAD = ("q", "k", "v", "k_prior", "v_prior", "dropout_key")
_BROADCAST = ("sink", "mask", "bias")
_WHOLE = ("prior_used_len", "bound_min", "bound_max", "cp_offset")

Local = Callable[[dict[str, Array], dict[str, Any]], Any]


def split_attention(
    function: str,
    mesh: Mesh,
    operands: dict[str, Any],
    *,
    batch: str | None,
    heads: str | None,
    rows: str | None = None,
    local: Local | None = None,
) -> Any:
    """`attention_cte` on every device's part of the operands.

    Args:
        function: the public function, for messages.
        mesh: the devices.
        operands: all arguments of `attention_cte` by name, `[batch, heads, ...]`.
        batch: the mesh axis that splits the batch.
        heads: the mesh axis that splits the heads.
        rows: the mesh axis that splits the queries, and the keys to be gathered.
        local: changes a device's operands and static options before they are used.

    Returns:
        What `attention_cte` returns, batch and heads as two axes.
    """
    require_axes_of_heads(function, operands)
    arrays = {k: x for k, x in operands.items() if _is_array(k, x)}
    static = {k: x for k, x in operands.items() if k not in arrays}
    arrays = {k: jnp.asarray(x) for k, x in arrays.items()}
    sizes = _sizes(arrays, static)
    for name in arrays.keys() & {*_BROADCAST}:
        _require_broadcast(function, name, arrays[name].shape, sizes)
    require_whole(function, mesh, batch, "batch", *(arrays[n].shape[0] for n in "qkv"))
    require_whole(function, mesh, heads, "heads", *(arrays[n].shape[1] for n in "qkv"))
    if "dropout_key" in arrays:
        lead = arrays["q"].shape[:2]
        keys = head_keys(arrays["dropout_key"], lead[0] * lead[1])
        arrays["dropout_key"] = keys.reshape(lead)

    _require_call(function, operands, arrays, static)

    def one_device(arrays):
        lead, options = arrays["q"].shape[:2], dict(static)
        if local is not None:
            local(arrays, options)
        outs = attention_cte(**_folded(arrays), **options)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), outs)

    specs = _specs(arrays, static, batch, heads, rows)
    statistics = P(batch, heads, rows)
    out = P(batch, heads, None, rows) if static.get("tp_out") else statistics
    both = (out, statistics, statistics) if static.get("cache_softmax") else out
    run = jax.shard_map(one_device, mesh=mesh, in_specs=(specs,), out_specs=both)
    return run(arrays)


def sequence_axis(name: str, options: dict[str, Any]) -> int:
    """Where `q`, `k` or `v`, `[batch, heads, _, _]`, has its sequence."""
    if name == "q":
        return 2 if options.get("tp_q", True) else 3
    return 3 if name == "k" and not options.get("tp_k", False) else 2


def require_whole(
    function: str, mesh: Mesh, axis: str | None, word: str, *sizes: int
) -> None:
    """Refuses sizes that the devices of `axis` cannot share evenly."""
    shards = 1 if axis is None else mesh.shape[axis]
    if any(size % shards for size in sizes):
        raise ValueError(
            f"{function}: {word} of q, k and v must be multiples of the {shards} "
            f"devices of {axis!r}, got {sizes}"
        )


def require_axes_of_heads(function: str, operands: dict[str, Any]) -> None:
    """Refuses q, k and v without an axis of batch and one of heads."""
    shapes = [jnp.shape(operands[name]) for name in "qkv"]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            f"{function}: q, k and v must have 4 axes [batch, heads, _, _], got "
            f"{', '.join(map(str, shapes))}"
        )


def _require_call(
    function: str,
    operands: dict[str, Any],
    arrays: dict[str, Array],
    static: dict[str, Any],
) -> None:
    """Refuses what `attention_cte` would on one device, where values are known yet."""
    given = jax.eval_shape(_folded, arrays)
    given |= {name: operands[name] for name in _WHOLE if name in arrays}
    report = can(attention_cte, **given, **static)
    if not report:
        lines = [v.message for v in report.violations if v.tag == "math"]
        text = "\n".join(line.replace("attention_cte", function) for line in lines)
        raise ValueError(text)


def _is_array(name: str, value: Any) -> bool:
    if value is None:
        return False
    if name == "scale":
        return isinstance(value, jax.Array)
    return name in (*_BY_HEAD, *_BROADCAST, *_WHOLE)


def _sizes(arrays: dict[str, Array], static: dict[str, Any]) -> tuple[int, ...]:
    """`(batch, heads, q_seq, kv)`; a prefix counts among the columns."""
    q, k = arrays["q"], arrays["k"]
    columns = k.shape[sequence_axis("k", static)]
    if "v_prior" in arrays:
        columns += arrays["v_prior"].shape[2]
    return (*q.shape[:2], q.shape[sequence_axis("q", static)], columns)


def _require_broadcast(
    function: str, name: str, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """Refuses a sink, mask or bias whose axes are neither 1 nor the whole."""
    if name == "sink":
        allowed = [{1, sizes[0]}, {sizes[1]}, {1}]
        words = f"[1 or batch, heads, 1], batch, heads = {sizes[:2]}"
    else:
        allowed = [{1, size} for size in sizes]
        words = f"1 or the size in each of [batch, heads, q_seq, kv_seq] = {sizes}"
    fits = len(shape) == len(allowed)
    if not fits or any(n not in ok for n, ok in zip(shape, allowed, strict=True)):
        raise ValueError(f"{function}: {name} must have {words}, got {shape}")


def _specs(
    arrays: dict[str, Array],
    static: dict[str, Any],
    batch: str | None,
    heads: str | None,
    rows: str | None,
) -> dict[str, P]:
    """How every array lies; an axis of size 1 is whole on every device."""
    specs = {}
    for name, x in arrays.items():
        if name in _BROADCAST:
            wanted = (batch, heads, rows)[: 2 if name == "sink" else 3]
            pairs = zip(wanted, x.shape, strict=False)
            specs[name] = P(*(None if size == 1 else axis for axis, size in pairs))
        elif name in "qkv":
            lead = (batch, heads)
            between = (None,) * (sequence_axis(name, static) - 2)
            specs[name] = P(*lead, *between, rows)
        elif name.startswith("bound"):
            specs[name] = P(rows)
        else:
            specs[name] = P(batch, heads) if name in _BY_HEAD else P()
    return specs


def _folded(arrays: dict[str, Array]) -> dict[str, Array]:
    """The operands with batch and heads as one axis."""
    lead = arrays["q"].shape[:2]

    def fold(name: str, x: Array) -> Array:
        if name in _BROADCAST and (name == "sink" or x.shape[:2] != (1, 1)):
            x = jnp.broadcast_to(x, (*lead, *x.shape[2:]))
        return lax.collapse(x, 0, 2) if name in (*_BY_HEAD, *_BROADCAST) else x

    return {name: fold(name, x) for name, x in arrays.items()}
