"""Context-parallel prefill: the sequence is split, each device has its queries.

The keys and the values are gathered, so every device attends from its part of the
queries to the whole sequence. With a causal mask a contiguous part at the end costs
more than one at the start; strided parts cost alike: device `r` of `n` has the tokens
`r, r + n, r + 2n, ...`.

What crosses the wire. Forward: one all-gather of the keys and one of the values.
Backward: one reduce-scatter of each one's gradient; the gathered keys and values are
residuals, unless a remat policy gathers them again.

With `halo` a window's keys come from the device before alone. Forward: one collective
permute of the last `window - 1` keys and one of the values. Backward: one of each
gradient. No device holds more than its part and the window.

Backward in both forms, one all-reduce for each set of axes adds the gradients of what
the devices along them share: a prefix, a sink, a bias that is the same for all queries,
a scale.
"""

from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from neuronjax.sharding.attention_operands import (
    require_axes_of_heads,
    require_whole,
    sequence_axis,
    split_attention,
)
from neuronjax.sharding.mesh import require_axes

_NAME = "context_parallel_attention"
Tokens = TypeVar("Tokens", bound=Any)


def context_parallel_attention(
    mesh: Mesh,
    q: Float[Array, "batch num_heads _ _"],
    k: Float[Array, "batch num_kv_heads _ _"],
    v: Float[Array, "batch num_kv_heads kv_seq value_dim"],
    *,
    axis: str = "context",
    batch: str | None = None,
    heads: str | None = None,
    strided: bool = False,
    halo: bool = False,
    **options: Any,
) -> Array | tuple[Array, ...]:
    """`attention_cte` with the sequence split over `mesh`, and batch and heads too.

    Args:
        mesh: the devices.
        q: `[B, Hq, Sq, d]`; the last two axes as `attention_cte` takes them.
        k: `[B, Hk, d, Sk]`, likewise.
        v: `[B, Hk, Sk, value_dim]`.
        axis: the mesh axis that splits `Sq` and `Sk`.
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        heads: the mesh axis that splits heads; `None` keeps them whole.
        strided: the sequences of `q`, `k`, `v` and of the result are in the order of
            `stride_sequence`; otherwise they are in natural order.
        halo: fetch the keys of a window from the device before instead of gathering all
            of them. For natural order, equal lengths of `q` and `k`, a window of at
            most one key more than a device's part, and neither a prefix, bounds, a mask
            or bias with columns, nor dropout.
        **options: further arguments of `attention_cte`, by name, shaped as in
            `sharded_attention`. The queries' axis of `mask` and `bias`, and the bounds,
            are in the order of `q`; their columns and the prefix are in natural order,
            whole on every device of `axis`.

    Returns:
        What `attention_cte` returns, batch and heads as two axes, split as
        `(batch, heads)` and by `axis` along the queries.

    Raises:
        ValueError: the mesh lacks an axis, a size does not divide, an option has
            another shape, it is one that the mesh sets (`cp_offset`, `global_cp_deg`,
            `cp_strided_q_slicing`), or `halo` comes with what it is not for.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> q, k = jnp.zeros((1, 1, 2, 1)), jnp.zeros((1, 1, 1, 2))
        >>> v = jnp.array([[[[1.0], [2.0]]]])
        >>> context_parallel_attention(make_mesh(context=1), q, k, v).ravel().tolist()
        [1.0, 1.5]
    """
    require_axes(_NAME, mesh, axis=axis, batch=batch, heads=heads)
    taken = {"cp_offset", "global_cp_deg", "cp_strided_q_slicing"} & options.keys()
    if taken:
        raise ValueError(f"{_NAME}: the mesh sets {', '.join(sorted(taken))}")
    shards = mesh.shape[axis]
    require_axes_of_heads(_NAME, dict(q=q, k=k, v=v))
    operands = dict(q=q, k=k, v=v, **options)
    lengths = [operands[n].shape[sequence_axis(n, options)] for n in "qkv"]
    require_whole(_NAME, mesh, axis, "sequences", *lengths)
    if halo:
        _require_halo(operands, lengths, strided, shards)

    def local(arrays: dict[str, Array], static: dict[str, Any]) -> None:
        if shards == 1:
            return
        if halo:
            _fetch_halo(arrays, static, axis, shards)
            return
        for name in "kv":
            where = sequence_axis(name, static)
            arrays[name] = _gathered(arrays[name], axis, where, strided)
        here = lax.axis_index(axis).astype(jnp.int32)
        step = 1 if strided else lengths[0] // shards
        arrays["cp_offset"] = (here * step).reshape(1, 1)
        static.update(global_cp_deg=shards, cp_strided_q_slicing=strided)

    split = dict(batch=batch, heads=heads, rows=axis)
    return split_attention(_NAME, mesh, operands, **split, local=local)


