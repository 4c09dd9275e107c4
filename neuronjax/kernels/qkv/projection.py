"""Norm, projection to query, key and value heads, and rotary embedding, in one pass.

RMSNorm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.
LayerNorm: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450, equation 4.
Rotary embedding: Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34.

The columns of the weight are all query heads, then key heads, then value heads. One
text serves whole tensors and tiles: a `Form` says where the axes lie.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.feature import LAST, TILE, per_feature, sum_rows
from neuronjax.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from neuronjax.kernels.shard_common import contract, uniform

PARTITIONS = 128


class Product(NamedTuple):
    """The projection itself: how normed activations meet the weight.

    Attributes:
        forward: `forward(form, normed, w)` returns the columns, wide, without bias.
        backward: `backward(form, normed, w, dy, hidden)` returns the cotangents of
            weight (`None` where it is a constant) and activations.
    """

    forward: Callable
    backward: Callable


class Form(NamedTuple):
    """Where the axes of the activations lie: `b` batch, `s` seq, `i` columns of `w`."""

    axes: tuple[int, ...]
    input_grad: str
    weight_grad: str
    heads: int
    halves: int


# Activations [b, s, h], weight [h, i], projected [b, s, i], heads [b, s, n, d].
WHOLE = Form(LAST, "bsi,hi->bsh", "bsh,bsi->hi", 2, 3)
# Activations [p, c, b, s], weight [p, c, i], projected [i, b, s],
# heads [n, p, c, b, s].
TILED = Form(TILE, "pci,ibs->pcbs", "pcbs,ibs->pci", 0, 1)


def qkv_fwd(
    hidden: Float[Array, "batch seq d_model"],
    w: Float[Array, "d_model columns"],
    gamma: Float[Array, "1 d_model"] | None,
    beta: Float[Array, "1 d_model"] | None,
    bias: Float[Array, "1 columns"] | None,
    mlp_prev: Float[Array, "batch seq d_model"] | None,
    attn_prev: Float[Array, "batch seq d_model"] | None,
    cos: Float[Array, "batch seq head_dim"] | None,
    sin: Float[Array, "batch seq head_dim"] | None,
    *,
    name: str,
    **config: Any,
) -> tuple[Array, ...]:
    """Returns `out`, the residual sum where one is added, and the norm's statistics.

    `out` is `[batch, seq, columns]`, or for the layout `"NBSd"`
    `[num_heads, batch, seq, head_dim]`. The statistics are `rstd`, for LayerNorm `mean`
    and `rstd`, each `[batch, seq, 1]` in float32. Norm, bias and rotation are float32
    too; the residual sum is rounded once, to the dtype of `hidden`.
    """
    operands = (hidden, w, gamma, beta, bias, mlp_prev, attn_prev, cos, sin)
    return _forward(WHOLE, operands, config)


def qkv_tiled_fwd(
    hidden: Float[Array, "p c batch seq"],
    w: Float[Array, "p c columns"],
    gamma: Float[Array, "p c 1"] | None,
    beta: Float[Array, "p c 1"] | None,
    bias: Float[Array, "q e 1"] | None,
    mlp_prev: Float[Array, "p c batch seq"] | None,
    attn_prev: Float[Array, "p c batch seq"] | None,
    cos: Float[Array, "r f batch seq"] | None,
    sin: Float[Array, "r f batch seq"] | None,
    *,
    name: str,
    **config: Any,
) -> tuple[Array, ...]:
    """The same on tiles: `d_model` is `p * c`, the columns are `q * e`, a head `r * f`.

    `out` is `[q, e, batch, seq]`, or `[r, f, num_heads, batch, seq]` for `"NBSd"`; the
    residual sum `[p, c, batch, seq]`; a statistic `[1, 1, batch, seq]`.
    """
    operands = (hidden, w, gamma, beta, bias, mlp_prev, attn_prev, cos, sin)
    return _forward(TILED, operands, config)


def qkv_bwd(*args: Array | None, name: str, is_tiled: bool, **config: Any) -> tuple:
    """Returns the nine gradients, `None` for an absent operand.

    Takes the nine operands, the outputs of the forward leaf and their cotangents. It
    reads the stored statistics and residual sum, and never `out`: what was rotated is
    projected again, and only for the gradients of `cos` and `sin`.
    """
    form, (operands, rest) = TILED if is_tiled else WHOLE, (args[:9], args[9:])
    outs, cotangents = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    hidden, w, *_ = operands
    dtype = factor_dtype(hidden, w)
    dy = flat(form, cotangents[0], outs[0], accumulator(dtype), config)
    rest = (outs[1:], cotangents[1:])
    return columns_bwd(form, operands, rest, dy, config, wide_product(dtype))


def columns_fwd(
    form: Form, operands: tuple, config: dict, product: Product
) -> tuple[Array, tuple, tuple]:
    """Returns the columns, rotated and wide, `(sum,)` or `()`, and the statistics.

    The columns are `[batch, seq, columns]`, or on tiles `[columns, batch, seq]`.
    """
    hidden, w, gamma, beta, bias, *residuals, cos, sin = operands
    acc = accumulator(factor_dtype(hidden, w))
    x, stored = hidden.astype(acc), ()
    if config["fused_add"] != "none":
        for r in residuals:
            x = x + r.astype(acc)
        stored = (x.astype(hidden.dtype),)
        x = stored[0].astype(acc)
    normed, statistics = _norm(form, x, gamma, beta, config)
    y = _biased(form, product.forward(form, normed, w), bias)
    if config["fused_rope"]:
        y = _rotate(form, y, cos, sin, config)
    return y, stored, tuple(statistics)


def columns_bwd(
    form: Form,
    operands: tuple,
    rest: tuple[tuple, tuple],
    dy: Array,
    config: dict,
    product: Product,
) -> tuple:
    """Returns the nine gradients; `rest` is sum and statistics, and their cotangents.

    `dy` is the cotangent of the columns of `columns_fwd`. `None` stands for that of an
    absent operand, and of a weight that is a constant.
    """
    hidden, w, gamma, beta, bias, _, _, cos, sin = operands
    (outs, cotangents), acc, dcos, dsin = rest, dy.dtype, None, None
    summed = config["fused_add"] != "none"
    x, statistics = (outs[0] if summed else hidden).astype(acc), outs[summed:]
    normed = _norm_again(form, x, gamma, beta, statistics)
    if config["fused_rope"]:
        y = _biased(form, product.forward(form, normed, w), bias)
        dy, dcos, dsin = _rotate_bwd(form, dy, y, cos, sin, config)
    dw, dnormed = product.backward(form, normed, w, dy, hidden)
    stored = cotangents[summed:]
    dx, dgamma, dbeta = _norm_bwd(
        form, dnormed, x, gamma, beta, statistics, stored, config
    )
    if summed and cotangents[0] is not None:
        dx = dx + cotangents[0].astype(acc)
    dbias = None if bias is None else _bias_grad(form, dy, bias)
    grads = (dx, dw, dgamma, dbeta, dbias, dx, dx, dcos, dsin)
    return tuple(
        None if operand is None or grad is None else grad.astype(operand.dtype)
        for operand, grad in zip(operands, grads, strict=True)
    )


def factor_dtype(hidden: Any, w: Any) -> jnp.dtype:
    """The dtype of the product's factors; an fp8 weight takes that of `hidden`."""
    return hidden.dtype if is_fp8(w.dtype) else promoted(hidden.dtype, w.dtype)


