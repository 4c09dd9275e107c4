"""The quantized feed-forward block straight from its equations.

Weights are dequantized, and the unquantized equations run on them; in between, prefill
rounds the gated values. Its derivative is that of the values without the rounding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.dtypes import accumulator, is_differentiable
from neuronjax.kernels.mlp import plain
from neuronjax.kernels.mlp.operands import (
    Operands,
    Options,
    live_operands,
    parts,
    stored_dtype,
)

_E4M3_MAX = 240.0
_FLOOR = 1e-6


def _dequantized(ops: Operands, opts: Options) -> Operands:
    """The operands of the unquantized block."""
    acc = accumulator(stored_dtype(ops, opts))
    gate_up, down = ops.gate_up_w_scale, ops.down_w_scale
    weights = dict(up_w=ops.up_w.astype(acc) * gate_up[-1].astype(acc))
    if not opts.skip_gate:
        weights["gate_w"] = ops.gate_w.astype(acc) * gate_up[0].astype(acc)
    weights["down_w"] = ops.down_w.astype(acc) * down[0].astype(acc)
    return ops._replace(hidden=_hidden(ops, opts, acc), **weights)


def _hidden(ops: Operands, opts: Options, acc: Any) -> jax.Array:
    if is_differentiable(ops.hidden.dtype):
        return ops.hidden
    if opts.quantization == "STATIC":
        scale = lax.stop_gradient(ops.gate_up_in_scale)
        return ops.hidden.astype(acc) * scale.reshape(()).astype(acc)
    width = ops.up_w.shape[0]
    raw = lax.bitcast_convert_type(ops.hidden, jnp.uint8)
    codes = lax.bitcast_convert_type(raw[..., :width], ops.hidden.dtype)
    scale = lax.bitcast_convert_type(raw[..., width:], jnp.float32)[..., None]
    return codes.astype(acc) * scale.astype(acc)


def _requantize(middle: jax.Array, ops: Operands, opts: Options) -> jax.Array:
    if not opts.prefill:
        return plain.clipped(middle, opts).astype(stored_dtype(ops, opts))
    if opts.quantization == "STATIC":
        scale = ops.down_in_scale.reshape(()).astype(middle.dtype)
        z = jnp.clip(middle / scale, -_E4M3_MAX, _E4M3_MAX)
        codes = z.astype(jnp.float8_e4m3).astype(z.dtype)
        return (z + lax.stop_gradient(codes - z)) * scale
    if opts.quant_clipping_bound > 0:
        bound = opts.quant_clipping_bound
        middle = jnp.clip(middle, -bound, bound)
    finite = jnp.isfinite(middle)
    most = float(jnp.finfo(middle.dtype).max)
    clipped = jnp.clip(middle, -most, most)
    known = jnp.where(jnp.isnan(middle), 0, jnp.abs(clipped))
    top = jnp.max(known, axis=-1, keepdims=True)
    scale = jnp.maximum(top / _E4M3_MAX, jnp.asarray(_FLOOR, top.dtype))
    z = jnp.clip(clipped / scale, -_E4M3_MAX, _E4M3_MAX)
    rounded = z.astype(jnp.float8_e4m3).astype(z.dtype) * scale
    through = middle + lax.stop_gradient(rounded - middle)
    return jnp.where(finite, through, rounded)


def quantized_mlp_plain(*operands, name: str, **config) -> tuple[jax.Array, ...]:
    """What the forward leaves of the quantized block return."""
    ops, opts = Operands(*operands), Options.of(config)
    if opts.is_tiled:
        whole, config = plain.untiled(ops), dict(config, is_tiled=False)
        outs = quantized_mlp_plain(*whole, name=name, **config)
        return tuple(plain.retiled_outs(outs, ops, opts))
    wide = _constant_scales(_dequantized(ops, opts))
    x0, stored = plain.before(wide, opts)
    out = plain.after(stored, wide, opts, lambda m: _requantize(m, wide, opts))
    dtype = stored_dtype(ops, opts)
    out_dtype = opts.out_dtype or dtype
    added = (x0.astype(out_dtype),) if opts.store_fused_add else ()
    return out.astype(out_dtype), *added, *(z.astype(dtype) for z in stored)


def _constant_scales(ops: Operands) -> Operands:
    constant = ("gate_w", "up_w", "down_w", "down_in_scale")
    held = {key: getattr(ops, key) for key in constant}
    return ops._replace(
        **{k: None if x is None else lax.stop_gradient(x) for k, x in held.items()}
    )


def quantized_mlp_plain_bwd(*operands, name: str, **config) -> tuple[jax.Array, ...]:
    """What the backward leaves of the quantized block return."""
    (ops, outs, cotangents), opts = parts(operands), Options.of(config)
    if opts.is_tiled:
        rest = [x if x is None else plain.untile(x, -1) for x in (*outs, *cotangents)]
        whole, config = plain.untiled(ops), dict(config, is_tiled=False)
        grads = quantized_mlp_plain_bwd(*whole, *rest, name=name, **config)
        return tuple(plain.retiled_grads(grads, ops))
    wide = _constant_scales(_dequantized(ops, opts))
    grads = plain.grads_of(
        wide, outs, cotangents, opts, lambda m: _requantize(m, wide, opts)
    )
    return tuple(
        grads[key].astype(getattr(ops, key).dtype) for key in live_operands(ops)
    )