def _require_halo(
    operands: dict[str, Any], lengths: list[int], strided: bool, shards: int
) -> None:
    """Refuses what needs keys of more than one device before."""
    window, columns = operands.get("sliding_window"), ("mask", "bias")
    wide = [n for n in columns if operands.get(n) is not None]
    wide = [n for n in wide if operands[n].shape[-1] != 1]
    part = lengths[1] // shards
    wrong = {
        "natural order": strided,
        "queries and keys of one length": lengths[0] != lengths[1],
        f"a window of 1 to {part + 1}": not window or not 0 < window <= part + 1,
        "no prefix": operands.get("k_prior") is not None,
        "no columns in a mask or bias": bool(wide),
        "a causal mask": not operands.get("causal_mask", True),
        "no bounds": operands.get("bound_min") is not None,
        "no dropout": bool(operands.get("dropout_rate")),
    }
    if any(wrong.values()):
        needed = ", ".join(word for word, broken in wrong.items() if broken)
        raise ValueError(f"{_NAME}: halo needs {needed}")


def _fetch_halo(
    arrays: dict[str, Array], static: dict[str, Any], axis: str, shards: int
) -> None:
    """The keys before a device's own, as a prefix: of none on the first device."""
    before = static["sliding_window"] - 1
    if not before:
        return
    for name in "kv":
        x, where = arrays[name], sequence_axis(name, static)
        tail = lax.slice_in_dim(x, x.shape[where] - before, None, axis=where)
        steps = [(i, i + 1) for i in range(shards - 1)]
        arrays[f"{name}_prior"] = lax.ppermute(tail, axis, steps)
    used = jnp.where(lax.axis_index(axis) > 0, before, 0)
    arrays["prior_used_len"] = used.astype(jnp.int32).reshape(1)


def _gathered(x: Array, axis: str, where: int, strided: bool) -> Array:
    """The whole sequence in natural order, from the parts on all devices."""
    if not strided:
        return lax.all_gather(x, axis, axis=where, tiled=True)
    # Token t of device r is token t * n + r: the devices are the faster axis.
    parts = lax.all_gather(x, axis, axis=where + 1)
    return lax.collapse(parts, where, where + 2)


def stride_sequence(x: Tokens, shards: int, axis: int = -1) -> Tokens:
    """Puts a sequence in the order of strided context parallelism.

    Reorder what enters a model once, token ids and their positions, instead of each
    layer's activations: those would cross the wire.

    Args:
        x: any array with a sequence in natural order.
        shards: devices on the context axis.
        axis: where `x` has its sequence.

    Returns:
        `x` with the tokens `0, n, 2n, ...` first, which are device 0's, then
        `1, n + 1, ...`.

    Raises:
        ValueError: the sequence is not a multiple of `shards`.

    Example:
        >>> import numpy as np
        >>> stride_sequence(np.arange(6), 2)
        array([0, 2, 4, 1, 3, 5])
    """
    return _exchanged("stride_sequence", x, shards, axis, (-1, shards))


def unstride_sequence(x: Tokens, shards: int, axis: int = -1) -> Tokens:
    """The inverse of `stride_sequence`.

    Args:
        x: any array with a sequence in strided order.
        shards: devices on the context axis.
        axis: where `x` has its sequence.

    Returns:
        `x` with the sequence in natural order.

    Raises:
        ValueError: the sequence is not a multiple of `shards`.
    """
    return _exchanged("unstride_sequence", x, shards, axis, (shards, -1))


def _exchanged(name: str, x: Any, shards: int, axis: int, form: tuple[int, int]) -> Any:
    """`x` with its sequence read as a matrix of `form` and written transposed."""
    length, axis = x.shape[axis], axis % x.ndim
    if length % shards:
        raise ValueError(
            f"{name}: the sequence must be a multiple of the {shards} devices, "
            f"got {length}"
        )
    matrix = x.reshape(*x.shape[:axis], *form, *x.shape[axis + 1 :])
    return matrix.swapaxes(axis, axis + 1).reshape(x.shape)
