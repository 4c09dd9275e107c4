"""One layer of the stack, composed of the leaves of its stages; and back.

h = x + sum over ranks of attention(rms_norm(x)) @ w_out
y = h + sum over ranks of (silu(n @ w_gate) * (n @ w_up)) @ w_down,  n = rms_norm(h)
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.attention.backward import attention_bwd
from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.attention.prefill import attention_fwd
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.llama3_transformer.heads import (
    Heads,
    Tables,
    heads_bwd,
    heads_fwd,
)
from neuronjax.kernels.llama3_transformer.operands import Layer
from neuronjax.kernels.mlp.dense import mlp_bwd, mlp_fwd
from neuronjax.kernels.output_projection import (
    output_projection_bwd,
    output_projection_fwd,
)
from neuronjax.kernels.shard_common import Group, all_reduce

Residual = Float[Array, "batch seq d_model"]
ATTENTION = "CausalAttentionMMSoftmaxMMWithoutSwap"
_PROJECTION: dict[str, Any] = dict(
    name="OutputProjection",
    form="BNDS",
    transpose_out=False,
    cores=None,
    is_tiled=False,
)


def layer_fwd(
    x: Residual, layer: Layer, tables: Tables, c: Any
) -> tuple[Residual, Array, Array]:
    """Returns the layer's output, and its keys and values for a cache.

    Keys are `[batch, num_kv_heads, head_dim, seq]`, values `[batch, num_kv_heads, seq,
    head_dim]`. A half layer's sum is wide and rounded once, to the dtype of `x`; over
    ranks a part is rounded before it crosses the wire, and the sum after it.
    """
    heads = heads_fwd(x, layer, tables, c)
    attended, *_ = _attended(heads, c)
    h = _after_attention(x, attended, layer, c)
    out, *_ = mlp_fwd(*_mlp_operands(h, layer, c), **_mlp(c))
    if c.axis is not None:
        out = _added(h, out, c)
    return out, heads.key.mT, heads.value


def layer_bwd(
    x: Residual,
    layer: Layer,
    tables: Tables,
    cotangents: tuple[Array, Array | None, Array | None],
    c: Any,
) -> tuple[Array, Layer, tuple[Array, Array]]:
    """Returns the cotangents of `x`, wide, of the weights, and of both tables, wide.

    Takes the layer's input and the cotangents of the outputs of `layer_fwd`. Everything
    but the last product is computed again. Those of weights are a rank's own part.
    """
    d_out, d_key, d_value = cotangents
    heads = heads_fwd(x, layer, tables, c)
    attended, *statistics = _attended(heads, c)
    h = _after_attention(x, attended, layer, c)
    d_h, mlp_grads = _mlp_bwd(d_out, h, layer, c)
    d_heads, dw_out = _attention_bwd(d_h, heads, attended, statistics, layer, c)
    dq, dk, dv = (t.astype(d_h.dtype) for t in d_heads)
    if d_key is not None:
        dk = dk + d_key.mT.astype(dk.dtype)
    if d_value is not None:
        dv = dv + d_value.astype(dv.dtype)
    dx, qkv_grads, d_tables = heads_bwd((dq, dk, dv), heads, x, layer, tables, c)
    grads = Layer(**mlp_grads, **qkv_grads, w_out=dw_out)
    return d_h + _summed(dx, c).astype(d_h.dtype), grads, d_tables


def _attention(heads: Heads, c: Any) -> dict[str, Any]:
    """The config of the attention leaves."""
    layout = dict(tp_q=True, tp_k=True, tp_out=False, is_causal=True)
    return dict(layout, scale=heads.query.shape[-1] ** -0.5, static=c.static)


def _folded(*arrays: Array) -> list[Array]:
    """The batch folded into the heads."""
    return [lax.collapse(t, 0, 2) for t in arrays]


def _attended(heads: Heads, c: Any) -> tuple[Array, ...]:
    """`[batch*num_heads, seq, head_dim]` and the statistics of the softmax."""
    q, k, v = _folded(heads.query, heads.key, heads.value)
    return attention_fwd(q, k, v, Extras(), name=ATTENTION, **_attention(heads, c))


def _channels_first(attended: Array, x: Array) -> Array:
    """`[batch, num_heads, head_dim, seq]`, as the projection reads it."""
    return attended.reshape(x.shape[0], -1, *attended.shape[1:]).mT


def _after_attention(x: Array, attended: Array, layer: Layer, c: Any) -> Array:
    operands = _channels_first(attended, x), layer.w_out, None
    dtype = accumulator(x.dtype, layer.w_out.dtype)
    (part,) = output_projection_fwd(*operands, out_dtype=dtype.name, **_PROJECTION)
    return _added(x, part, c)


def _added(x: Array, part: Array, c: Any) -> Array:
    """`x` and the sum of all ranks' parts."""
    if c.axis is not None:
        part = all_reduce(part.astype(x.dtype), Group(c.axis))
    acc = accumulator(x.dtype)
    return (x.astype(acc) + part.astype(acc)).astype(x.dtype)


def _summed(dx: Array, c: Any) -> Array:
    """The cotangent of what all ranks hold alike, from each rank's own part."""
    return all_reduce(dx, Group(c.axis))


def _mlp(c: Any) -> dict[str, Any]:
    added = "none" if c.axis is not None else "epilogue"
    return dict(name="MLP", activation="SiLU", norm="rms", eps=c.eps, fused_add=added)


def _mlp_operands(h: Array, layer: Layer, c: Any) -> tuple:
    """Those of the MLP leaf; one rank adds the residual in its epilogue."""
    weights = layer.w_gate, layer.w_up, layer.w_down, layer.gamma_mlp
    residual = None if c.axis is not None else h
    return (h, *weights, *[None] * 5, residual, *[None] * 4)


def _mlp_bwd(d_out: Array, h: Array, layer: Layer, c: Any) -> tuple[Array, dict]:
    """The cotangents of `h`, wide, and by name of the MLP's weights."""
    operands = _mlp_operands(h, layer, c)
    outs = mlp_fwd(*operands, **_mlp(c))
    pulled = d_out.astype(h.dtype), None, None
    dh, gate, up, down, gamma, *_ = mlp_bwd(*operands, *outs, *pulled, **_mlp(c))
    named = dict(w_gate=gate, w_up=up, w_down=down, gamma_mlp=gamma)
    # The residual's own is d_out, before it was rounded.
    return d_out + _summed(dh, c).astype(d_out.dtype), named


def _attention_bwd(d_h, heads, attended, statistics, layer, c) -> tuple[tuple, Any]:
    """The cotangents of the heads, and of the projection's weight."""
    operands = _channels_first(attended, d_h), layer.w_out, None
    d_rows, dw, _ = output_projection_bwd(*operands, d_h, out_dtype=None, **_PROJECTION)
    d_attended = lax.collapse(d_rows.mT, 0, 2)
    q, k, v = _folded(heads.query, heads.key, heads.value)
    rows, pulled = (attended, *statistics), (d_attended, None, None)
    held: Any = (q, k, v, Extras(), *rows, *pulled)
    grads = attention_bwd(*held, name="BackwardsAttention", **_attention(heads, c))
    shaped = (
        d.reshape(t.shape)
        for d, t in zip(grads, (heads.query, heads.key, heads.value), strict=True)
    )
    return tuple(shaped), dw


def zeros_of(tables: Tables, *others: Array) -> tuple[Array, Array]:
    """Zeros for sums of the tables' cotangents."""
    dtype = accumulator(*(x.dtype for x in (*tables, *others)))
    cos, sin = (jnp.zeros_like(table, dtype) for table in tables)
    return cos, sin
