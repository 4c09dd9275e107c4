"""The heads of one layer: norm, projection and rotation, forwards and backwards."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.llama3_transformer.operands import Layer, head_counts
from neuronjax.kernels.qkv import projection as qkv
from neuronjax.kernels.rope import rope_bwd, rope_fwd

Tables = tuple[Float[Array, "batch seq head_dim"], Float[Array, "batch seq head_dim"]]


class Heads(NamedTuple):
    """Heads of one layer.

    Attributes:
        query: `[batch, num_heads, seq, head_dim]`, rotated, in the dtype of the input.
        key: `[batch, num_kv_heads, seq, head_dim]`, likewise.
        value: the same shape.
        raw: query and key before the rotation, wide.
        rstd: what the norm divided by, `[batch, seq, 1]`.
    """

    query: Any
    key: Any
    value: Any
    raw: tuple[Any, Any]
    rstd: Any


def full_tables(cos: Array, sin: Array) -> Tables:
    """`[head_dim/2, batch, seq]` to `[batch, seq, head_dim]`, both halves equal."""
    first = (jnp.moveaxis(table, 0, -1) for table in (cos, sin))
    cos, sin = (jnp.concatenate([table, table], -1) for table in first)
    return cos, sin


def half_table(d_table: Array) -> Array:
    """The cotangent of a table from that of what `full_tables` made of it."""
    first, second = jnp.split(d_table, 2, -1)
    return jnp.moveaxis(first + second, -1, 0)


def heads_fwd(
    x: Float[Array, "batch seq d_model"], layer: Layer, tables: Tables, c: Any
) -> Heads:
    """Everything up to attention. The sums and the rotation are wide."""
    y, _, (rstd,) = qkv.columns_fwd(
        qkv.WHOLE, _operands(x, layer), _config(c), _product(x, layer)
    )
    *raw, value = _split(y, layer, tables, c)
    query, key = (_rope(rope_fwd, "RoPE", t, *tables)[0] for t in raw)
    query, key, value = (t.astype(x.dtype) for t in (query, key, value))
    return Heads(query, key, value, (raw[0], raw[1]), rstd)


def heads_bwd(
    d_heads: tuple[Array, Array, Array],
    heads: Heads,
    x: Float[Array, "batch seq d_model"],
    layer: Layer,
    tables: Tables,
    c: Any,
) -> tuple[Array, dict[str, Array], tuple[Array, Array]]:
    """Returns the cotangents of `x`, by name of weight and gain, and of both tables."""
    acc = heads.raw[0].dtype
    wide = [t.astype(acc) for t in d_heads]
    turned = [
        _rope(rope_bwd, "RoPEBwd", raw, *tables, d)
        for raw, d in zip(heads.raw, wide[:2], strict=True)
    ]
    (dq, *dq_tables), (dk, *dk_tables) = turned
    d_cos, d_sin = (a + b for a, b in zip(dq_tables, dk_tables, strict=True))
    dx, dw, dgamma, *_ = qkv.columns_bwd(
        qkv.WHOLE,
        _operands(x, layer),
        ((heads.rstd,), (None,)),
        _joined(dq, dk, wide[2], c),
        _config(c),
        _product(x, layer),
    )
    return dx, dict(w_qkv=dw, gamma_qkv=dgamma), (d_cos, d_sin)


def _operands(x, layer):
    """Those of the QKV leaf: no offset, bias, residual, or tables."""
    return (x, layer.w_qkv, layer.gamma_qkv, *[None] * 6)


def _config(c) -> dict[str, Any]:
    return dict(
        norm="rms", eps=c.eps, hidden_actual=None, fused_add="none", fused_rope=False
    )


def _product(x, layer):
    return qkv.wide_product(qkv.factor_dtype(x, layer.w_qkv))


def _rope(leaf, name, x, cos, sin, *more):
    """The rotation, or its transpose; the tables' cotangents are wide."""
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return leaf(x, cos, sin, *more, name=name, full=True, interleaved=False)


def _split(y, layer, tables, c):
    """Columns `[batch, seq, columns]` to query, key and value heads."""
    head_dim = tables[0].shape[-1]
    heads, groups = head_counts(layer, head_dim)
    if c.order == "kind":
        rows = y.reshape(*y.shape[:2], heads + 2 * groups, head_dim)
        parts = (
            lax.slice_in_dim(rows, start, stop, axis=2)
            for start, stop in (
                (0, heads),
                (heads, heads + groups),
                (heads + groups, heads + 2 * groups),
            )
        )
    else:
        each = heads // groups
        rows = y.reshape(*y.shape[:2], groups, each + 2, head_dim)
        parts = (
            lax.collapse(lax.slice_in_dim(rows, start, stop, axis=3), 2, 4)
            for start, stop in ((0, each), (each, each + 1), (each + 1, each + 2))
        )
    return [jnp.moveaxis(part, 2, 1) for part in parts]


def _joined(dq, dk, dv, c):
    """The inverse of `_split`, on cotangents."""
    rows = [jnp.moveaxis(d, 1, 2) for d in (dq, dk, dv)]
    if c.order == "kind":
        return lax.collapse(jnp.concatenate(rows, 2), 2, 4)
    groups = dk.shape[1]
    parts = [d.reshape(*d.shape[:2], groups, -1, d.shape[3]) for d in rows]
    return lax.collapse(jnp.concatenate(parts, 3), 2, 5)
