"""The feed-forward block with fp8 weights: scales by the row, or one for a tensor.

Decode (`prefill` False) quantizes no activation:

    proj(x) = (x @ w) * s_w

where `x`, the normed rows and the gated values, may be clipped to a bound.

Prefill multiplies fp8 codes. `hidden` may come quantized, as codes with a float32 scale
`a` behind each row (ROW) or with one scale for all (STATIC); the gated values `m` are
quantized again in front of the last product:

    ROW     x = codes * a      s = max(max |m| / 240, 1e-6), |m| clipped to the bound
            y = (fp8(m / s) @ w) * s_w * s
    STATIC  x = codes * s_h    y = (fp8(clip(m / s_m, -240, 240)) @ w) * (s_w * s_m)

with `s_h` = `gate_up_in_scale` and `s_m` = `down_in_scale`.
Codes are bfloat16 values: their products are exact. Differentiation: weights, scales
and codes are constants, a rounding passes a cotangent on unchanged, a clip (to a
bound; STATIC to 240) passes none from outside.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.dtypes import accumulator, is_differentiable
from neuronjax.kernels.feature import per_feature, wide
from neuronjax.kernels.mlp import dense
from neuronjax.kernels.mlp.operands import (
    Operands,
    Option,
    Options,
    live_operands,
    parts,
    rows_bwd,
    rows_fwd,
    stored_dtype,
)
from neuronjax.kernels.quantization.fp8 import unpack_rows
from neuronjax.kernels.quantization.linear import (
    is_explicit,
    scaled_linear_bwd,
    scaled_linear_fwd,
)
from neuronjax.kernels.quantization.straight_through import (
    STATIC_LIMIT,
    requantize_rows,
    static_codes,
)


class ScaledRows(dense.Rows):
    """Features on the last axis; a weight is `[in, out]`, its scale a row or one."""

    @staticmethod
    def scale(rows: jax.Array, index: int) -> jax.Array:
        row = lax.stop_gradient(rows[index])
        return row[0] if row.shape[0] == 1 else row

    @staticmethod
    def scaled(x, w, scale, tile, dtype, like=None) -> jax.Array:
        if is_explicit(x, w):
            y = dense.Rows.project(x, lax.stop_gradient(w), tile, like=like)
            return y * scale.astype(y.dtype)
        return scaled_linear_fwd(x, w, scale, dtype=dtype)

    @staticmethod
    def scaled_back(dy, w, scale, dtype, like=None) -> jax.Array:
        if is_explicit(dy, w):
            dy = wide(dy) * scale
            return dense.Rows.project_back(dy.astype(dtype), w, like=like)
        return scaled_linear_bwd(dy, w, scale, dtype=dtype)


class ScaledTiles(dense.Tiles):
    """Features on the two leading axes. A tile is small: it is widened as a whole."""

    @staticmethod
    def scale(rows: jax.Array, index: int) -> jax.Array:
        return lax.stop_gradient(rows[..., index])

    @staticmethod
    def scaled(x, w, scale, tile, dtype, like=None) -> jax.Array:
        y = dense.Tiles.project(x, lax.stop_gradient(w), tile, like=like)
        return y * per_feature(scale, y, dense.TILE).astype(y.dtype)

    @staticmethod
    def scaled_back(dy, w, scale, dtype, like=None) -> jax.Array:
        dy = wide(dy)
        dy = dy * per_feature(scale, dy, dense.TILE).astype(dy.dtype)
        return dense.Tiles.project_back(dy.astype(dtype), w, like=like)


Layout = type[ScaledRows] | type[ScaledTiles]


def _w_scales(ops: Operands, opts: Options, at: Layout) -> dict[str, jax.Array]:
    rows = ops.gate_up_w_scale
    found = {"down_w": at.scale(ops.down_w_scale, 0)}
    if opts.skip_gate:
        return found | {"up_w": at.scale(rows, 0)}
    return found | {"gate_w": at.scale(rows, 0), "up_w": at.scale(rows, 1)}


def _one(scale: jax.Array) -> jax.Array:
    return lax.stop_gradient(scale.reshape(()))


def _input(ops: Operands, opts: Options, at: Layout) -> tuple:
    """`(x, scale, x0, statistics)`: the factors of the first products, their scale."""
    if is_differentiable(ops.hidden.dtype):
        x0 = dense.prologue_sum(ops, opts)
        x, stats = dense.norm_fwd(x0, ops, opts, at.axes)
        return clipped(x, opts.activation_clipping_bound), None, x0, stats
    if opts.quantization == "ROW":
        return *unpack_rows(ops.hidden), ops.hidden, ()
    return ops.hidden, _one(ops.gate_up_in_scale), ops.hidden, ()


def clipped(x: jax.Array, bound: float) -> jax.Array:
    """Magnitudes of at most `bound`; 0 bounds none."""
    if bound == 0:
        return x
    edge = jnp.asarray(bound, x.dtype)
    return lax.clamp(-edge, x, edge)


def _down(middle: jax.Array, scale, ops: Operands, opts: Options, at: Layout):
    """The last product of the gated values, quantized first in prefill."""
    dtype, tail = stored_dtype(ops, opts), (ops.hidden,)
    if not opts.prefill:
        x = clipped(middle, opts.activation_clipping_bound).astype(dtype)
        return at.scaled(x, ops.down_w, scale, *tail, dtype, like=ops.hidden)
    if opts.quantization == "ROW":
        bound = opts.quant_clipping_bound
        codes, after = requantize_rows(middle, bound=bound, axis=at.axes)
    else:
        after = _one(ops.down_in_scale).astype(middle.dtype)
        codes = static_codes(middle, after)
    exact = jnp.dtype(jnp.bfloat16 if codes.dtype == jnp.float32 else codes.dtype)
    y = at.scaled(codes, ops.down_w, scale, *tail, exact, like=ops.hidden)
    return y * after.astype(y.dtype)


def _forward(ops: Operands, opts: Options, at: Layout) -> tuple[jax.Array, ...]:
    x, x_scale, x0, _ = _input(ops, opts, at)
    scales, dtype = _w_scales(ops, opts, at), stored_dtype(ops, opts)

    def project(key: str) -> jax.Array:
        y = at.scaled(x, getattr(ops, key), scales[key], ops.down_w, dtype)
        y = y.astype(accumulator(dtype))
        return y if x_scale is None else y * x_scale.astype(y.dtype)

    stored = dense.pre_activations(project, ops, opts, at)
    y = _down(dense.middle_of(stored, opts), scales["down_w"], ops, opts, at)
    return dense.finished(y, x0, stored, ops, opts, at)


def _where_unclipped(d_middle, stored, ops: Operands, opts: Options) -> jax.Array:
    """The cotangent of the gated values from that of the quantized or clipped ones."""
    is_static = opts.prefill and opts.quantization == "STATIC"
    decode, prefill = opts.activation_clipping_bound, opts.quant_clipping_bound
    bound = prefill if opts.prefill else decode
    if not is_static and bound == 0:
        return d_middle
    middle = dense.middle_of(tuple(map(wide, stored)), opts)
    edge = jnp.asarray(bound, middle.dtype)
    if is_static:
        edge = STATIC_LIMIT * _one(ops.down_in_scale).astype(middle.dtype)
    return jnp.where(jnp.abs(middle) < edge, d_middle, 0)


def _backward(
    ops: Operands, outs: tuple, cotangents: tuple, opts: Options, at: Layout
) -> tuple[jax.Array, ...]:
    dout, d_added, stored, d_stored = dense.cotangents_of(outs, cotangents, opts)
    dtype, scales = stored_dtype(ops, opts), _w_scales(ops, opts, at)
    d_middle = at.scaled_back(dout, ops.down_w, scales["down_w"], dtype)
    d_middle = _where_unclipped(d_middle, stored, ops, opts)
    _, d_gate, d_up = dense.middle_grads(d_middle, stored, d_stored, opts)
    grads = dense.bias_grads(d_gate, d_up, dout, ops, at)
    if is_differentiable(ops.hidden.dtype):
        x, _, *norm = _input(ops, opts, at)
        dx = _dx(d_gate, d_up, scales, dtype, ops, at)
        if opts.activation_clipping_bound > 0:
            edge = jnp.asarray(opts.activation_clipping_bound, x.dtype)
            dx = jnp.where(jnp.abs(x) < edge, dx, 0)
        grads |= dense.input_grads(dx, norm, d_added, ops, opts, at)
    return tuple(grads[key] for key in live_operands(ops))


def _dx(d_gate, d_up, scales, dtype, ops: Operands, at: Layout) -> jax.Array:
    like = ops.hidden
    dx = at.scaled_back(d_up, ops.up_w, scales["up_w"], dtype, like)
    if d_gate is None:
        return dx
    return dx + at.scaled_back(d_gate, ops.gate_w, scales["gate_w"], dtype, like)


def quantized_mlp_fwd(
    *operands: Option, name: str, **config: Any
) -> tuple[jax.Array, ...]:
    """What `mlp_fwd` returns, from the operands of `Operands`.

    `gate_up_w_scale` is `[2, d_ff]` or `[2, 1]`, a row each for gate and up (without a
    gate one row), `down_w_scale` `[1, d_model]` or `[1, 1]`; the scales of activations
    are `[1, 1]`. An fp8 `hidden` is `[*batch, d_model]`, for ROW
    `[*batch, d_model + 4]`; the pre-activations then have the dtype of the result.
    """
    ops, opts = Operands(*operands), Options.of(config)
    return rows_fwd(_forward, ops, opts, ScaledRows)


def quantized_mlp_bwd(
    *operands: Option, name: str, **config: Any
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands that have one, as `mlp_bwd` gives them."""
    return rows_bwd(_backward, operands, Options.of(config), ScaledRows)


def quantized_mlp_tiled_fwd(
    *operands: Option, name: str, **config: Any
) -> tuple[jax.Array, ...]:
    """`quantized_mlp_fwd` on tiles; a scale is a tile, its rows on the last axis."""
    return _forward(Operands(*operands), Options.of(config), ScaledTiles)


def quantized_mlp_tiled_bwd(
    *operands: Option, name: str, **config: Any
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands of `quantized_mlp_tiled_fwd` that have one."""
    return _backward(*parts(operands), Options.of(config), ScaledTiles)
