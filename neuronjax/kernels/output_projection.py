"""The projection of attention heads back to the model's width.

`out[b, s, :] = concat_n(attention[b, n, :, s]) @ weight + bias`; row `n*D + d` of the
weight belongs to channel `d` of head `n`. Vaswani et al. 2017, section 3.2.2,
https://arxiv.org/abs/1706.03762.

Attention is `[batch, num_heads, head_dim, seq]` in prefill (form `"BNDS"`) and
`[head_dim, batch, num_heads, seq]` in decode (`"DBNS"`). Only activations are ever
transposed, no weight: in decode the rows are few and the weight is everything.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.feature import TILE, per_feature, sum_rows
from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.shard_common import contract

PARTITIONS = 128

# From the attention's axes to [batch, seq, num_heads, head_dim], and back.
_TO_ROWS = {"BNDS": (0, 3, 1, 2), "DBNS": (1, 3, 2, 0)}
_FROM_ROWS = {"BNDS": (0, 2, 3, 1), "DBNS": (3, 0, 2, 1)}


def output_projection_fwd(
    attention: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    *,
    name: str,
    form: str,
    transpose_out: bool,
    cores: int | None,
    out_dtype: str | None,
    is_tiled: bool,
    **hints: Any,
) -> tuple[Array]:
    """Returns `(out,)`: `[batch, seq, d_model]`, or in decode `[batch*seq, d_model]`.

    With `transpose_out`, decode gives `[128, cores, d_model/(128*cores), batch*seq]`:
    column `h = l*(d_model/cores) + p*(d_model/(128*cores)) + c` lies at `[p, l, c]`.
    The products are summed and the bias is added in float32.

    On tiles (`is_tiled`) attention is `[p, c, batch, num_heads, seq]` with the head
    dimension on the partitions, the weight `[p, c, num_heads, d_model]`, and `out` has
    `d_model` (transposed: its 128 rows) on the partitions. `hints` change no value.
    """
    dtype, acc = _dtypes(attention, weight)
    if is_tiled:
        factors = weight.astype(dtype), attention.astype(dtype)
        y = jnp.einsum("pcnh,pcbns->hbs", *factors, preferred_element_type=acc)
    else:
        y = linear_fwd(rows_of(attention, form), weight, dtype=dtype)
    out = finished(y, bias, form, transpose_out, cores, is_tiled)
    return (out.astype(out_dtype or attention.dtype),)


def output_projection_bwd(
    attention: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    d_out: Float[Array, "..."],
    *,
    name: str,
    form: str,
    transpose_out: bool,
    cores: int | None,
    out_dtype: str | None,
    is_tiled: bool,
    **hints: Any,
) -> tuple[Array, Array, Array | None]:
    """Returns the cotangents of attention, weight and bias; the map is bilinear."""
    dtype, acc = _dtypes(attention, weight)
    dy = flat(d_out.astype(acc), attention.shape[-1], transpose_out, is_tiled)
    narrow, w = dy.astype(dtype), weight.astype(dtype)
    if is_tiled:
        x, narrow = attention.astype(dtype), lax.collapse(narrow, 0, 2)
        dx = contract("pcnh,hbs->pcbns", w, narrow, like=x)
        dw = contract("pcbns,hbs->pcnh", x, narrow, like=w)
    else:
        rows = rows_of(attention, form).astype(dtype)
        drows = contract("bsh,kh->bsk", narrow, w, like=rows)
        dw = contract("bsk,bsh->kh", rows, narrow, like=w)
        dx = attention_of(drows, attention, form)
    dbias = bias_grad(dy, bias, is_tiled)
    return dx.astype(attention.dtype), dw.astype(weight.dtype), dbias


def output_projection_plain(
    attention: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    *,
    name: str,
    form: str,
    transpose_out: bool,
    cores: int | None,
    out_dtype: str | None,
    is_tiled: bool,
    **hints: Any,
) -> tuple[Array]:
    """The same as one sum over heads and channels."""
    dtype, acc = _dtypes(attention, weight)
    x, w, spec = plain_factors(attention, weight, form, is_tiled)
    out = jnp.einsum(spec, x.astype(dtype), w.astype(dtype), preferred_element_type=acc)
    out = plain_layout(out, bias, form, transpose_out, cores, is_tiled)
    return (out.astype(out_dtype or attention.dtype),)


def plain_factors(attention, weight, form: str, is_tiled: bool):
    """Attention, the weight as `[num_heads, head_dim, d_model]`, and their einsum."""
    if is_tiled:
        attention = lax.collapse(attention, 0, 2)
        weight = jnp.moveaxis(lax.collapse(weight, 0, 2), 1, 0)
        return attention, weight, "dbns,ndh->bsh"
    head_dim = attention.shape[2 if form == "BNDS" else 0]
    weight = weight.reshape(-1, head_dim, weight.shape[1])
    return attention, weight, "bnds,ndh->bsh" if form == "BNDS" else "dbns,ndh->bsh"


def plain_layout(out, bias, form: str, transpose_out: bool, cores, is_tiled: bool):
    """Adds the bias to `[batch, seq, d_model]` and lays the sum out as the output."""
    if bias is not None:
        out = out + bias.reshape(-1).astype(out.dtype)
    if form == "DBNS":
        out = out.reshape(-1, out.shape[-1])
    if transpose_out:
        out = out.reshape(out.shape[0], cores, PARTITIONS, -1).transpose(2, 1, 3, 0)
        return out[:, None] if is_tiled else out
    if is_tiled:
        return _split(jnp.moveaxis(out, -1, 0), 0, _chunks(out.shape[-1]))
    return out


def finished(y, bias, form: str, transpose_out: bool, cores, is_tiled: bool):
    """Adds the bias to the products and lays the sum out as the output.

    The products are `[batch, seq, d_model]`, on tiles `[d_model, batch, seq]`.
    """
    if is_tiled:
        y = _split(y, 0, _chunks(y.shape[0]))
    if bias is not None:
        row = per_feature(bias, y, TILE) if is_tiled else bias[0]
        y = y + row.astype(y.dtype)
    return _arranged(y, form, transpose_out, cores, is_tiled)


def bias_grad(dy, bias, is_tiled: bool):
    """The cotangent of the bias, from that of the products in their own layout."""
    if bias is None:
        return None
    if is_tiled:
        return sum_rows(dy, bias, TILE)
    return dy.sum((0, 1))[None].astype(bias.dtype)


def _dtypes(attention, weight) -> tuple[Any, Any]:
    """The dtype of the products' factors, and that of their sums."""
    dtype = promoted(attention.dtype, weight.dtype)
    return dtype, accumulator(dtype)


