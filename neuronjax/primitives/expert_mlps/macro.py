"""The macro `ExpertMLPs`; its output carries the checkpoint name `expert_mlps_out`.

Its backward is that of the blockwise experts, `BlockwiseMMBwd`, on the same blocks: it
computes what the forward did not store. That macro takes tensors: the forward's leaf
contracts tiles as they lie, and the backward of tiles lays them out as tensors first.
A hidden state that comes quantized has no gradient; that of the rest is then the vjp of
the leaf with static loop bounds, whose experts do not round that state again.
"""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.expert_mlps.leaf import (
    block_operands,
    expert_mlps_fwd,
    expert_mlps_static,
)
from neuronjax.kernels.expert_mlps.operands import (
    OUT_AXIS,
    TILE_AXES,
    Operands,
    Options,
)
from neuronjax.kernels.expert_mlps.pairs import local_affinities
from neuronjax.kernels.expert_mlps.plain import expert_mlps_plain
from neuronjax.kernels.expert_mlps.tiles import retiled, untile, untiled
from neuronjax.primitives.blockwise_mm.macro import blockwise_mm_bwd, live_operands
from neuronjax.primitives.blockwise_mm.names import BACKWARD
from neuronjax.primitives.expert_mlps.example import NAME, VARIANTS, example
from neuronjax.primitives.macro import MacroFamily

_DIVIDED = (
    "tokens are sorted by expert, whatever device they lie on: divide them with "
    "shard_map"
)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    # A token of affinity 0 gives the affinity a gradient: none is left out here.
    opts = Options.of(config)._replace(block_size=None)
    given = Operands(*operands)
    if given.hidden_scale is not None:
        return _own_vjp(given, cotangents[0], config)
    ops, (d_out,) = (untiled(given) if opts.is_tiled else given), cotangents
    d_out = untile(d_out, OUT_AXIS) if opts.is_tiled else d_out
    of_blocks, bag = block_operands(ops, opts)
    live = live_operands(of_blocks)
    found = blockwise_mm_bwd(
        *(*of_blocks, None, None, d_out, None, None), name=BACKWARD, grads=live, **bag
    )
    grads = dict(zip(live, found, strict=True))
    if opts.is_scaled:
        grads["affinities"] = _d_affinities(grads["affinity"], ops, opts)
    return tuple(
        _gradient(key, grads, x, opts.is_tiled) for key, x in given._asdict().items()
    )


def _own_vjp(ops: Operands, d_out: jax.Array, config: dict[str, Any]) -> tuple:
    """The gradients beside a quantized `hidden`: those of the leaf itself."""
    floats = {
        key: x
        for key, x in ops._asdict().items()
        if x is not None and is_differentiable(x.dtype)
    }

    def leaf(live: dict[str, jax.Array]) -> jax.Array:
        return expert_mlps_static(*ops._replace(**live), name=NAME, **config)[0]

    _, pull = jax.vjp(leaf, floats)
    (found,) = pull(d_out)
    return tuple(found.get(key) for key in Operands._fields)


def _d_affinities(d_local: jax.Array, ops: Operands, opts: Options) -> jax.Array:
    """The cotangent of all experts' affinities from that of the local ones."""

    num_experts = ops.gate_up_w.shape[0]

    def local(table: jax.Array) -> jax.Array:
        return local_affinities(ops._replace(affinities=table), opts, num_experts)

    table, pull = jax.vjp(local, ops.affinities)
    return pull(d_local.reshape(table.shape))[0]


def _gradient(key: str, grads: dict[str, Any], x: Any, is_tiled: bool) -> Any:
    """Zeros for a constant; nothing for what is absent, integer or fp8."""
    if x is None or not is_differentiable(x.dtype):
        return None
    if key not in grads:
        return jnp.zeros_like(x)
    return retiled(grads[key], TILE_AXES[key]) if is_tiled else grads[key]


expert_mlps = MacroFamily(
    "expert_mlps",
    (NAME,),
    expert_mlps_fwd,
    plain=expert_mlps_plain,
    outputs=("out",),
    backward=_emit_backward,
    static=expert_mlps_static,
    tangent_leaf=expert_mlps_static,
    example=example,
    variants=VARIANTS,
    refuses={"explicit sharding": _DIVIDED},
)
