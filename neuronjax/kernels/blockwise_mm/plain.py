"""The blockwise experts straight from their equations, all blocks at once.

Weights are gathered by block, `[N, H, 2, I]`: for bisecting a model, not for its speed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.blockwise_mm.operands import (
    Limits,
    Operands,
    Option,
    Options,
    factor_dtype,
    sum_dtype,
)
from neuronjax.kernels.blockwise_mm.swiglu import as_stored, saturated
from neuronjax.kernels.mx.formats import FORMATS
from neuronjax.kernels.mx.layout import (
    HIDDEN,
    INTERMEDIATE,
    from_blocks,
    to_blocks,
    unpack_weight,
)
from neuronjax.kernels.mx.plain import rounded_blocks_plain, rounded_plain

ACTIVATIONS = {
    "SiLU": jax.nn.silu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "GELU_Tanh_Approx": lambda x: jax.nn.gelu(x, approximate=True),
    "Swish": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class Blocks(NamedTuple):
    """What each block reads: tokens and rows by slot, weights by block.

    Attributes:
        token: `[N, B]`; `R` where a slot has none.
        x: `[N, B, H]`.
        affinity: `[N, B, 1]`.
        gate_up: `[N, H, 2, I]`, dequantized.
        down: `[N, I, H]`, dequantized.
        gate_up_b: `[N, 2, I]`, or None.
        down_b: `[N, H]`, or None.
        fill: what fills the blocks of gated values, `[N, 4, Ip, tiles]`, or None.
    """

    token: jax.Array
    x: jax.Array
    affinity: jax.Array
    gate_up: jax.Array
    down: jax.Array
    gate_up_b: Option
    down_b: Option
    fill: Option


def _tokens(ops: Operands, opts: Options) -> jax.Array:
    """The row of each slot; `R` for none."""
    rows, count = ops.hidden.shape[0], ops.gate_up_w.shape[0]
    token = ops.token_id.reshape(-1, opts.block_size)
    expert = ops.block_expert.reshape(-1, 1)
    is_row = (0 <= token) & (token < rows - (not opts.skip_token))
    is_row &= (0 <= expert) & (expert < count)
    if ops.conditions is not None:
        blocks = len(token)
        is_open = jnp.cumprod(ops.conditions.reshape(-1)[:blocks] != 0) > 0
        is_open |= jnp.arange(blocks) < opts.num_static
        is_row &= is_open[:, None]
    token = jnp.where(is_row, token, rows)
    if opts.accumulate:
        return token
    flat = token.reshape(-1)
    later = jnp.triu(flat[:, None] == flat[None, :], 1).any(1)
    return jnp.where(later, rows, flat).reshape(token.shape)


def _blocks(ops: Operands, opts: Options) -> Blocks:
    acc, rows = sum_dtype(ops), ops.hidden.shape[0]
    token, expert = _tokens(ops, opts), ops.block_expert.reshape(-1)
    table = ops.affinity.reshape(rows, ops.gate_up_w.shape[0]).astype(acc)
    affinity = table.at[token, expert[:, None]].get(mode="fill", fill_value=0)

    gate_up, down = _weights(ops, opts, expert, acc)
    gate_up_b, fill = _biases(ops, opts, expert, acc)
    return Blocks(
        token,
        ops.hidden.at[token].get(mode="fill", fill_value=0).astype(acc),
        affinity[..., None],
        gate_up,
        down,
        gate_up_b,
        None if ops.down_b is None else ops.down_b[expert].astype(acc),
        fill,
    )


def _weights(ops: Operands, opts: Options, expert: jax.Array, acc: Any) -> tuple:
    """Both weights by block, dequantized."""
    if opts.quantization == "MX":
        kind, d_ff = FORMATS[opts.weight_format], ops.gate_up_w.shape[-1]
        wide = functools.partial(unpack_weight, kind=kind)
        gate_up = jax.vmap(
            jax.vmap(lambda w, s: wide(w, s, order=HIDDEN, size=ops.hidden.shape[1]), 1)
        )(ops.gate_up_w[expert], ops.gate_up_scale[expert])
        down = jax.vmap(lambda w, s: wide(w, s, order=INTERMEDIATE, size=d_ff))(
            ops.down_w[expert], ops.down_scale[expert]
        )
        return gate_up.swapaxes(1, 2).astype(acc), down.astype(acc)
    dtype = factor_dtype(ops, opts)
    gate_up, down = (
        w[expert].astype(dtype).astype(acc) for w in (ops.gate_up_w, ops.down_w)
    )
    if ops.gate_up_scale is None:
        return gate_up, down
    scales = ops.gate_up_scale, ops.down_scale
    columns, rows = (x[expert if x.shape[0] > 1 else expert * 0] for x in scales)
    columns = columns.reshape(-1, 1, *gate_up.shape[2:])
    return gate_up * columns.astype(acc), down * rows.astype(acc)


def _biases(ops: Operands, opts: Options, expert: jax.Array, acc: Any) -> tuple:
    """The bias of gate and up by block, and what fills the blocks of gated values."""
    if ops.gate_up_b is None:
        return None, None
    bias = ops.gate_up_b[expert].astype(acc)
    if opts.quantization != "MX":
        return bias, None
    places = bias.transpose(0, 2, 4, 1, 3)  # [N, 2, 4, Ip, tiles]
    fill = ACTIVATIONS[opts.activation](_clip(places[:, 0], opts.gate_limits))
    fill = fill * _clip(places[:, 1], opts.up_limits)
    return from_blocks(places, INTERMEDIATE, ops.gate_up_w.shape[-1]), fill


def _rounding(blocks: Blocks, ops: Operands, opts: Options) -> tuple:
    """How rows and gated values are rounded before they meet a weight."""
    dtype = factor_dtype(ops, opts)
    if opts.quantization != "MX":
        return (lambda x: x.astype(dtype).astype(x.dtype),) * 2
    size = ops.gate_up_w.shape[-1]

    def gated(m: jax.Array) -> jax.Array:
        tiled = to_blocks(m, INTERMEDIATE)
        if blocks.fill is not None:
            is_there = to_blocks(jnp.ones(size, bool), INTERMEDIATE)
            tiled = jnp.where(is_there, tiled, lax.stop_gradient(blocks.fill)[:, None])
        return from_blocks(rounded_blocks_plain(tiled), INTERMEDIATE, size)

    return lambda x: rounded_plain(x, HIDDEN), gated


def _exchanged(x: jax.Array, opts: Options, shard: str) -> jax.Array:
    return lax.psum(x, opts.axis) if opts.shard == shard else x


def _clip(x: jax.Array, limits: Limits) -> jax.Array:
    return jnp.clip(x, *limits)


def _activations(blocks: Blocks, ops: Operands, opts: Options):
    """`gate_up` after the clamp, `[N, B, 2, I]`, and `down` before the affinity."""
    round_x, round_m = _rounding(blocks, ops, opts)
    x = blocks.x * blocks.affinity if opts.scaling == "PRE_SCALE" else blocks.x
    z = jnp.einsum("nbh,nhji->nbji", round_x(x), blocks.gate_up)
    z = _exchanged(z, opts, "hidden")
    if blocks.gate_up_b is not None:
        z = z + blocks.gate_up_b[:, None]
    gate, up = _clip(z[:, :, 0], opts.gate_limits), _clip(z[:, :, 1], opts.up_limits)
    m = ACTIVATIONS[opts.activation](gate) * up
    m = m * blocks.affinity if opts.on_intermediate else m
    y = jnp.einsum("nbi,nih->nbh", round_m(m), blocks.down)
    y = _exchanged(y, opts, "intermediate")
    if blocks.down_b is not None:
        y = y + blocks.down_b[:, None]
    return jnp.stack([gate, up], 2), y


def blockwise_mm_plain(*operands: Any, name: str, **config: Any) -> tuple:
    """What `blockwise_mm_fwd` returns."""
    ops, opts = Operands(*operands), Options.of(config)
    blocks = _blocks(ops, opts)
    gate_up, y = _activations(blocks, ops, opts)
    is_after = opts.scaling == "POST_SCALE" and not opts.on_intermediate
    share = y * blocks.affinity if is_after else y
    out = jnp.zeros(ops.hidden.shape, share.dtype)
    out = out.at[blocks.token].add(share, mode="drop")
    kept = dict(gate_up=gate_up.transpose(0, 2, 3, 1), down=y)
    dtype, is_token = ops.hidden.dtype, blocks.token < ops.hidden.shape[0]
    shown = dict(gate_up=is_token[:, None, None], down=is_token[:, :, None])

    def stored(key: str) -> jax.Array:
        constant = lax.stop_gradient(kept[key])
        x = saturated(jnp.where(shown[key], kept[key], constant), dtype)
        return jnp.where(is_token.any(1).reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    return out.astype(dtype), *map(stored, opts.stored)


def _slopes(dm: jax.Array, gate_up: jax.Array, opts: Options) -> jax.Array:
    """The cotangent of gate and up after the clamp, from that of their product."""
    wide = gate_up.astype(dm.dtype)
    act = ACTIVATIONS[opts.activation]
    opened, push = jax.jvp(act, (wide[:, :, 0],), (jnp.ones_like(dm),))
    return jnp.stack([dm * wide[:, :, 1] * push, dm * opened], 2)


def _within(dz: jax.Array, gate_up: jax.Array, opts: Options) -> jax.Array:
    """The cotangent before the clamp."""
    for at, (low, high) in enumerate((opts.gate_limits, opts.up_limits)):
        z = gate_up[:, :, at]
        outside = jnp.zeros(z.shape, bool)
        outside |= False if low is None else z <= as_stored(low, z.dtype)
        outside |= False if high is None else z >= as_stored(high, z.dtype)
        dz = dz.at[:, :, at].set(jnp.where(outside, 0, dz[:, :, at]))
    return dz


def blockwise_mm_bwd_plain(*operands: Any, name: str, grads: tuple, **config) -> tuple:
    """What `blockwise_mm_bwd` returns."""
    count = len(Operands._fields)
    ops, opts = Operands(*operands[:count]), Options.of(config)
    gate_up, down, d_out, d_gate_up, d_down = operands[count:]
    blocks = _blocks(ops, opts)
    if gate_up is None:
        gate_up, down = (
            saturated(z, ops.hidden.dtype) for z in _activations(blocks, ops, opts)
        )
    else:
        gate_up = gate_up.transpose(0, 3, 1, 2)
    if d_gate_up is not None:
        d_gate_up = d_gate_up.transpose(0, 3, 1, 2)
    d = d_out.at[blocks.token].get(mode="fill", fill_value=0).astype(blocks.x.dtype)
    stored = gate_up, down, d_gate_up, d_down
    found = _gradients(blocks, d, stored, ops, opts)
    return tuple(_gathered(found, blocks, ops, opts, key) for key in grads)


def _gradients(
    blocks: Blocks, d: jax.Array, stored: tuple, ops: Operands, opts: Options
) -> dict:
    """By block: the gradients of rows, affinities and weights.

    The factors of products are rounded as in the forward.
    """
    dtype = d.dtype if opts.quantization == "MX" else factor_dtype(ops, opts)
    round_x, round_m = _rounding(blocks, ops, opts)

    def product(spec: str, *factors: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *(x.astype(dtype).astype(d.dtype) for x in factors))

    gate_up, down, d_gate_up, d_down = stored
    after = opts.scaling == "POST_SCALE" and not opts.on_intermediate
    before = opts.scaling == "PRE_SCALE"
    is_token = (blocks.token < ops.hidden.shape[0])[..., None, None]
    known = jnp.where(is_token, gate_up, 0)
    a, wide = blocks.affinity, known.astype(d.dtype)
    dy = d * a if after else d
    if d_down is not None:
        dy = dy + jnp.where(is_token[..., 0], d_down, 0).astype(dy.dtype)
    dm = _exchanged(product("nbh,nih->nbi", dy, blocks.down), opts, "hidden")
    da = jnp.zeros(a.shape[:2], d.dtype)
    if after:
        da = _exchanged((d * down.astype(d.dtype)).sum(2), opts, "hidden")
    fed = m = ACTIVATIONS[opts.activation](wide[:, :, 0]) * wide[:, :, 1]
    if opts.on_intermediate:
        fed = m * a
    dm = _through(round_m, fed, dm, opts)
    if opts.on_intermediate:
        da = _exchanged((dm * m).sum(2), opts, "intermediate")
        dm = dm * a
    dz = _slopes(dm, known, opts)
    if d_gate_up is not None:
        dz = dz + jnp.where(is_token, d_gate_up, 0).astype(dz.dtype)
    dz = _within(dz, known, opts)
    x = blocks.x * a if before else blocks.x
    dx = product("nbji,nhji->nbh", dz, blocks.gate_up)
    dx = _through(round_x, x, dx, opts)
    if before:
        da = (dx * blocks.x).sum(2)
        da = da if opts.shard is None else lax.psum(da, opts.axis)
        dx = dx * a
    own = _own_columns(dy, x, opts)
    return dict(
        hidden=_exchanged(dx, opts, "intermediate"),
        affinity=da,
        gate_up_w=product("nbh,nbji->nhji", x, dz),
        down_w=product("nbi,nbh->nih", fed, own),
        gate_up_b=dz.sum(1),
        down_b=dy.sum(1),
    )


def _own_columns(dy: jax.Array, x: jax.Array, opts: Options) -> jax.Array:
    if opts.shard != "columns":
        return dy
    width = x.shape[2]
    first = lax.axis_index(opts.axis) * width
    return lax.dynamic_slice_in_dim(dy, first, width, axis=2)


def _through(
    rounding: Callable, x: jax.Array, dx: jax.Array, opts: Options
) -> jax.Array:
    """A cotangent of rounded values as one of the values; a cast passes all."""
    return jax.vjp(rounding, x)[1](dx)[0] if opts.quantization == "MX" else dx


def _gathered(found: dict, blocks: Blocks, ops: Operands, opts: Options, key: str):
    """A gradient by block, summed where its operand's parts are."""
    grad, expert = found[key], ops.block_expert.reshape(-1)
    operand, count = getattr(ops, key), ops.gate_up_w.shape[0]
    if key == "hidden":
        total = jnp.zeros(operand.shape, grad.dtype)
        total = total.at[blocks.token].add(grad, mode="drop")
    elif key == "affinity":
        total = jnp.zeros((ops.hidden.shape[0], count), grad.dtype)
        total = total.at[blocks.token, expert[:, None]].add(grad, mode="drop")
    else:
        if key == "gate_up_b" and opts.quantization == "MX":
            grad = to_blocks(grad, INTERMEDIATE).transpose(0, 3, 1, 4, 2)
        total = jnp.zeros((count, *grad.shape[1:]), grad.dtype)
        total = total.at[expert].add(grad, mode="drop")
    return (
        total if operand is None else total.reshape(operand.shape).astype(operand.dtype)
    )