def rows_of(attention, form: str):
    """`[batch, seq, num_heads*head_dim]`: what meets the weight's rows."""
    return lax.collapse(attention.transpose(_TO_ROWS[form]), 2, 4)


def attention_of(rows, attention, form: str):
    """The inverse of `rows_of`, for `attention` of that shape."""
    head_dim = attention.shape[2 if form == "BNDS" else 0]
    return _split(rows, 2, head_dim).transpose(_FROM_ROWS[form])


def _split(x, axis: int, inner: int):
    """Splits one axis in two, the inner one of size `inner`."""
    shape = (*x.shape[:axis], x.shape[axis] // inner, inner, *x.shape[axis + 1 :])
    return x.reshape(shape)


def _chunks(size: int) -> int:
    """Chunks of a tiled axis: one until the partitions are full."""
    return max(size // PARTITIONS, 1)


def _arranged(y, form: str, transpose_out: bool, cores, is_tiled: bool):
    """Lays `[batch, seq, d_model]`, or on tiles `[p, c, batch, seq]`, out as `out`."""
    if form == "BNDS":
        return y
    if is_tiled:
        y = lax.collapse(y, 2, 4)
        if not transpose_out:
            return y
        wide = _split(lax.collapse(y, 0, 2), 0, y.shape[0] * y.shape[1] // cores)
        wide = _split(wide, 1, wide.shape[1] // PARTITIONS)
        return wide.transpose(1, 0, 2, 3)[:, None]
    y = lax.collapse(y, 0, 2)
    if not transpose_out:
        return y
    wide = _split(y, 1, y.shape[1] // cores)
    return _split(wide, 2, wide.shape[2] // PARTITIONS).transpose(2, 1, 3, 0)


def flat(d_out, seq, transpose_out: bool, is_tiled: bool):
    """The inverse of `_arranged`; `seq` may be symbolic."""
    if is_tiled:
        if transpose_out:
            wide = lax.collapse(d_out[:, 0].transpose(1, 0, 2, 3), 1, 3)
            d_out = lax.collapse(wide, 0, 2)
            d_out = _split(d_out, 0, _chunks(d_out.shape[0]))
        return d_out if d_out.ndim == 4 else _split(d_out, 2, seq)
    if transpose_out:
        d_out = d_out.transpose(3, 1, 0, 2)
        d_out = lax.collapse(lax.collapse(d_out, 2, 4), 1, 3)
    return d_out if d_out.ndim == 3 else _split(d_out, 0, seq)
