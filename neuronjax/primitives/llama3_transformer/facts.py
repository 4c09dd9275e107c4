"""What the rules of the prefill stack read from a call."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.shard_common import varying
from neuronjax.primitives.mesh_axes import bound_size
from neuronjax.primitives.options import odd_dtype
from neuronjax.primitives.tile import MemrefTile

PUBLIC, EMITTER = "llama3_transformer", "llama3_transformer_kernel"
BOTH = (PUBLIC, EMITTER)
# The axes of each operand of all layers, and what `kernels` calls it.
AXES = dict(
    W_qkvs=("layers", "H", "(N + 2*G)*D"),
    W_outs=("layers", "N*D", "H"),
    W_gates=("layers", "H", "I"),
    W_ups=("layers", "H", "I"),
    W_downs=("layers", "I", "H"),
    W_gamma_qkvs=("layers", "1", "H"),
    W_gamma_mlps=("layers", "1", "H"),
)
OTHERS = dict(X=3, RoPE_cos=3, RoPE_sin=3)
# What all ranks hold alike.
ALIKE = ("X", "W_gamma_qkvs", "W_gamma_mlps", "RoPE_cos", "RoPE_sin")
_ARRAY = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def misplaced(call: SimpleNamespace) -> str:
    """The first argument that is no array, or no list of layers, as it must be."""
    for name, count in OTHERS.items():
        x = getattr(call, name)
        if not _is_array(x, count):
            return f"{name} must be an array of {count} axes, got {_described(x)}"
    for name in AXES:
        x = getattr(call, name)
        if call.function == PUBLIC and isinstance(x, list | tuple):
            if not x or any(not _is_array(one, 2) for one in x):
                got = _described(next((y for y in x if not _is_array(y, 2)), x))
                return f"{name} must be a list of layers, each of 2 axes, got {got}"
            if any((y.shape, y.dtype) != (x[0].shape, x[0].dtype) for y in x):
                return f"{name} must be a list of layers of one shape and dtype"
        elif not _is_array(x, 3):
            listed = " or a list of layers" if call.function == PUBLIC else ""
            return f"{name} must be an array of 3 axes{listed}, got {_described(x)}"
    return ""


def _is_array(x: Any, axes: int) -> bool:
    return isinstance(x, _ARRAY) and len(x.shape) == axes


def _described(x: Any) -> str:
    if isinstance(x, MemrefTile):
        return "a tile: Llama3Transformer has no tiled form"
    return f"shape {x.shape}" if hasattr(x, "shape") else type(x).__name__


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes and kinds of a call that keeps the rules of the first stage."""
    stacks = {name: _stack(getattr(call, name)) for name in AXES}
    batch, seq, width = call.X.shape
    half, columns = call.RoPE_cos.shape[0], stacks["W_qkvs"].shape[2]
    head_dim = 2 * half
    heads, rest = _divided(stacks["W_outs"].shape[1], head_dim)
    groups, left = _divided(columns - heads * head_dim, 2 * head_dim)
    arrays = stacks | {name: getattr(call, name) for name in OTHERS}
    found: dict[str, Any] = dict(
        B=batch,
        S=seq,
        H=width,
        D=head_dim,
        N=heads,
        G=groups,
        I=stacks["W_ups"].shape[2],
        layers=stacks["W_qkvs"].shape[0],
        columns=columns,
        rows=stacks["W_outs"].shape[1],
        divisible=not rest and not left,
        stacks=stacks,
        arrays=arrays,
        shapes={name: tuple(x.shape) for name, x in arrays.items()},
        odd=odd_dtype(arrays),
        tiled=False,
    )
    return found | dict(unlike="; ".join(_unlike(found)))


def _stack(x: Any) -> Any:
    """An operand of all layers; of a list, what it would be stacked."""
    if isinstance(x, list | tuple):
        return jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype)
    return x


def _divided(size: Any, by: int) -> tuple[Any, Any]:
    return (size // by, size % by) if by else (0, 1)


def _unlike(found: dict[str, Any]) -> Iterator[str]:
    """Every operand whose shape does not follow from the sizes."""
    for name, axes in AXES.items():
        shape = tuple(_size(axis, found) for axis in axes)
        if found["shapes"][name] != shape:
            got = found["shapes"][name]
            yield f"{name} must have shape [{', '.join(axes)}] = {shape}, got {got}"


def _size(axis: str, found: dict[str, Any]) -> Any:
    if axis == "(N + 2*G)*D":
        return found["columns"]
    if axis == "N*D":
        return found["rows"]
    return 1 if axis == "1" else found[axis]


def empty(call: SimpleNamespace) -> str:
    """The operands that hold nothing, described."""
    hollow = (f"{name} of {shape}" for name, shape in call.shapes.items() if 0 in shape)
    return ", ".join(hollow)


def odd_axis(call: SimpleNamespace) -> str:
    """What is wrong with the mesh axis of the ranks; empty if nothing is.

    An axis of `jax.vmap` is none: there every mapped call is one of its own.
    """
    if call.axis is None:
        return ""
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if call.axis not in manual or bound_size(call.axis) is None:
        return "must name a mesh axis and be called inside its shard_map"
    held = {name: jax.tree.leaves(getattr(call, name)) for name in ALIKE}
    varied = [
        name
        for name, leaves in held.items()
        if any(isinstance(x, jax.Array) and call.axis in varying(x) for x in leaves)
    ]
    if varied:
        names = ", ".join(varied)
        return f"needs ranks that hold {names} alike, by their types too"
    return ""


def part_kinds(call: SimpleNamespace) -> dict[str, Any]:
    """Shapes and dtypes of one layer's operands by argument."""
    return {
        name: jax.ShapeDtypeStruct(x.shape[1:], jnp.dtype(x.dtype))
        for name, x in call.stacks.items()
    }
