"""How weights are packed for the macros, and back: each function has its inverse.

All take NumPy arrays as well as JAX arrays and return the kind that they were given.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from neuronjax.models.checkpoint.layout import half_split_rows, interleaved_rows

# Either kind of array.
Weights = TypeVar("Weights", bound=Any)

_LAYER = {
    ("attention", "norm"): "input_layernorm",
    ("attention", "out"): "self_attn.o_proj",
    ("mlp", "norm"): "post_attention_layernorm",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
}
_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")


def pack_qkv(
    q: Float[Weights, "*d_model q_width"],
    k: Float[Weights, "*d_model kv_width"],
    v: Float[Weights, "*d_model kv_width"],
) -> Weights:
    """Joins the projections of queries, keys and values to the fused weight of `qkv`.

    Args:
        q: `[H, num_q_heads * d_head]`, or a bias without the first axis.
        k: `[H, num_kv_heads * d_head]`.
        v: like `k`.

    Returns:
        `[H, (num_q_heads + 2*num_kv_heads) * d_head]`: query, key, value columns.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> import numpy as np
        >>> q, kv = np.ones((3, 4)), np.zeros((3, 2))
        >>> pack_qkv(q, kv, kv).shape
        (3, 8)
    """
    if k.shape != v.shape or q.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            "pack_qkv: k and v must have one shape and as many rows as q, got "
            f"{q.shape}, {k.shape} and {v.shape}"
        )
    return module_of(q, k, v).concatenate([q, k, v], -1)


def unpack_qkv(
    qkv: Float[Weights, "*d_model columns"], num_q_heads: int, num_kv_heads: int
) -> tuple[Weights, Weights, Weights]:
    """The inverse of `pack_qkv`.

    Args:
        qkv: `[H, (num_q_heads + 2*num_kv_heads) * d_head]`.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.

    Returns:
        `(q, k, v)` as `pack_qkv` takes them.

    Raises:
        ValueError: the columns do not split into that many heads.
    """
    heads = num_q_heads + 2 * num_kv_heads
    if min(num_q_heads, num_kv_heads) < 1 or qkv.shape[-1] % heads:
        raise ValueError(
            f"unpack_qkv: the columns of qkv must be a multiple of {heads} = "
            f"{num_q_heads} + 2*{num_kv_heads} heads, got {qkv.shape}"
        )
    d_head = qkv.shape[-1] // heads
    ends = [num_q_heads * d_head, (num_q_heads + num_kv_heads) * d_head]
    q, k, v = module_of(qkv).split(qkv, ends, -1)
    return q, k, v


def pack_gate_up(
    gate: Float[Weights, "*d_model d_ff"], up: Float[Weights, "*d_model d_ff"]
) -> Weights:
    """Joins the gate and up projections of an MLP.

    Args:
        gate: `[H, I]`, or a bias `[I]`.
        up: like `gate`.

    Returns:
        `[H, 2, I]`, gate first.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(
            "pack_gate_up: gate and up must have one shape, got "
            f"{gate.shape} and {up.shape}"
        )
    return module_of(gate, up).stack([gate, up], -2)


def unpack_gate_up(
    gate_up: Float[Weights, "*d_model 2 d_ff"],
) -> tuple[Weights, Weights]:
    """The inverse of `pack_gate_up`.

    Args:
        gate_up: `[H, 2, I]`.

    Returns:
        `(gate, up)`, each `[H, I]`.

    Raises:
        ValueError: the axis before the last is not 2.
    """
    if gate_up.ndim < 2 or gate_up.shape[-2] != 2:
        raise ValueError(
            f"unpack_gate_up: gate_up must have shape [H, 2, I], got {gate_up.shape}"
        )
    return gate_up[..., 0, :], gate_up[..., 1, :]


