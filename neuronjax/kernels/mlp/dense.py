"""The gated feed-forward block, forwards and backwards, over rows and over tiles.

    x0 = hidden + fused_add                       (prologue)
    x  = norm(x0)
    g  = clamp(x @ gate_w + gate_b);  u = clamp(x @ up_w + up_b)
    y  = (act(g) * u) @ down_w + down_b + residual            (epilogue)

Shazeer 2020, GLU Variants Improve Transformer, equation 5,
https://arxiv.org/abs/2002.05202. The mathematics is written once; `Rows` and `Tiles`
say where the features of an array lie.
"""

import string
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.activation import activation, activation_grad
from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.feature import LAST, TILE, per_feature, sum_rows, wide
from neuronjax.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from neuronjax.kernels.mlp.operands import (
    Operands,
    Options,
    live_operands,
    parts,
    rows_bwd,
    rows_fwd,
    stored_dtype,
)
from neuronjax.kernels.quantization.linear import is_explicit, split
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from neuronjax.kernels.shard_common import contract

Vector = Float[Array, "..."]
Like = jax.Array | None


class Rows:
    """Features on the last axis; a weight is `[in, out]`."""

    axes = LAST

    @staticmethod
    def project(
        x: jax.Array, w: jax.Array, _: jax.Array, *, like: Like = None
    ) -> jax.Array:
        is_row = x.shape[:-1] == (1,) and x.dtype.itemsize <= 4
        if is_row and w.dtype == jnp.bfloat16 and not is_explicit(x, w):
            return _one_row(x, w)
        rows = _letters(x.ndim - 1)
        return _product(f"{rows}x,xy->{rows}y", x, w, like=like)

    @staticmethod
    def project_back(y: jax.Array, w: jax.Array, *, like: Like = None) -> jax.Array:
        rows = _letters(y.ndim - 1)
        return _product(f"{rows}y,xy->{rows}x", y, w, like=like)

    @staticmethod
    def weight_grad(x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
        if x.ndim == 2 and x.dtype.itemsize == 2:
            # With two axes to contract XLA on a CPU writes the transpose of x out,
            # which a product of narrow factors repays and one of float32 does not.
            x, dy = x[None], dy[None]
        rows = _letters(x.ndim - 1)
        return _product(f"{rows}x,{rows}y->xy", x, dy, like=w).astype(w.dtype)


class Tiles:
    """Features as `n = p*C + c` on the two leading axes; a weight is `[p, c, out]`.

    A weight's output axis is split into the partitions and chunks of what it yields, so
    no activation is ever put together again.
    """

    axes = TILE

    @staticmethod
    def project(
        x: jax.Array, w: jax.Array, tile: jax.Array, *, like: Like = None
    ) -> jax.Array:
        """`x @ w`, its features on the partitions and chunks that `tile` has."""
        rows, split = _letters(x.ndim - 2), w.reshape(*w.shape[:2], *tile.shape[:2])
        return _product(f"pcqd,pc{rows}->qd{rows}", split, x, like=like)

    @staticmethod
    def project_back(y: jax.Array, w: jax.Array, *, like: Like = None) -> jax.Array:
        rows, split = _letters(y.ndim - 2), w.reshape(*w.shape[:2], *y.shape[:2])
        return _product(f"pcqd,qd{rows}->pc{rows}", split, y, like=like)

    @staticmethod
    def weight_grad(x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
        rows, split = _letters(x.ndim - 2), w.reshape(*w.shape[:2], *dy.shape[:2])
        grad = _product(f"pc{rows},qd{rows}->pcqd", x, dy, like=split)
        return grad.reshape(w.shape).astype(w.dtype)


Layout = type[Rows] | type[Tiles]


def _letters(count: int) -> str:
    return string.ascii_uppercase[:count]


def _one_row(x: jax.Array, w: jax.Array) -> jax.Array:
    """One row by a bfloat16 matrix, nothing lost.

    XLA on a CPU widens the whole matrix for one narrow row and not for two (a block of
    1024 x 2816: 19 ms and 35 MB against 2.8 ms). So a row of zeros goes with it, or in
    float32 the three bfloat16 rows whose sum it is.
    """
    rows = [x, jnp.zeros_like(x)]
    narrow = (
        jnp.concatenate(rows) if x.dtype == w.dtype else split(x.astype(jnp.float32))
    )
    y = jnp.dot(narrow, w, preferred_element_type=jnp.float32)
    return y.sum(0, keepdims=True)


def _product(spec: str, x: jax.Array, y: jax.Array, *, like: Like) -> jax.Array:
    """The product of both in the dtype that holds them, summed in the accumulator.

    On an explicit mesh the result is laid out as `like`, which a sum over a split axis
    needs, or as its operands are.
    """
    dtype = promoted(x.dtype, y.dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    if like is not None:
        return contract(spec, x, y, like=like)
    return jnp.einsum(spec, x, y, preferred_element_type=accumulator(dtype))


def plus(y: jax.Array, bias: jax.Array | None, axes: tuple[int, ...]) -> jax.Array:
    return y if bias is None else y + per_feature(bias, y, axes).astype(y.dtype)


def _clamp(x: jax.Array, limits: tuple[float | None, float | None]) -> jax.Array:
    lower, upper = limits
    x = x if upper is None else lax.min(x, jnp.asarray(upper, x.dtype))
    return x if lower is None else lax.max(x, jnp.asarray(lower, x.dtype))


def _where_inside(
    dx: jax.Array, x: jax.Array, limits: tuple[float | None, float | None]
) -> jax.Array:
    """The cotangent of `_clamp`'s operand: zero outside the limits."""
    lower, upper = limits
    dx = dx if upper is None else jnp.where(x > upper, 0, dx)
    return dx if lower is None else jnp.where(x < lower, 0, dx)


def norm_fwd(x0: jax.Array, ops: Operands, opts: Options, axes: tuple[int, ...]):
    """The normalised input in the dtype of the products, and the norm's statistics."""
    dtype, eps = ops.hidden.dtype, opts.eps
    if opts.norm == "none":
        return x0.astype(dtype), ()
    if opts.norm == "layer":
        x, *stats = layer_norm_fwd(
            x0, ops.gamma, ops.beta, eps=eps, axes=axes, out_dtype=dtype
        )
    else:
        gamma = ops.gamma if opts.norm == "rms" else None
        x, *stats = rms_norm_fwd(x0, gamma, eps=eps, axes=axes, out_dtype=dtype)
    return x, stats


def norm_bwd(dx, x0, stats, ops: Operands, opts: Options, axes: tuple[int, ...]):
    """The cotangents of the norm's input, `gamma` and `beta`."""
    if opts.norm == "none":
        return dx, None, None
    if opts.norm == "layer":
        given = x0, ops.gamma, ops.beta, *stats
        return layer_norm_bwd(dx, *given, axes=axes, out_dtype=dx.dtype)
    gamma = ops.gamma if opts.norm == "rms" else None
    dx0, d_gamma = rms_norm_bwd(dx, x0, gamma, *stats, axes=axes, out_dtype=dx.dtype)
    return dx0, d_gamma, None


def prologue_sum(ops: Operands, opts: Options) -> jax.Array:
    """The prologue's sum, not yet rounded."""
    if opts.fused_add != "prologue":
        return ops.hidden
    return wide(ops.hidden) + ops.addend.astype(wide(ops.hidden).dtype)


def middle_of(stored: tuple, opts: Options) -> jax.Array:
    """The gated values from the pre-activations."""
    *gate, up = stored
    clamped_up = _clamp(up, opts.up_limits)
    if opts.skip_gate:
        return activation(clamped_up, opts.activation)
    opened = activation(_clamp(gate[0], opts.gate_limits), opts.activation)
    return opened * clamped_up


def finished(
    y: jax.Array, x0: jax.Array, stored: tuple, ops: Operands, opts: Options, at: Any
) -> tuple[jax.Array, ...]:
    """The outputs from the last product: its bias, the residual, the dtypes."""
    dtype = stored_dtype(ops, opts)
    out, out_dtype = plus(y, ops.down_b, at.axes), opts.out_dtype or dtype
    if opts.fused_add == "epilogue":
        out = out + ops.residual.astype(out.dtype)
    added = (x0.astype(out_dtype),) if opts.store_fused_add else ()
    return out.astype(out_dtype), *added, *(z.astype(dtype) for z in stored)


def pre_activations(project, ops: Operands, opts: Options, at: Any) -> tuple:
    """Gate (unless skipped) and up, after the bias; `project` takes an operand."""
    up = plus(project("up_w"), ops.up_b, at.axes)
    if opts.skip_gate:
        return (up,)
    return plus(project("gate_w"), ops.gate_b, at.axes), up


def _forward(ops: Operands, opts: Options, at: Layout) -> tuple[jax.Array, ...]:
    x0 = prologue_sum(ops, opts)
    x, _ = norm_fwd(x0, ops, opts, at.axes)

    def project(key: str) -> jax.Array:
        return at.project(x, getattr(ops, key), ops.down_w)

    stored = pre_activations(project, ops, opts, at)
    middle = middle_of(stored, opts).astype(ops.hidden.dtype)
    y = at.project(middle, ops.down_w, ops.hidden, like=ops.hidden)
    return finished(y, x0, stored, ops, opts, at)


def middle_grads(d_middle, stored, d_stored, opts: Options):
    """`(middle, d_gate, d_up)` from what the forward stored: no product again."""
    *gate, up = (wide(z) for z in stored)
    clamped_up = _clamp(up, opts.up_limits)
    if opts.skip_gate:
        middle, slope = activation_grad(clamped_up, opts.activation)
        d_gate, d_up = None, d_middle * slope
    else:
        opened, slope = activation_grad(
            _clamp(gate[0], opts.gate_limits), opts.activation
        )
        middle, d_up = opened * clamped_up, d_middle * opened
        d_gate = _where_inside(d_middle * clamped_up * slope, gate[0], opts.gate_limits)
        if d_stored[0] is not None:
            d_gate = d_gate + d_stored[0].astype(d_gate.dtype)
    d_up = _where_inside(d_up, up, opts.up_limits)
    if d_stored[-1] is not None:
        d_up = d_up + d_stored[-1].astype(d_up.dtype)
    return middle, d_gate, d_up


def _weight_grads(x, middle, d_gate, d_up, dout, ops: Operands, at: Layout) -> dict:
    """The cotangents of the weights; a product's operands have its dtype."""
    dtype = ops.hidden.dtype
    grads = dict(
        up_w=at.weight_grad(x, d_up.astype(dtype), ops.up_w),
        down_w=at.weight_grad(middle.astype(dtype), dout.astype(dtype), ops.down_w),
    )
    if d_gate is not None:
        grads["gate_w"] = at.weight_grad(x, d_gate.astype(dtype), ops.gate_w)
    return grads


def cotangents_of(outs: tuple, cotangents: tuple, opts: Options) -> tuple:
    """`(dout, d_added, stored, d_stored)`: the first is never None."""
    at = 2 if opts.store_fused_add else 1
    dout = jnp.zeros_like(outs[0]) if cotangents[0] is None else cotangents[0]
    d_added = cotangents[1] if opts.store_fused_add else None
    return dout, d_added, outs[at:], cotangents[at:]


def input_grads(
    dx: jax.Array, norm: Any, d_added: Any, ops: Operands, opts: Options, at: Layout
) -> dict:
    """The cotangents of the norm's operands and of what is added before it.

    `norm` is the norm's input and statistics.
    """
    x0, stats = norm
    dx0, d_gamma, d_beta = norm_bwd(dx, x0, stats, ops, opts, at.axes)
    if d_added is not None:
        dx0 = dx0 + d_added.astype(dx0.dtype)
    grads = dict(gamma=d_gamma, beta=d_beta, hidden=dx0.astype(ops.hidden.dtype))
    if opts.fused_add == "prologue":
        grads["addend"] = dx0.astype(ops.addend.dtype)
    return grads


def bias_grads(d_gate: Any, d_up: Any, dout: Any, ops: Operands, at: Layout) -> dict:
    """The cotangents of the biases and of the residual."""
    grads = {}
    for key, dy in dict(gate_b=d_gate, up_b=d_up, down_b=dout).items():
        bias = getattr(ops, key)
        if bias is not None and dy is not None:
            grads[key] = sum_rows(wide(dy), bias, at.axes)
    if ops.residual is not None:
        grads["residual"] = dout.astype(ops.residual.dtype)
    return grads


def _backward(
    ops: Operands, outs: tuple, cotangents: tuple, opts: Options, at: Layout
) -> tuple[jax.Array, ...]:
    dout, d_added, stored, d_stored = cotangents_of(outs, cotangents, opts)
    dtype, like = ops.hidden.dtype, ops.hidden
    x0 = prologue_sum(ops, opts)
    x, stats = norm_fwd(x0, ops, opts, at.axes)
    d_middle = at.project_back(dout.astype(dtype), ops.down_w)
    middle, d_gate, d_up = middle_grads(d_middle, stored, d_stored, opts)
    grads = _weight_grads(x, middle, d_gate, d_up, dout, ops, at)
    dx = at.project_back(d_up.astype(dtype), ops.up_w, like=like)
    if d_gate is not None:
        dx = dx + at.project_back(d_gate.astype(dtype), ops.gate_w, like=like)
    grads |= bias_grads(d_gate, d_up, dout, ops, at)
    grads |= input_grads(dx, (x0, stats), d_added, ops, opts, at)
    return tuple(grads[key] for key in live_operands(ops))


def mlp_fwd(
    hidden: Float[Array, "*batch d_model"],
    gate_w: Float[Array, "d_model d_ff"] | None,
    up_w: Float[Array, "d_model d_ff"],
    down_w: Float[Array, "d_ff d_model"],
    gamma: Vector | None = None,
    beta: Vector | None = None,
    gate_b: Vector | None = None,
    up_b: Vector | None = None,
    down_b: Vector | None = None,
    addend: Float[Array, "*batch d_model"] | None = None,
    residual: Float[Array, "*batch d_model"] | None = None,
    *scales: None,
    name: str,
    **config,
) -> tuple[jax.Array, ...]:
    """Returns `out`, the prologue's sum where it is stored, then `gate` and `up`.

    `gate` and `up` are the pre-activations after the bias and before the clamp, in the
    dtype of `hidden`: all that the backward reads. Without a gate there is `up` alone.
    Products accumulate in float32 and only a result is rounded. These weights have no
    `scales`.
    """
    ops = Operands(hidden, gate_w, up_w, down_w, gamma, beta, gate_b, up_b, down_b)
    ops = ops._replace(addend=addend, residual=residual)
    return rows_fwd(_forward, ops, Options.of(config), Rows)


def mlp_bwd(
    *operands: Float[Array, "..."] | None, name: str, **config
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands of `mlp_fwd` that are given, in their order.

    Takes those operands, the outputs, and a cotangent or None for each output. The
    pre-activations come from the outputs: the products before them are not repeated.
    """
    return rows_bwd(_backward, operands, Options.of(config), Rows)


def mlp_tiled_fwd(
    hidden: Float[Array, "p c *batch"],
    gate_w: Float[Array, "p c d_ff"] | None,
    up_w: Float[Array, "p c d_ff"],
    down_w: Float[Array, "p_ff c_ff d_model"],
    gamma: Vector | None = None,
    beta: Vector | None = None,
    gate_b: Vector | None = None,
    up_b: Vector | None = None,
    down_b: Vector | None = None,
    addend: Float[Array, "p c *batch"] | None = None,
    residual: Float[Array, "p c *batch"] | None = None,
    *scales: None,
    name: str,
    **config,
) -> tuple[jax.Array, ...]:
    """`mlp_fwd` on tiles: every activation is `[partition, chunk, *batch]`."""
    ops = Operands(hidden, gate_w, up_w, down_w, gamma, beta, gate_b, up_b, down_b)
    ops = ops._replace(addend=addend, residual=residual)
    return _forward(ops, Options.of(config), Tiles)


def mlp_tiled_bwd(
    *operands: Float[Array, "..."] | None, name: str, **config
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands of `mlp_tiled_fwd`, as `mlp_bwd` gives them."""
    return _backward(*parts(operands), Options.of(config), Tiles)
