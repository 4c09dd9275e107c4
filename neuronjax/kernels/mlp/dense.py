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
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from neuronjax.kernels.activation import activation, activation_grad
from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.feature import LAST, TILE, per_feature, sum_rows, wide
from neuronjax.kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from neuronjax.kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from neuronjax.kernels.shard_common import contract

Vector = Float[Array, "..."]
Like = jax.Array | None
Option = Any  # an array, or None; the config bag says which are there


class Options(NamedTuple):
    """The config bag of the macro `MLP`."""

    activation: str = "SiLU"
    norm: str = "none"
    eps: float = 1e-6
    skip_gate: bool = False
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    fused_add: str = "none"
    store_fused_add: bool = False
    out_dtype: str | None = None
    is_tiled: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Options":
        """Reads a config bag; its other entries are hints, which change no value."""
        return cls(**{key: config[key] for key in cls._fields if key in config})

    @property
    def gate_limits(self) -> tuple[float | None, float | None]:
        return self.gate_clamp_lower_limit, self.gate_clamp_upper_limit

    @property
    def up_limits(self) -> tuple[float | None, float | None]:
        return self.up_clamp_lower_limit, self.up_clamp_upper_limit


class Operands(NamedTuple):
    """The operands of the macro `MLP`, in order. An absent option is None."""

    hidden: jax.Array
    gate_w: Option
    up_w: jax.Array
    down_w: jax.Array
    gamma: Option = None
    beta: Option = None
    gate_b: Option = None
    up_b: Option = None
    down_b: Option = None
    addend: Option = None
    residual: Option = None


