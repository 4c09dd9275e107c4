"""QKV line by line from its equations, forwards and backwards, on whole tensors.

Tiles are laid out whole before and tiled after. Nothing here is fast.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.dtypes import accumulator, promoted

PARTITIONS = 128
_OPERANDS = "hidden w gamma beta bias mlp_prev attn_prev cos sin".split()
# The axis of each operand that a tile lays on the partitions.
_AXES = (2, 0, 1, 1, 1, 2, 2, 2, 2)


def qkv_plain(*operands: Array | None, name: str, is_tiled: bool, **config: Any):
    """What `qkv_fwd` and `qkv_tiled_fwd` return."""
    o, c = wide_operands(operands, is_tiled), SimpleNamespace(**config)
    y, x, statistics = columns_plain(o, c, wide_product_plain)
    outs = (laid_out(y, c).astype(o.dtype), *stored_sum(x, o, c), *statistics)
    return tuple(map(retiled, outs, out_axes(c))) if is_tiled else outs


def columns_plain(o, c, product):
    """The columns behind bias and rotation, the residual sum and the statistics."""
    x = o.hidden
    if c.fused_add == "prologue":
        x = rounded(x + o.mlp_prev + o.attn_prev, o.dtype)
    statistics = _statistics(x, c)
    y = product(_normed(x, o, statistics), o)
    y = y if o.bias is None else y + o.bias[0]
    return (_rotated(y, o.cos, o.sin, c) if c.fused_rope else y), x, statistics


def wide_product_plain(normed, o):
    """The projection with an unquantized weight."""
    return rounded(normed, o.factor) @ rounded(o.w, o.factor)


def stored_sum(x, o, c):
    """The residual sum where one is added."""
    return [] if c.fused_add == "none" else [x.astype(o.dtype)]


def laid_out(y, c):
    """The columns in the order of the output."""
    if c.layout == "BSD":
        return y
    return jnp.moveaxis(y.reshape(*y.shape[:2], -1, c.d_head), 2, 0)


def qkv_bwd_plain(*args: Array | None, name: str, is_tiled: bool, **config: Any):
    """What `qkv_bwd` returns, from the same stored statistics and residual sum."""
    c, rest = SimpleNamespace(**config), args[9:]
    o, outs, cotangents = wide_operands(args[:9], is_tiled), *_halves(rest)
    if is_tiled:
        outs, cotangents = (
            tuple(map(untiled, ys, out_axes(c))) for ys in (outs, cotangents)
        )
    seeds = [
        jnp.zeros(y.shape, o.acc) if ct is None else ct.astype(o.acc)
        for y, ct in zip(outs, cotangents, strict=True)
    ]
    summed = int(c.fused_add != "none")
    x = outs[1].astype(o.acc) if summed else o.hidden
    statistics, d_statistics = outs[1 + summed :], seeds[1 + summed :]
    normed = _normed(x, o, statistics)
    dy, dcos, dsin = seeds[0], None, None
    if c.layout == "NBSd":
        dy = jnp.moveaxis(dy, 0, 2).reshape(*x.shape[:2], -1)
    if c.fused_rope:
        y = wide_product_plain(normed, o)
        y = y if o.bias is None else y + o.bias[0]
        dy, dcos, dsin = _rotated_bwd(y, dy, o.cos, o.sin, c)
    d_normed = rounded(dy, o.factor) @ rounded(o.w, o.factor).T
    dw = jnp.einsum("bsh,bsi->hi", rounded(normed, o.factor), rounded(dy, o.factor))
    dx = _norm_bwd(d_normed, d_statistics, x, o, statistics, c)
    dx = dx + seeds[1] if summed else dx
    dgamma = (d_normed * _normed(x, None, statistics)).sum((0, 1))[None]
    dbeta, dbias = d_normed.sum((0, 1))[None], dy.sum((0, 1))[None]
    grads = (dx, dw, dgamma, dbeta, dbias, dx, dx, dcos, dsin)
    grads = [
        None if operand is None else retiled(g, axis) if is_tiled else g
        for operand, g, axis in zip(args[:9], grads, _AXES, strict=True)
    ]
    return tuple(
        None if g is None else g.astype(operand.dtype)
        for operand, g in zip(args[:9], grads, strict=True)
    )


def _halves(args):
    return args[: len(args) // 2], args[len(args) // 2 :]


def wide_operands(operands, is_tiled):
    """The operands by name, whole, in the dtype of all sums."""
    hidden, w, *_ = operands
    fp8 = w.dtype.itemsize == 1
    factor = hidden.dtype if fp8 else promoted(hidden.dtype, w.dtype)
    acc = accumulator(factor)
    if is_tiled:
        operands = map(untiled, operands, _AXES)
    wide = [None if x is None else x.astype(acc) for x in operands]
    named = dict(zip(_OPERANDS, wide, strict=True))
    return SimpleNamespace(**named, dtype=hidden.dtype, factor=factor, acc=acc)


def rounded(x, dtype):
    """`x` rounded to `dtype`, in its own dtype."""
    return x.astype(dtype).astype(x.dtype)


def _statistics(x, c):
    if c.norm == "none":
        return ()
    if c.norm == "layer":
        mean = x.sum(-1, keepdims=True) / x.shape[-1]
        variance = ((x - mean) ** 2).sum(-1, keepdims=True) / x.shape[-1]
        return mean, 1 / jnp.sqrt(variance + c.eps)
    count = c.hidden_actual or x.shape[-1]
    return (1 / jnp.sqrt((x * x).sum(-1, keepdims=True) / count + c.eps),)


def _normed(x, o, statistics):
    """Without `o`, neither gain nor offset."""
    if len(statistics) == 2:
        x = x - statistics[0]
    if statistics:
        x = x * statistics[-1]
    if o is None:
        return x
    x = x if o.gamma is None else x * o.gamma[0]
    return x if o.beta is None else x + o.beta[0]


def _norm_bwd(d_normed, d_statistics, x, o, statistics, c):
    if not statistics:
        return d_normed
    d_hat = d_normed if o.gamma is None else d_normed * o.gamma[0]
    *mean, rstd = statistics
    count = x.shape[-1]
    offset = x - mean[0] if mean else x
    d_rstd = (d_hat * offset).sum(-1, keepdims=True) + d_statistics[-1]
    if not mean:
        return rstd * d_hat - rstd**3 * offset * d_rstd / (c.hidden_actual or count)
    d_mean = d_statistics[0] - (rstd * d_hat).sum(-1, keepdims=True)
    return rstd * d_hat - rstd**3 * offset * d_rstd / count + d_mean / count


def _turn(d_head, dtype):
    """The matrix `R` with `[x1, x2] @ R = [-x2, x1]`."""
    quarter = jnp.array([[0, 1], [-1, 0]], dtype)
    return jnp.kron(quarter, jnp.eye(d_head // 2, dtype=dtype))


def _is_rotated(c):
    heads = jnp.arange(c.num_q_heads + 2 * c.num_kv_heads)
    return (heads < c.num_q_heads + c.num_kv_heads)[:, None]


def _rotated(y, cos, sin, c):
    heads = y.reshape(*y.shape[:2], -1, c.d_head)
    turned = heads @ _turn(c.d_head, y.dtype)
    turned = heads * cos[:, :, None] + turned * sin[:, :, None]
    return jnp.where(_is_rotated(c), turned, heads).reshape(y.shape)


def _rotated_bwd(y, dz, cos, sin, c):
    heads, d_heads = (a.reshape(*y.shape[:2], -1, c.d_head) for a in (y, dz))
    turn, rotated = _turn(c.d_head, y.dtype), _is_rotated(c)
    back = d_heads * cos[:, :, None] + (d_heads * sin[:, :, None]) @ turn.T
    dcos = jnp.where(rotated, d_heads * heads, 0).sum(2)
    dsin = jnp.where(rotated, d_heads * (heads @ turn), 0).sum(2)
    return jnp.where(rotated, back, d_heads).reshape(y.shape), dcos, dsin


def out_axes(c):
    """The axis of each output that a tile lays on the partitions."""
    out = 2 if c.layout == "BSD" else 3
    stored = [2] if c.fused_add != "none" else []
    return (out, *stored, *[2] * {"none": 0, "layer": 2}.get(c.norm, 1))


def untiled(x, axis):
    """The tensor that a tile holds, `axis` of it on the partitions."""
    if x is None:
        return None
    return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, axis)


def retiled(x, axis):
    """The inverse of `untiled`."""
    rows = jnp.moveaxis(x, axis, 0)
    partitions = min(rows.shape[0], PARTITIONS)
    return rows.reshape(partitions, -1, *rows.shape[1:])
