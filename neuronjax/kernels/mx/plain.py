"""The block-scaled projections straight from their equations, for bisecting a model.

Weights are dequantized as a whole, and the rounding of activations is a difference that
no derivative sees.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.feature import wide
from neuronjax.kernels.mlp import dense, plain
from neuronjax.kernels.mlp.operands import (
    Operands,
    Options,
    live_operands,
    parts,
)
from neuronjax.kernels.mx.formats import E4M3FN, FORMATS, Format, exponent_field
from neuronjax.kernels.mx.layout import (
    BLOCK,
    HIDDEN,
    INTERMEDIATE,
    from_blocks,
    grouped,
    to_blocks,
    unpack_weight,
)
from neuronjax.kernels.mx.quantize import round_blocks


def rounded_plain(x: jax.Array, order: str) -> jax.Array:
    """`x` rounded in its blocks: the value of the code, the derivative of the clip."""
    blocks = rounded_blocks_plain(to_blocks(x, order))
    return from_blocks(blocks, order, x.shape[-1])


def rounded_blocks_plain(blocks: jax.Array) -> jax.Array:
    """The same for values that are laid out in blocks `[..., 4, P, R]`."""
    shape, blocks = blocks.shape, grouped(blocks)
    top = jnp.max(exponent_field(blocks), axis=BLOCK, keepdims=True)
    power = (top - E4M3FN.max_exponent - 127).astype(blocks.dtype)
    limit = lax.stop_gradient(E4M3FN.largest * 2.0**power)
    inside = jnp.abs(blocks) <= limit
    clipped = jnp.where(inside, blocks, lax.stop_gradient(jnp.sign(blocks) * limit))
    codes = round_blocks(lax.stop_gradient(blocks), axes=BLOCK, kind=E4M3FN)
    moved = clipped + lax.stop_gradient(codes - clipped)
    return moved.reshape(shape)


def mx_linear_plain(x, packed, scale, order: str, kind: Format) -> jax.Array:
    """The rounded rows times the whole weight."""
    w = unpack_weight(packed, scale, order, kind, x.shape[-1])
    return jnp.matmul(rounded_plain(x, order), w.astype(accumulator(x.dtype)))


def _before(ops: Operands, opts: Options, kind: Format):
    """The sum in front of the norm, and the pre-activations."""
    x0 = wide(ops.hidden)
    if opts.fused_add == "prologue":
        x0 = x0 + ops.addend.astype(x0.dtype)
    x, stored = plain.normalised(x0, ops, opts), []
    for key, scale in (
        ("gate", ops.gate_up_w_scale[0]),
        ("up", ops.gate_up_w_scale[-1]),
    ):
        if key == "gate" and opts.skip_gate:
            continue
        z = mx_linear_plain(x, getattr(ops, f"{key}_w"), scale, HIDDEN, kind)
        bias = getattr(ops, f"{key}_b")
        if bias is not None:
            blocks = bias.transpose(2, 0, 1).astype(z.dtype)
            z = z + from_blocks(blocks, INTERMEDIATE, z.shape[-1])
        stored.append(z)
    return x0, tuple(stored)


def _after(stored: tuple, ops: Operands, opts: Options, kind: Format) -> jax.Array:
    """The result from the pre-activations, not yet rounded."""
    *gate, up = stored
    act, middle = plain.ACTIVATIONS[opts.activation], jnp.clip(up, *opts.up_limits)
    middle = (
        (act(jnp.clip(gate[0], *opts.gate_limits)) * middle) if gate else act(middle)
    )
    y = mx_linear_plain(middle, ops.down_w, ops.down_w_scale, INTERMEDIATE, kind)
    if ops.down_b is not None:
        y = y + ops.down_b.astype(y.dtype).reshape(-1)
    return y if ops.residual is None else y + ops.residual.astype(y.dtype)


def mx_mlp_plain(*operands: Any, name: str, weight_format: str, **config: Any) -> tuple:
    """What `mx_mlp_fwd` returns."""
    ops, opts, kind = Operands(*operands), Options.of(config), FORMATS[weight_format]
    dtype = ops.hidden.dtype
    out_dtype = opts.out_dtype or dtype
    x0, stored = _before(ops, opts, kind)
    out = _after(stored, ops, opts, kind).astype(out_dtype)
    added = (x0.astype(out_dtype),) if opts.store_fused_add else ()
    return out, *added, *(z.astype(dtype) for z in stored)


def mx_mlp_plain_bwd(
    *operands: Any, name: str, weight_format: str, **config: Any
) -> tuple:
    """What `mx_mlp_bwd` returns, by JAX's derivative of each half."""
    ops, outs, cotangents = parts(operands)
    opts, kind = Options.of(config), FORMATS[weight_format]
    dout, d_added, stored, d_stored = dense.cotangents_of(outs, cotangents, opts)
    live = {key: getattr(ops, key) for key in live_operands(ops)}

    def before(live):
        return _before(ops._replace(**live), opts, kind)

    def after(stored, live):
        return _after(stored, ops._replace(**live), opts, kind)

    (x0, _), pull_before = jax.vjp(before, live)
    out, pull_after = jax.vjp(after, tuple(map(wide, stored)), live)
    d_gates, grads_after = pull_after(dout.astype(out.dtype))
    d_gates = tuple(
        dz if seed is None else dz + seed.astype(dz.dtype)
        for dz, seed in zip(d_gates, d_stored, strict=True)
    )
    d_x0 = jnp.zeros_like(x0) if d_added is None else d_added.astype(x0.dtype)
    (grads_before,) = pull_before((d_x0, d_gates))
    return tuple(grads_before[key] + grads_after[key] for key in live)
