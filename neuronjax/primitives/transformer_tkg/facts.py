"""What the rules of the decode transformer read from a call."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention_block_tkg.facts import NO_WRITE
from neuronjax.primitives.known import known
from neuronjax.primitives.mesh_axes import LNC, bound_size, is_partition
from neuronjax.primitives.options import odd_dtype
from neuronjax.primitives.tile import PARTITIONS
from neuronjax.primitives.transformer_tkg.parts import refusals

FUNCTION = "transformer_tkg"
# The axes of each layer's operands.
AXES = dict(
    W_qkvs=("H", "G*(n + 2)*D"),
    W_outs=("G*n*D", "H/cores"),
    W_gates=("H", "I"),
    W_ups=("H", "I"),
    W_downs=("I", "H"),
    W_gamma_qkvs=("1", "H"),
    W_gamma_mlps=("1", "H"),
    K_caches=("B", "G", "D", "S_max"),
    V_caches=("B", "G", "S_max", "D"),
)
SCALES = dict(
    W_gate_scales=("1 or 128", "I"),
    W_up_scales=("1 or 128", "I"),
    W_down_scales=("1 or 128", "H"),
)
NEEDED = dict(X=3, RoPE_cos=3, RoPE_sin=3, mask_cache=4)
OPTIONAL = dict(mask_active=4, position_ids=2)
_QUANTIZED = ("W_gates", "W_ups", "W_downs")


def is_stacked(call: SimpleNamespace) -> bool:
    """Whether each kind of weight is one array of all layers."""
    return not isinstance(call.W_qkvs, list | tuple)


def of_layer(call: SimpleNamespace, i: int | None) -> Iterator[tuple[str, Any]]:
    """The operands of layer `i` by argument; of all layers where they are stacked."""
    for name in (*AXES, *SCALES):
        x = getattr(call, name)
        yield name, x if i is None or x is None else x[i]


def misplaced(call: SimpleNamespace) -> str:
    """The first argument that is no array, or no list of layers, as it must be."""
    for name, count in (NEEDED | OPTIONAL).items():
        x = getattr(call, name)
        if (x is not None or name in NEEDED) and not _is_array(x, count):
            return f"{name} must be an array of {count} axes, got {_described(x)}"
    stacked, count = is_stacked(call), call.num_layers
    if stacked and not _is_array(call.W_qkvs, 3):
        got = _described(call.W_qkvs)
        return f"W_qkvs must be a list of layers or one array of 3 axes, got {got}"
    for name, axes in (AXES | SCALES).items():
        x = getattr(call, name)
        if x is None and name in SCALES:
            continue
        if stacked and not (_is_array(x, len(axes) + 1) and x.shape[0] == count):
            return (
                f"{name} must be an array whose first of {len(axes) + 1} axes is "
                f"num_layers = {count}, as W_qkvs is one, got {_described(x)}"
            )
        if not stacked:
            odd = _odd_list(name, x, count, len(axes))
            if odd:
                return odd
    return ""


def _odd_list(name: str, x: Any, count: int, axes: int) -> str:
    if not isinstance(x, list | tuple) or len(x) < count:
        got = f"{len(x)}" if isinstance(x, list | tuple) else _described(x)
        return f"{name} must be a list of at least num_layers = {count}, got {got}"
    for i, one in enumerate(x[:count]):
        if not _is_array(one, axes) and (one is not None or name not in SCALES):
            return f"{name}[{i}] must be an array of {axes} axes, got {_described(one)}"
    return ""


def _is_array(x: Any, axes: int) -> bool:
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return isinstance(x, kinds) and len(x.shape) == axes


def _described(x: Any) -> str:
    return f"shape {x.shape}" if hasattr(x, "shape") else type(x).__name__


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes and kinds of a call that keeps the rules of the first stage."""
    views = list(_views(call))
    batch, seq, width = call.X.shape
    _, groups, capacity, head_dim = views[0]["V_caches"].shape
    columns = views[0]["W_qkvs"].shape[1]
    per_group = groups * head_dim
    heads = columns // per_group - 2 if per_group else 0
    cores = 1 if call.lnc_axis is None else LNC
    found: dict[str, Any] = dict(
        B=batch,
        S=seq,
        H=width,
        G=groups,
        D=head_dim,
        S_max=capacity,
        S_ctx=call.mask_cache.shape[0],
        n=heads,
        N=groups * heads,
        columns=columns,
        whole_heads=per_group and columns == groups * (heads + 2) * head_dim,
        cores=cores,
        axis_size=bound_size(call.axis),
        lnc_size=bound_size(call.lnc_axis),
        views=views,
        shapes={name: getattr(call, name).shape for name in NEEDED},
        odd=_odd(call, views),
        refusals=functools.cache(lambda: refusals(call)),
        tiled=False,
    )
    return found | dict(unlike="; ".join(_unlike(found)))