def wide_product(dtype: Any) -> Product:
    """The product with an unquantized weight, factors rounded to `dtype`."""

    def forward(form, normed, w):
        if form is WHOLE:
            return linear_fwd(normed, w, dtype=dtype)
        return jnp.einsum(
            "pci,pcbs->ibs",
            w.astype(dtype),
            normed.astype(dtype),
            preferred_element_type=normed.dtype,
        )

    def backward(form, normed, w, dy, hidden):
        w, dy = w.astype(dtype), dy.astype(dtype)
        dw = contract(form.weight_grad, normed.astype(dtype), dy, like=w)
        pair = (dy, w) if form is WHOLE else (w, dy)
        return dw, contract(form.input_grad, *pair, like=hidden.astype(dtype))

    return Product(forward, backward)


def _forward(form, operands, config):
    hidden, w, *_ = operands
    product = wide_product(factor_dtype(hidden, w))
    y, stored, statistics = columns_fwd(form, operands, config, product)
    return (arranged(form, y.astype(hidden.dtype), config), *stored, *statistics)


def _norm(form, x, gamma, beta, config):
    """The normed activations, and `(rstd,)` or for LayerNorm `(mean, rstd)`."""
    norm, eps = config["norm"], config["eps"]
    if norm == "none":
        return x, ()
    if norm == "layer":
        normed, *statistics = layer_norm_fwd(x, gamma, beta, eps=eps, axes=form.axes)
    else:
        count = config["hidden_actual"]
        normed, *statistics = rms_norm_fwd(
            x, gamma, eps=eps, hidden_actual=count, axes=form.axes
        )
    return normed, statistics


def _norm_again(form, x, gamma, beta, statistics):
    """The normed activations from stored statistics."""
    if not statistics:
        return x
    *mean, rstd = statistics
    y = (x - mean[0] if mean else x) * rstd
    if gamma is not None:
        y = y * per_feature(gamma, y, form.axes).astype(y.dtype)
    return y if beta is None else y + per_feature(beta, y, form.axes).astype(y.dtype)


