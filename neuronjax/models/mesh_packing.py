"""Weights of a decoder in the layout of `transformer_tkg`, and what a rank has of them.

A rank has whole key heads, each with its query heads, and an even part of the columns
between the MLP's projections; of two cores each has half of the rank's columns there,
and half of the columns of the attention's output.
"""

import math
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.models.config import DecoderConfig
from neuronjax.models.packing import Weights, module_of
from neuronjax.nn.attention import Attention
from neuronjax.nn.mlp import MLP
from neuronjax.nn.moe import MoE
from neuronjax.nn.parameter import at_dtype

# What splits the last two axes of each weight: the ranks, their cores, or both. Axes in
# front (layers, experts) are whole.
RANKS, CORES = "ranks", "cores"
BOTH = (RANKS, CORES)
SPLIT: dict[str, tuple[Any, Any]] = dict(
    W_qkv=(None, RANKS),
    W_out=(RANKS, CORES),
    W_gamma_qkv=(None, None),
    W_gamma_mlp=(None, None),
    W_gate=(None, BOTH),
    W_up=(None, BOTH),
    W_down=(BOTH, None),
    router=(None, None),
    expert_gate_up=(None, BOTH),
    expert_down=(BOTH, None),
)


def by_key_head(
    qkv: Float[Weights, "*d_model columns"], num_q_heads: int, num_kv_heads: int
) -> Weights:
    """Reorders the fused columns of `qkv` so that each key head has its own together.

    Args:
        qkv: `[..., (num_q_heads + 2*num_kv_heads) * d_head]`: all query heads, then all
            key heads, then all value heads.
        num_q_heads: query heads; `n = num_q_heads / num_kv_heads` of them share a key.
        num_kv_heads: key heads, and value heads.

    Returns:
        The same shape: blocks of `(n + 2) * d_head` columns, one a key head: its query
        heads, its key, its value.

    Raises:
        ValueError: the columns do not split into that many heads.

    Example:
        >>> import numpy as np
        >>> by_key_head(np.array(["q0", "q1", "k0", "k1", "v0", "v1"]), 2, 2).tolist()
        ['q0', 'k0', 'v0', 'q1', 'k1', 'v1']
    """
    heads = num_q_heads + 2 * num_kv_heads
    if num_kv_heads < 1 or num_q_heads % num_kv_heads or qkv.shape[-1] % heads:
        raise ValueError(
            f"by_key_head: the columns of qkv must be a multiple of {heads} = "
            f"{num_q_heads} + 2*{num_kv_heads} heads, and the query heads one of the "
            f"key heads, got {qkv.shape}"
        )
    lead, d_head, module = qkv.shape[:-1], qkv.shape[-1] // heads, module_of(qkv)
    apart = qkv.reshape(*lead, heads, d_head)
    q, k, v = module.split(apart, [num_q_heads, num_q_heads + num_kv_heads], -2)
    q = q.reshape(*lead, num_kv_heads, -1, d_head)
    blocks = module.concatenate([q, k[..., None, :], v[..., None, :]], -2)
    return blocks.reshape(qkv.shape)


def filled_up(w: Float[Weights, "..."], parts: int, axis: int = -1) -> Weights:
    """`w` with zeros at the end of `axis`, so that `parts` divide it.

    A gated MLP with more columns of zeros is the same MLP.

    Args:
        w: any weight.
        parts: how many parts there are to be.
        axis: which axis they divide.

    Example:
        >>> import numpy as np
        >>> filled_up(np.ones((1, 3)), 2).tolist()
        [[1.0, 1.0, 1.0, 0.0]]
    """
    spare = [(0, 0)] * w.ndim
    spare[axis] = (0, -w.shape[axis] % parts)
    return w if not any(map(sum, spare)) else module_of(w).pad(w, spare)