def _views(call: SimpleNamespace) -> Iterator[dict[str, Any]]:
    """The operands of each layer; of stacked ones, of the first for all."""
    if not is_stacked(call):
        for i in range(call.num_layers):
            yield dict(of_layer(call, i))
        return
    yield {
        name: None if x is None else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for name, x in of_layer(call, None)
    }


def _odd(call: SimpleNamespace, views: list[dict[str, Any]]) -> str:
    """The first operand of a dtype that is not built, described."""
    shared = {name: getattr(call, name) for name in ("X", "RoPE_cos", "RoPE_sin")}
    found = odd_dtype(shared)
    for i, view in enumerate(views):
        skipped = (
            (*SCALES, *_QUANTIZED) if view["W_gate_scales"] is not None else SCALES
        )
        own = {f"{name}[{i}]": x for name, x in view.items() if name not in skipped}
        found = found or odd_dtype(own)
    for name in ("mask_cache", "mask_active", "position_ids"):
        x = getattr(call, name)
        kinds = "iu" if name == "position_ids" else "iub"
        if x is not None and jnp.dtype(x.dtype).kind not in kinds:
            found = found or f"{name} of dtype {x.dtype}"
    return found


def _unlike(found: dict[str, Any]) -> Iterator[str]:
    """Every operand of a layer whose shape does not follow from the sizes."""
    for i, view in enumerate(found["views"]):
        sizes = dict(found, I=view["W_ups"].shape[1])
        for name, axes in AXES.items():
            shape = tuple(_size(axis, sizes) for axis in axes)
            if view[name].shape != shape:
                words = f"[{', '.join(axes)}] = {shape}, got {view[name].shape}"
                yield f"{name}[{i}] must have shape {words}"
        for name, (_, axis) in SCALES.items():
            x, columns = view[name], _size(axis, sizes)
            if x is None:
                continue
            held = tuple(x.shape), jnp.dtype(x.dtype)
            if held not in [((rows, columns), jnp.float32) for rows in (1, PARTITIONS)]:
                words = f"[1 or 128, {axis}] = [.., {columns}]"
                got = f"{held[1]} of shape {held[0]}"
                yield f"{name}[{i}] must be float32 of shape {words}, got {got}"


def _size(axis: str, sizes: dict[str, Any]) -> int:
    if axis == "G*(n + 2)*D":
        return sizes["G"] * (sizes["n"] + 2) * sizes["D"]
    if axis == "G*n*D":
        return sizes["N"] * sizes["D"]
    if axis == "H/cores":
        return sizes["H"] // sizes["cores"]
    return 1 if axis == "1" else sizes[axis]


def half_scaled(call: SimpleNamespace) -> str:
    """The first layer that has some of the three scales."""
    for i, view in enumerate(call.views):
        given = [view[name] is not None for name in SCALES]
        if any(given) and not all(given):
            return f"layer {i}"
    return ""


def odd_groups(call: SimpleNamespace) -> str:
    """What is wrong with the replica groups and their axis; empty if nothing is."""
    groups = call.replica_groups
    if groups is None:
        return "" if call.axis is None else f"replica_groups for axis {call.axis!r}"
    if not is_partition(groups):
        return "lists of integers, of one length, that name every rank from 0 on once"
    if call.axis is None:
        alone = is_partition(groups, 1)
        return "" if alone else "the name of their mesh axis as axis"
    if call.axis_size is None:
        return f"to be inside shard_map over axis {call.axis!r}"
    if not is_partition(groups, call.axis_size):
        return f"every rank of 0 to {call.axis_size - 1} once"
    return ""


def odd_position(call: SimpleNamespace) -> str:
    """What is wrong with positions whose values are known; empty if nothing is."""
    held = known(call.position_ids)
    if held is None:
        return ""
    for row in held.astype(np.int64):
        first = int(row[0])
        if first in NO_WRITE:
            continue
        if (np.diff(row) != 1).any():
            return f"be one after another, got {row.tolist()}"
        if not 0 <= first <= call.S_max - call.S:
            return (
                f"leave room for S = {call.S} tokens in {call.S_max} slots, got {first}"
            )
    return ""