def _norm_bwd(form, dnormed, x, gamma, beta, statistics, cotangents, config):
    """Cotangents of input, gain and offset; those of the statistics count."""
    if not statistics:
        return dnormed, None, None
    if config["norm"] == "layer":
        d_mean, d_rstd = cotangents
        more = dict(d_mean=d_mean, d_rstd=d_rstd, axes=form.axes)
        return layer_norm_bwd(dnormed, x, gamma, beta, *statistics, **more)
    more = dict(d_rstd=cotangents[0], hidden_actual=config["hidden_actual"])
    dx, dgamma = rms_norm_bwd(dnormed, x, gamma, *statistics, **more, axes=form.axes)
    return dx, dgamma, None


def _biased(form, y, bias):
    """Adds the bias to `[batch, seq, columns]`, or on tiles `[columns, batch, seq]`."""
    if bias is None:
        return y
    if form is WHOLE:
        return y + per_feature(bias, y, LAST).astype(y.dtype)
    chunks = _split(y, 0, bias.shape[1])
    chunks = chunks + per_feature(bias, chunks, TILE).astype(y.dtype)
    return lax.collapse(chunks, 0, 2)


def _bias_grad(form, dy, bias):
    if form is TILED:
        dy = _split(dy, 0, bias.shape[1])
    return sum_rows(dy, bias, form.axes)


def _split(x, axis, inner):
    """Splits one axis in two, the inner one of size `inner`."""
    shape = (*x.shape[:axis], x.shape[axis] // inner, inner, *x.shape[axis + 1 :])
    return x.reshape(shape)


def _chunks(size):
    """Chunks of a tiled axis: one until the partitions are full."""
    return max(size // PARTITIONS, 1)


def _heads(form, y, d_head):
    if form is WHOLE:
        return _split(y, 2, d_head)
    return _split(_split(y, 0, d_head), 1, _chunks(d_head))


def _merged(form, heads):
    """The inverse of `_heads`."""
    if form is WHOLE:
        return lax.collapse(heads, 2, 4)
    return lax.collapse(lax.collapse(heads, 1, 3), 0, 2)


def arranged(form, y, config):
    """Lays projected columns out as the output."""
    if config["layout"] == "BSD":
        return y if form is WHOLE else _split(y, 0, _chunks(y.shape[0]))
    heads = _heads(form, y, config["d_head"])
    if form is WHOLE:
        return heads.transpose(2, 0, 1, 3)
    return heads.transpose(1, 2, 0, 3, 4)


def flat(form, d_out, out, acc, config):
    """The inverse of `arranged`, on a cotangent, in wide precision."""
    if d_out is None:
        d_out, *_ = uniform(jnp.zeros_like(out), out)
    d_out = d_out.astype(acc)
    if config["layout"] == "BSD":
        return d_out if form is WHOLE else lax.collapse(d_out, 0, 2)
    order = (1, 2, 0, 3) if form is WHOLE else (2, 0, 1, 3, 4)
    return _merged(form, d_out.transpose(order))


def _turned(form, x):
    """`[x1, x2] -> [-x2, x1]` on the halves of each head."""
    first, second = jnp.split(x, 2, form.halves)
    return jnp.concatenate([-second, first], form.halves)


def _rotated_heads(form, y, config):
    """The query and key heads, and the value heads that no rotation touches."""
    heads = _heads(form, y, config["d_head"])
    last = config["num_q_heads"] + config["num_kv_heads"]
    return (
        lax.slice_in_dim(heads, 0, last, axis=form.heads),
        lax.slice_in_dim(heads, last, None, axis=form.heads),
    )


def _table(form, cos, acc):
    return jnp.expand_dims(cos.astype(acc), form.heads)


def _rotate(form, y, cos, sin, config):
    """`[y1, y2] * cos + [-y2, y1] * sin`: all columns of both tables count."""
    qk, v = _rotated_heads(form, y, config)
    cos, sin = (_table(form, table, y.dtype) for table in (cos, sin))
    qk = qk * cos + _turned(form, qk) * sin
    return _merged(form, jnp.concatenate([qk, v], form.heads))


def _rotate_bwd(form, dz, y, cos, sin, config):
    """Cotangents of the projected columns, of `cos` and of `sin`."""
    dqk, dv = _rotated_heads(form, dz, config)
    qk, _ = _rotated_heads(form, y, config)
    cos, sin = (_table(form, table, dz.dtype) for table in (cos, sin))
    # The transposed map: sin is multiplied before the halves are turned back.
    d_heads = dqk * cos - _turned(form, dqk * sin)
    dy = _merged(form, jnp.concatenate([d_heads, dv], form.heads))
    return dy, (dqk * qk).sum(form.heads), (dqk * _turned(form, qk)).sum(form.heads)
