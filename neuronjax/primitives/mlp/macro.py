"""The macros `MLP`, `TiledNativeKernelMLP` and `MLPBwd`: what emits and computes them.

Outputs carry the checkpoint names `mlp_out`, `mlp_added` (where the prologue's sum is
stored), `mlp_gate` and `mlp_up`: the pre-activations after the bias and before the
clamp, which are all that `MLPBwd` reads of the forward.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.mlp import dense, plain, quantized, quantized_plain
from neuronjax.kernels.mlp.operands import SCALES, Operands, live_operands
from neuronjax.kernels.mx import mlp as mx
from neuronjax.kernels.mx import plain as mx_plain
from neuronjax.primitives.macro import MacroFamily
from neuronjax.primitives.mlp.examples import VARIANTS, example
from neuronjax.primitives.mlp.facts import LIMITS, norm_word
from neuronjax.primitives.mlp.names import BACKWARD, TILED, UNTILED
from neuronjax.primitives.options import ActFnType, member
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

Operand = Array | MemrefTile


class Forms(NamedTuple):
    """The leaves of one kind of weight."""

    forward: Callable
    tiled_forward: Callable
    backward: Callable
    tiled_backward: Callable
    plain: Callable
    plain_backward: Callable


_DENSE = Forms(
    dense.mlp_fwd,
    dense.mlp_tiled_fwd,
    dense.mlp_bwd,
    dense.mlp_tiled_bwd,
    plain.mlp_plain,
    plain.mlp_plain_bwd,
)
_SCALED = Forms(
    quantized.quantized_mlp_fwd,
    quantized.quantized_mlp_tiled_fwd,
    quantized.quantized_mlp_bwd,
    quantized.quantized_mlp_tiled_bwd,
    quantized_plain.quantized_mlp_plain,
    quantized_plain.quantized_mlp_plain_bwd,
)
_BLOCKS = Forms(
    mx.mx_mlp_fwd,
    mx.mx_mlp_fwd,  # no call has tiles: the rules refuse them
    mx.mx_mlp_bwd,
    mx.mx_mlp_bwd,
    mx_plain.mx_mlp_plain,
    mx_plain.mx_mlp_plain_bwd,
)
# By the config's `quantization`.
FORMS = {"NONE": _DENSE, "ROW": _SCALED, "STATIC": _SCALED, "MX": _BLOCKS}


def emit(emitter: str, call: SimpleNamespace, fused_add: str, **added: Any) -> tuple:
    """Picks the NAME and binds the macro; tiles come back as tiles."""
    gate_w = None if call.skip_gate else call.gate_w
    vectors = call.gamma, call.beta, call.gate_b, call.up_b, call.down_b
    weights = gate_w, call.up_w, call.down_w
    scales = {key: getattr(call, key, None) for key in SCALES}
    ops = Operands(call.hidden, *weights, *vectors, **added, **scales)
    ios = (*ops, getattr(call, "mlp_out", None))
    is_tiled = is_all_io_type_memref_tile(ios, emitter)
    limits = {key: getattr(call, key) for key in LIMITS}
    config = dict(
        activation=member(ActFnType, call.activation).name,
        norm=norm_word(call.norm),
        eps=float(call.eps),
        skip_gate=bool(call.skip_gate),
        fused_add=fused_add,
        store_fused_add=bool(getattr(call, "store_fused_add", False)),
        out_dtype=None if call.out_dtype is None else jnp.dtype(call.out_dtype).name,
        is_tiled=is_tiled,
        **{key: None if v is None else float(v) for key, v in limits.items()},
        **getattr(call, "quantized", {}),
        **call.hints,
    )
    results = 2 if config["store_fused_add"] else 1
    if not is_tiled:
        return mlp_family(*ops, name=UNTILED, **config)[:results]
    tiles = ops._asdict()
    require_partitions(emitter, **tiles)
    data = [getattr(tile, "data", None) for tile in ops]
    outs = mlp_family(*data, name=TILED, **config)[:results]
    outs = tuple(MemrefTile(out, call.hidden.axis) for out in outs)
    require_fit(emitter, **tiles, **dict(zip(("out", "added"), outs, strict=False)))
    return outs


def _forms(config) -> Forms:
    return FORMS[config.get("quantization", "NONE")]


def _leaf(*operands, name, is_tiled, **config):
    forms = _forms(config)
    leaf = forms.tiled_forward if is_tiled else forms.forward
    return leaf(*operands, name=name, **config)


def _backward_leaf(*operands, name, is_tiled, given, **config):
    forms = _forms(config)
    leaf = forms.tiled_backward if is_tiled else forms.backward
    return leaf(*operands, name=name, **config)


def _plain(*operands, name, **config):
    return _forms(config).plain(*operands, name=name, **config)


def _plain_backward(*operands, name, given, **config):
    return _forms(config).plain_backward(*operands, name=name, **config)


def _outputs(*, skip_gate, store_fused_add, **_):
    """The names of the outputs that a config gives."""
    added = ("added",) if store_fused_add else ()
    return ("out", *added, *(() if skip_gate else ("gate",)), "up")


def _gradients(*, given, **_):
    return tuple(f"d_{operand}" for operand in given)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    ops = Operands(*operands)
    given = live_operands(ops)
    grads = mlp_backward(
        *operands, *outs, *cotangents, name=BACKWARD, given=given, **config
    )
    found = dict(zip(given, grads, strict=True))
    # Scales are constants, though they are floats.
    scales = {key: getattr(ops, key) for key in SCALES}
    found |= {k: jnp.zeros_like(x) for k, x in scales.items() if x is not None}
    return tuple(found.get(key) for key in Operands._fields)


mlp_backward = MacroFamily(
    "mlp_bwd",
    (BACKWARD,),
    _backward_leaf,
    plain=_plain_backward,
    outputs=_gradients,
    example=example,
)
mlp_family = MacroFamily(
    "mlp",
    (UNTILED, TILED),
    _leaf,
    plain=_plain,
    outputs=_outputs,
    backward=_emit_backward,
    variants=VARIANTS,
    example=example,
)