def to_half_split(
    weight: Float[Weights, "..."], num_heads: int, axis: int = -1
) -> Weights:
    """Reorders the channels of each head from interleaved to half-split rotary pairs.

    A model rotates pairs `(2i, 2i + 1)` or `(i, i + d/2)`. The same reordering of the
    query and the key weights leaves every attention score as it was: a model trained
    with one pairing then runs with the other.

    Args:
        weight: the query or the key weight, or its bias.
        num_heads: heads on `axis`.
        axis: the axis of the channels: the last of `[H, num_heads * d_head]`, 0 of a
            Hugging Face matrix.

    Returns:
        The reordered weight. For one head of four channels the order is `[0, 2, 1, 3]`.

    Raises:
        ValueError: the axis does not split into heads of an even width.

    Example:
        >>> import numpy as np
        >>> to_half_split(np.arange(4), num_heads=1).tolist()
        [0, 2, 1, 3]
    """
    return _reordered("to_half_split", half_split_rows, weight, num_heads, axis)


def to_interleaved(
    weight: Float[Weights, "..."], num_heads: int, axis: int = -1
) -> Weights:
    """The inverse of `to_half_split`.

    Args:
        weight: as there, in half-split order.
        num_heads: heads on `axis`.
        axis: the axis of the channels.

    Returns:
        The weight in interleaved order.

    Raises:
        ValueError: the axis does not split into heads of an even width.
    """
    return _reordered("to_interleaved", interleaved_rows, weight, num_heads, axis)


def from_hugging_face(tensors: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Packs the tensors of a Hugging Face Llama into the parameters of `models.Llama`.

    Args:
        tensors: `layers.3.self_attn.q_proj.weight` etc., with or without the prefix
            `model.`; matrices are `[out, in]`.
        num_layers: decoder layers.

    Returns:
        `embedding`, `norm`, `layers[i]["attention" | "mlp"]`, and `head` where the file
        has an output projection of its own; matrices are `[in, out]`.

    Raises:
        KeyError: a tensor is missing.
    """

    def weight(name: str) -> Any:
        name = f"{name}.weight"
        return tensors[f"model.{name}" if f"model.{name}" in tensors else name]

    layers: dict[int, dict[str, dict[str, Any]]] = {}
    for i in range(num_layers):
        fused = pack_qkv(*(weight(f"layers.{i}.{name}").T for name in _QKV))
        layers[i] = {"attention": {"qkv": fused}, "mlp": {}}
        for (block, ours), theirs in _LAYER.items():
            layers[i][block][ours] = weight(f"layers.{i}.{theirs}").T
    params = {
        "embedding": weight("embed_tokens"),
        "norm": {"scale": weight("norm")},
        "layers": layers,
    }
    if "lm_head.weight" in tensors:
        params["head"] = tensors["lm_head.weight"]
    return params


def to_hugging_face(
    params: Mapping[str, Any], num_q_heads: int, num_kv_heads: int
) -> dict[str, Any]:
    """The inverse of `from_hugging_face`; names carry the prefix `model.`.

    Args:
        params: what `from_hugging_face` returns.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.

    Returns:
        Hugging Face name to tensor, matrices `[out, in]`.

    Raises:
        ValueError: the fused columns do not split into that many heads.
    """
    tensors = {"model.embed_tokens.weight": params["embedding"]}
    for i, layer in params["layers"].items():
        prefix = f"model.layers.{i}."
        parts = unpack_qkv(layer["attention"]["qkv"], num_q_heads, num_kv_heads)
        for name, part in zip(_QKV, parts, strict=True):
            tensors[f"{prefix}{name}.weight"] = part.T
        for (block, ours), theirs in _LAYER.items():
            tensors[f"{prefix}{theirs}.weight"] = layer[block][ours].T
    tensors["model.norm.weight"] = params["norm"]["scale"]
    if "head" in params:
        tensors["lm_head.weight"] = params["head"]
    return tensors


def module_of(*arrays: Any) -> Any:
    """NumPy for NumPy arrays, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _reordered(function, rows_order, weight, num_heads: int, axis: int):
    if num_heads < 1 or weight.shape[axis] % (2 * num_heads):
        raise ValueError(
            f"{function}: axis {axis} of weight must hold {num_heads} heads of an even "
            f"width, got {weight.shape}"
        )
    module = module_of(weight)
    rows = rows_order(module.moveaxis(weight, axis, 0), num_heads)
    return module.moveaxis(rows, 0, axis)