def packed_layer(
    layer: Any, parts: int, dtype: Any = None
) -> dict[str, Float[Array, "..."]]:
    """The weights of a decoder layer, or of a stack of them, by the names of `SPLIT`.

    Args:
        layer: an `nn.DecoderLayer` or `nn.MoEDecoderLayer` of plain projections.
        parts: ranks times cores; the columns of the MLP are filled up to a multiple.
        dtype: dtype of the computation; `None` keeps that of the parameters.

    Returns:
        `W_qkv`, `W_out`, `W_gamma_qkv`, `W_gamma_mlp`, and `W_gate`, `W_up`, `W_down`
        of a dense layer or of a shared expert; `router`, `expert_gate_up` and
        `expert_down` where there are experts.
    """
    attention, mlp = layer.attention, layer.mlp
    heads = attention.num_heads, attention.num_kv_heads
    packed = dict(
        W_qkv=by_key_head(at_dtype(attention.qkv, dtype), *heads),
        W_out=at_dtype(attention.out, dtype),
        W_gamma_qkv=at_dtype(attention.norm, dtype)[..., None, :],
        W_gamma_mlp=at_dtype(mlp.norm, dtype)[..., None, :],
    )
    dense = mlp
    if isinstance(mlp, MoE):
        packed |= dict(
            router=at_dtype(mlp.router, dtype),
            expert_gate_up=filled_up(at_dtype(mlp.gate_up, dtype), parts),
            expert_down=filled_up(at_dtype(mlp.down, dtype), parts, -2),
        )
        dense = mlp.shared
    if dense is not None:
        packed |= dict(
            W_gate=filled_up(at_dtype(dense.gate, dtype), parts),
            W_up=filled_up(at_dtype(dense.up, dtype), parts),
            W_down=filled_up(at_dtype(dense.down, dtype), parts, -2),
        )
    return packed


def weight_spec(name: str, ndim: int, axis: str, lnc: str | None) -> P:
    """How the weight `name` lies on a mesh of ranks and perhaps cores."""
    names = {None: None, RANKS: axis, CORES: lnc, BOTH: (axis, lnc) if lnc else axis}
    return P(*(None,) * (ndim - 2), *(names[part] for part in SPLIT[name]))


def table_axes(
    mesh: Mesh, vocab_size: int, axis: str, lnc: str | None
) -> tuple[str, ...]:
    """The axes that split the rows of the embedding: as many as divide them."""
    both = (axis, lnc) if lnc else (axis,)
    for axes in (both, (axis,)):
        if vocab_size % math.prod(mesh.shape[name] for name in axes) == 0:
            return axes
    return ()


def require_plain(function: str, layer: Any) -> None:
    """Refuses a layer of blocks that `transformer_tkg` does not compute."""
    attention, mlp = layer.attention, layer.mlp
    if type(attention) is not Attention or type(mlp) not in (MLP, MoE):
        raise ValueError(
            f"{function}: layers must be of nn.Attention and nn.MLP or nn.MoE, not "
            f"quantized, got {type(attention).__name__} and {type(mlp).__name__}"
        )
    if not attention.is_plainly_causal:
        raise ValueError(
            f"{function}: nn.Attention must be causal without window, sink, soft cap "
            f"and dropout, got {attention.options}"
        )
    if attention.norm is None or mlp.norm is None:
        raise ValueError(f"{function}: attention and MLP must have their norms")
    if isinstance(mlp, MLP) and mlp.activation != "SiLU":
        raise ValueError(
            f"{function}: the activation of nn.MLP must be SiLU, got {mlp.activation}"
        )


def two_cores(function: str, mesh: Mesh, axis: str, lnc: str | None) -> str | None:
    """The axis of each rank's two cores; `None` where it has only one device."""
    if lnc is None:
        return None
    if lnc == axis:
        raise ValueError(f"{function}: lnc must be another axis than axis = {axis!r}")
    if mesh.shape[lnc] not in (1, 2):
        raise ValueError(
            f"{function}: lnc must be an axis of 2 cores, got {mesh.shape[lnc]} of "
            f"{lnc!r}"
        )
    return lnc if mesh.shape[lnc] == 2 else None


def require_division(
    function: str, mesh: Mesh, config: DecoderConfig, axis: str | None, lnc: str | None
) -> None:
    """Refuses ranks that cannot share the heads, and cores the width."""
    if axis is None:
        raise ValueError(f"{function}: axis must name the axis of the ranks, got None")
    ranks = mesh.shape[axis]
    if config.num_kv_heads % ranks:
        raise ValueError(
            f"{function}: the {ranks} ranks of {axis!r} must divide the key heads, "
            f"got num_kv_heads = {config.num_kv_heads}"
        )
    if lnc is not None and config.d_model % mesh.shape[lnc]:
        raise ValueError(
            f"{function}: the two cores of {lnc!r} must divide d_model, "
            f"got {config.d_model}"
        )
