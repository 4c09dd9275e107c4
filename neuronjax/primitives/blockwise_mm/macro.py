"""The macros `BlockwiseMM` and `BlockwiseMMBwd`: what computes them.

Outputs carry the checkpoint names `blockwise_mm_out`, `blockwise_mm_gate_up` and
`blockwise_mm_down`; the backward reads the last two. A call that is differentiated
returns them, another need not. With `checkpoint="recompute"` there are none, and the
backward computes them again.
"""

from typing import Any

import jax.numpy as jnp

from neuronjax.kernels.blockwise_mm import backward, forward, plain
from neuronjax.kernels.blockwise_mm.operands import Operands, Options
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.blockwise_mm.example import VARIANTS, example
from neuronjax.primitives.blockwise_mm.names import BACKWARD, FORWARD
from neuronjax.primitives.macro import MacroFamily

_CONSTANTS = ("gate_up_scale", "down_scale")
_ONE_BY_ONE = (
    "blocks are visited one after another, so an explicit mesh cannot divide their "
    "operands: neuronjax.sharding.sharded_moe_cte does, over a mesh of Auto axes"
)


def _outputs(**config: Any) -> tuple[str, ...]:
    return ("out", *Options.of(config).stored)


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    """The same call, with what the backward reads among its outputs."""
    is_stored = Options.of(config).checkpoint == "store"
    return config | dict(returned=True) if is_stored else config


def _gradients(*, grads: tuple[str, ...], **_: Any) -> tuple[str, ...]:
    return tuple(f"d_{key}" for key in grads)


def live_operands(ops: Operands) -> tuple[str, ...]:
    """The operands that have a gradient: quantized weights and scales are constants."""
    return tuple(
        key
        for key, x in ops._asdict().items()
        if x is not None and key not in _CONSTANTS and is_differentiable(x.dtype)
    )


def _emit_backward(operands, outs, cotangents, *, name, **config):
    ops, opts = Operands(*operands), Options.of(config)
    grads, stored = live_operands(ops), dict(zip(opts.stored, outs[1:], strict=True))
    seeds = dict(zip(("out", *opts.stored), cotangents, strict=True))
    kept = stored if opts.checkpoint == "store" else {}
    d_out = jnp.zeros_like(outs[0]) if seeds["out"] is None else seeds["out"]
    found = blockwise_mm_bwd(
        *ops,
        *(kept.get("gate_up"), kept.get("down")),
        *(d_out, seeds.get("gate_up"), seeds.get("down")),
        name=BACKWARD,
        grads=grads,
        **config,
    )
    found = dict(zip(grads, found, strict=True))
    scales = {key: getattr(ops, key) for key in _CONSTANTS}
    found |= {
        key: jnp.zeros_like(x)
        for key, x in scales.items()
        if x is not None and is_differentiable(x.dtype)
    }
    return tuple(found.get(key) for key in Operands._fields)


blockwise_mm_bwd = MacroFamily(
    "blockwise_mm_bwd",
    (BACKWARD,),
    backward.blockwise_mm_bwd,
    plain=plain.blockwise_mm_bwd_plain,
    outputs=_gradients,
    static=backward.blockwise_mm_bwd_static,
    tangent_leaf=backward.blockwise_mm_bwd_static,
    axis="axis",
    example=example,
    refuses={"explicit sharding": _ONE_BY_ONE},
)
blockwise_mm = MacroFamily(
    "blockwise_mm",
    (FORWARD,),
    forward.blockwise_mm_fwd,
    plain=plain.blockwise_mm_plain,
    outputs=_outputs,
    backward=_emit_backward,
    static=forward.blockwise_mm_static,
    tangent_leaf=forward.blockwise_mm_static,
    differentiated=_differentiated,
    axis="axis",
    variants=VARIANTS,
    example=example,
    refuses={"explicit sharding": _ONE_BY_ONE},
)
