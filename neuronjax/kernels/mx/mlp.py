"""The feed-forward block with block-scaled weights, forwards and backwards.

    x  = round(norm(hidden))          float8_e4m3fn blocks of swizzled columns
    g  = clamp(x @ gate_w + gate_b);  u = clamp(x @ up_w + up_b)
    y  = round(act(g) * u) @ down_w + down_b

What is rounded to blocks is float32: the norm's result and the gated values are not
rounded to the dtype of `hidden` before. Packed weights and scales are constants; a
rounding passes a cotangent straight through, zero where a value saturates.
"""

from typing import Any

import jax

from neuronjax.kernels.feature import LAST, wide
from neuronjax.kernels.mlp import dense
from neuronjax.kernels.mlp.dense import Rows
from neuronjax.kernels.mlp.operands import (
    Operands,
    Option,
    Options,
    live_operands,
    parts,
)
from neuronjax.kernels.mx.formats import FORMATS, Format
from neuronjax.kernels.mx.layout import (
    HIDDEN,
    INTERMEDIATE,
    bias_to_row,
    row_to_bias,
)
from neuronjax.kernels.mx.linear import (
    mx_linear_bwd,
    mx_linear_fwd,
    rounded,
    rounded_bwd,
)
from neuronjax.kernels.mx.product import product_bwd, product_fwd

BIASES = ("gate_b", "up_b")


def mx_mlp_fwd(
    *operands: Option, name: str, weight_format: str, **config: Any
) -> tuple[jax.Array, ...]:
    """What `mlp_fwd` returns, from the operands of `Operands`.

    Weights are containers, `[128, H/512, I]` and `[Ip, tiles, H]`; `gate_up_w_scale` is
    `[2, 16, H/512, I]` (without a gate `[1, ...]`), `down_w_scale` `[Ip/8, tiles, H]`,
    both uint8. The biases of gate and up are `[Ip, tiles, 4]`. `hidden`, `gamma` and
    `beta` have swizzled columns; `gate` and `up` come in logical order, `[*batch, I]`.
    """
    ops, opts = _in_rows(Operands(*operands)), Options.of(config)
    kind, scales = FORMATS[weight_format], _scales(ops)
    x0, x, _ = _input(ops, opts)
    left = rounded(x, HIDDEN)

    def project(key: str) -> jax.Array:
        return product_fwd(left, getattr(ops, key), scales[key], kind=kind)

    stored = dense.pre_activations(project, ops, opts, Rows)
    y = _down(dense.middle_of(stored, opts), ops, kind)
    return dense.finished(y, x0, stored, ops, opts, Rows)


def mx_mlp_bwd(
    *operands: Option, name: str, weight_format: str, **config: Any
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands that have one, as `mlp_bwd` gives them."""
    given, outs, cotangents = parts(operands)
    ops, opts, kind = _in_rows(given), Options.of(config), FORMATS[weight_format]
    dout, d_added, stored, d_stored = dense.cotangents_of(outs, cotangents, opts)
    middle = dense.middle_of(tuple(map(wide, stored)), opts)
    down = ops.down_w, ops.down_w_scale
    d_middle = mx_linear_bwd(dout, middle, *down, kind=kind, order=INTERMEDIATE)
    _, d_gate, d_up = dense.middle_grads(d_middle, stored, d_stored, opts)
    x0, x, stats = _input(ops, opts)
    dx = rounded_bwd(_d_left(d_gate, d_up, ops, kind), x, HIDDEN)
    grads = dense.bias_grads(d_gate, d_up, dout, ops, Rows)
    grads |= dense.input_grads(dx, (x0, stats), d_added, ops, opts, Rows)
    for key in BIASES:
        if key in grads:
            grads[key] = row_to_bias(grads[key][0])
    return tuple(grads[key] for key in live_operands(given))


def _in_rows(ops: Operands) -> Operands:
    """The operands with the biases of gate and up as rows `[1, I]`."""
    size, found = ops.up_w.shape[-1], {}
    for key in BIASES:
        bias = getattr(ops, key)
        found[key] = None if bias is None else bias_to_row(bias, size)[None]
    return ops._replace(**found)


def _scales(ops: Operands) -> dict[str, jax.Array]:
    rows = ops.gate_up_w_scale
    return {"gate_w": rows[0], "up_w": rows[-1]}


def _input(ops: Operands, opts: Options):
    """The norm's input, its result in wide precision, and its statistics."""
    x0 = dense.prologue_sum(ops, opts)
    unrounded = ops._replace(hidden=wide(ops.hidden))
    x, stats = dense.norm_fwd(wide(x0), unrounded, opts, LAST)
    return x0, x, stats


def _down(middle: jax.Array, ops: Operands, kind: Format) -> jax.Array:
    weight = ops.down_w, ops.down_w_scale
    return mx_linear_fwd(middle, *weight, kind=kind, order=INTERMEDIATE)


def _d_left(d_gate, d_up, ops: Operands, kind: Format) -> jax.Array:
    """The cotangent of the rounded activations."""
    scales = _scales(ops)
    total = product_bwd(d_up, ops.up_w, scales["up_w"], kind=kind)
    if d_gate is None:
        return total
    return total + product_bwd(d_gate, ops.gate_w, scales["gate_w"], kind=kind)