class Rows:
    """Features on the last axis; a weight is `[in, out]`."""

    axes = LAST

    @staticmethod
    def project(
        x: jax.Array, w: jax.Array, _: jax.Array, *, like: Like = None
    ) -> jax.Array:
        rows = _letters(x.ndim - 1)
        return _product(f"{rows}x,xy->{rows}y", x, w, like=like)

    @staticmethod
    def project_back(y: jax.Array, w: jax.Array, *, like: Like = None) -> jax.Array:
        rows = _letters(y.ndim - 1)
        return _product(f"{rows}y,xy->{rows}x", y, w, like=like)

    @staticmethod
    def weight_grad(x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
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


def _plus(y: jax.Array, bias: jax.Array | None, axes: tuple[int, ...]) -> jax.Array:
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


def _norm(x0: jax.Array, ops: Operands, opts: Options, axes: tuple[int, ...]):
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


def _norm_bwd(dx, x0, stats, ops: Operands, opts: Options, axes: tuple[int, ...]):
    """The cotangents of the norm's input, `gamma` and `beta`."""
    if opts.norm == "none":
        return dx, None, None
    if opts.norm == "layer":
        given = x0, ops.gamma, ops.beta, *stats
        return layer_norm_bwd(dx, *given, axes=axes, out_dtype=dx.dtype)
    gamma = ops.gamma if opts.norm == "rms" else None
    dx0, d_gamma = rms_norm_bwd(dx, x0, gamma, *stats, axes=axes, out_dtype=dx.dtype)
    return dx0, d_gamma, None


def _added(ops: Operands, opts: Options) -> jax.Array:
    """The prologue's sum, not yet rounded."""
    if opts.fused_add != "prologue":
        return ops.hidden
    return wide(ops.hidden) + ops.addend.astype(wide(ops.hidden).dtype)


def _forward(ops: Operands, opts: Options, at: Layout) -> tuple[jax.Array, ...]:
    x0 = _added(ops, opts)
    x, _ = _norm(x0, ops, opts, at.axes)
    dtype = ops.hidden.dtype
    up = _plus(at.project(x, ops.up_w, ops.down_w), ops.up_b, at.axes)
    clamped_up = _clamp(up, opts.up_limits)
    if opts.skip_gate:
        middle, stored = activation(clamped_up, opts.activation), (up,)
    else:
        gate = _plus(at.project(x, ops.gate_w, ops.down_w), ops.gate_b, at.axes)
        opened = activation(_clamp(gate, opts.gate_limits), opts.activation)
        middle, stored = opened * clamped_up, (gate, up)
    out = at.project(middle.astype(dtype), ops.down_w, ops.hidden, like=ops.hidden)
    out = _plus(out, ops.down_b, at.axes)
    if opts.fused_add == "epilogue":
        out = out + ops.residual.astype(out.dtype)
    out_dtype = opts.out_dtype or dtype
    added = (x0.astype(out_dtype),) if opts.store_fused_add else ()
    return out.astype(out_dtype), *added, *(z.astype(dtype) for z in stored)


def _middle_grads(d_middle, stored, d_stored, opts: Options):
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
    """The cotangents of weights and biases; a product's operands have its dtype."""
    dtype = ops.hidden.dtype
    grads = dict(
        up_w=at.weight_grad(x, d_up.astype(dtype), ops.up_w),
        down_w=at.weight_grad(middle.astype(dtype), dout.astype(dtype), ops.down_w),
    )
    if d_gate is not None:
        grads["gate_w"] = at.weight_grad(x, d_gate.astype(dtype), ops.gate_w)
    for key, dy in dict(gate_b=d_gate, up_b=d_up, down_b=dout).items():
        bias = getattr(ops, key)
        if bias is not None and dy is not None:
            grads[key] = sum_rows(wide(dy), bias, at.axes)
    return grads


def _backward(
    ops: Operands, outs: tuple, cotangents: tuple, opts: Options, at: Layout
) -> tuple[jax.Array, ...]:
    stored_at = 2 if opts.store_fused_add else 1
    stored, d_stored = outs[stored_at:], cotangents[stored_at:]
    dout = jnp.zeros_like(outs[0]) if cotangents[0] is None else cotangents[0]
    dtype = ops.hidden.dtype
    x0 = _added(ops, opts)
    x, stats = _norm(x0, ops, opts, at.axes)
    d_middle = at.project_back(dout.astype(dtype), ops.down_w)
    middle, d_gate, d_up = _middle_grads(d_middle, stored, d_stored, opts)
    grads = _weight_grads(x, middle, d_gate, d_up, dout, ops, at)
    like = ops.hidden
    dx = at.project_back(d_up.astype(dtype), ops.up_w, like=like)
    if d_gate is not None:
        dx = dx + at.project_back(d_gate.astype(dtype), ops.gate_w, like=like)
    dx0, grads["gamma"], grads["beta"] = _norm_bwd(dx, x0, stats, ops, opts, at.axes)
    if opts.store_fused_add and cotangents[1] is not None:
        dx0 = dx0 + cotangents[1].astype(dx0.dtype)
    grads["hidden"] = dx0.astype(dtype)
    if opts.fused_add == "prologue":
        grads["addend"] = dx0.astype(ops.addend.dtype)
    if opts.fused_add == "epilogue":
        grads["residual"] = dout.astype(ops.residual.dtype)
    given = zip(Operands._fields, ops, strict=True)
    return tuple(grads[key] for key, operand in given if operand is not None)


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
    *,
    name: str,
    **config,
) -> tuple[jax.Array, ...]:
    """Returns `out`, the prologue's sum where it is stored, then `gate` and `up`.

    `gate` and `up` are the pre-activations after the bias and before the clamp, in the
    dtype of `hidden`: all that the backward reads. Without a gate there is `up` alone.
    Products accumulate in float32 and only a result is rounded.
    """
    ops = Operands(hidden, gate_w, up_w, down_w, gamma, beta, gate_b, up_b, down_b)
    ops = ops._replace(addend=addend, residual=residual)
    return _forward(ops, Options.of(config), Rows)


def mlp_bwd(
    *operands: Float[Array, "..."] | None, name: str, **config
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands of `mlp_fwd` that are given, in their order.

    Takes those operands, the outputs, and a cotangent or None for each output. The
    pre-activations come from the outputs: the products before them are not repeated.
    """
    return _backward(*parts(operands), Options.of(config), Rows)


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
    *,
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


def parts(operands: tuple) -> tuple[Operands, tuple, tuple]:
    """Splits what a backward leaf takes: operands, outputs, cotangents."""
    count = len(Operands._fields)
    half = count + (len(operands) - count) // 2
    return Operands(*operands[:count]), operands[count:half], operands[half:]
