"""The experts of a decode step straight from their equation, for bisecting a model.

Every expert sees every token; what an expert gives is multiplied by how often the token
names it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.expert_mlps.operands import Operands, Options
from neuronjax.kernels.expert_mlps.tiles import retiled, untiled
from neuronjax.kernels.mlp.plain import ACTIVATIONS
from neuronjax.kernels.mx.formats import E4M3FN, FORMATS
from neuronjax.kernels.mx.layout import (
    HIDDEN,
    INTERMEDIATE,
    bias_to_row,
    dequantized,
    from_blocks,
    to_blocks,
    unpack_weight,
)
from neuronjax.kernels.mx.plain import mx_linear_plain, rounded_blocks_plain


def expert_mlps_plain(*operands: Any, name: str, **config: Any) -> tuple[jax.Array]:
    """What `expert_mlps_fwd` returns."""
    ops, opts = Operands(*operands), Options.of(config)
    ops = untiled(ops) if opts.is_tiled else ops
    acc = accumulator(*(x.dtype for x in ops if x is not None and _is_float(x)))
    weight, total = _weights(ops, opts, acc), 0.0
    for e in range(ops.gate_up_w.shape[0]):
        own = {key: None if x is None else x[e] for key, x in _of_experts(ops).items()}
        y = _expert(ops._replace(**own), opts, acc)
        total = total + weight[:, e, None] * y
    out = jnp.asarray(total).astype(opts.out_dtype or ops.hidden.dtype)
    return (retiled(out) if opts.is_tiled else out,)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _of_experts(ops: Operands) -> dict[str, Any]:
    """The operands with an axis of experts."""
    keys = ("gate_up_w", "down_w", "gate_up_b", "down_b", "gate_up_scale", "down_scale")
    return {key: getattr(ops, key) for key in keys}


def _weights(ops: Operands, opts: Options, acc: Any) -> jax.Array:
    """What multiplies each expert's result, `[T, local experts]`."""
    count = ops.gate_up_w.shape[0]
    rank = jnp.int32(0) if ops.rank is None else ops.rank.reshape(())
    expert = rank * count + jnp.arange(count, dtype=jnp.int32)
    times = jnp.ones((1, 1), acc)
    if not opts.all_experts or opts.mask:
        hits = (ops.index[:, :, None] == expert) & (expert >= 0)
        times = hits.sum(1, dtype=jnp.int32).astype(acc)
        times = jnp.minimum(times, 1) if opts.mask else times
    if opts.is_scaled:
        picked = ops.affinities.at[:, expert].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        return times * picked.astype(acc)
    tokens = ops.hidden.shape[-1 if ops.hidden_scale is not None else 0]
    return jnp.broadcast_to(times, (tokens, count))


def _expert(ops: Operands, opts: Options, acc: Any) -> jax.Array:
    """What one expert makes of every token, `[T, H]`."""
    gate, up = (_project(ops, opts, side).astype(acc) for side in (0, 1))
    middle = _gated(gate, up, opts)
    if opts.quantization == "MX":
        y = _down_of_blocks(middle, ops, opts)
    else:
        y = _linear(middle, ops.down_w, ops.down_scale, ops, acc)
    return y if ops.down_b is None else y + ops.down_b.astype(acc)


def _gated(gate: jax.Array, up: jax.Array, opts: Options) -> jax.Array:
    gate = jnp.clip(gate, opts.gate_clamp_lower_limit, opts.gate_clamp_upper_limit)
    up = jnp.clip(up, opts.up_clamp_lower_limit, opts.up_clamp_upper_limit)
    return ACTIVATIONS[opts.activation](gate) * up


def _down_of_blocks(middle: jax.Array, ops: Operands, opts: Options) -> jax.Array:
    """The down projection of rounded blocks, in the order in which blocks lie.

    Places of the last tile that hold no value have what their bias gives: it meets
    weights of zero, and counts in the scale of its block.
    """
    kind, blocks = FORMATS[opts.weight_format], to_blocks(middle, INTERMEDIATE)
    if ops.gate_up_b is not None:
        gate, up = ops.gate_up_b.astype(middle.dtype).transpose(1, 3, 0, 2)
        fill = lax.stop_gradient(_gated(gate, up, opts))
        is_there = to_blocks(jnp.ones_like(middle[0]), INTERMEDIATE)
        blocks = jnp.where(is_there > 0, blocks, fill)
    weight = dequantized(ops.down_w, ops.down_scale, kind).astype(middle.dtype)
    return jnp.einsum("tqpr,qprh->th", rounded_blocks_plain(blocks), weight)


def _project(ops: Operands, opts: Options, side: int) -> jax.Array:
    """The gate (0) or up (1) projection with its bias."""
    w, scale, bias = (
        None if x is None else x[side] if opts.quantization != "MX" else x[:, side]
        for x in (_sides(ops.gate_up_w, opts), ops.gate_up_scale, ops.gate_up_b)
    )
    acc = accumulator(ops.hidden.dtype if _is_float(ops.hidden) else jnp.float32)
    if opts.quantization != "MX":
        y = _linear(ops.hidden, w, scale, ops, acc)
        return y if bias is None else y + bias.astype(y.dtype)
    assert w is not None and scale is not None
    kind = FORMATS[opts.weight_format]
    if ops.hidden_scale is None:
        y = mx_linear_plain(ops.hidden.astype(acc), w, scale, HIDDEN, kind)
    else:
        blocks = dequantized(ops.hidden, ops.hidden_scale, E4M3FN)
        size = 4 * ops.hidden.shape[0] * ops.hidden.shape[1]
        rows = from_blocks(jnp.moveaxis(blocks, -1, 0), HIDDEN, size)
        y = jnp.matmul(rows, unpack_weight(w, scale, HIDDEN, kind, size))
    if bias is None:
        return y
    return y + bias_to_row(bias.astype(y.dtype), y.shape[-1])


def _sides(w: jax.Array, opts: Options) -> jax.Array:
    """Gate and up of one expert: `[2, H, I]`; packed ones as they are."""
    return w if opts.quantization == "MX" else jnp.moveaxis(w, 1, 0)


def _linear(x: jax.Array, w: Any, scale: Any, ops: Operands, acc: Any) -> jax.Array:
    """`(x @ w) * scale` in the dtype that holds hidden and weights."""
    dtype = promoted(ops.hidden.dtype, ops.gate_up_w.dtype, ops.down_w.dtype)
    y = jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=acc)
    return y if scale is None else y * scale.astype(acc)
