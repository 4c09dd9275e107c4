"""The macros of prefill attention: six NAMEs, tensors and tiles.

Outputs carry the checkpoint names `attention_out`, `attention_neg_max` and
`attention_recip`, which are all that `BackwardsAttention` reads beside the operands.
"""

from typing import Any

from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.attention.plain import attention_plain
from neuronjax.kernels.attention.prefill import attention_fwd
from neuronjax.kernels.attention.tiled import attention_tiled_fwd
from neuronjax.primitives.attention.backward_macro import attention_gradients
from neuronjax.primitives.attention.prefill_examples import OPTIONS, example
from neuronjax.primitives.attention.prefill_facts import (
    SWAPPED,
    TILED,
    UNTILED,
)
from neuronjax.primitives.macro import MacroFamily
from neuronjax.primitives.tile import MemrefTile, require_fit, require_partitions


def emit_tiled(q, k, v, destination, config) -> MemrefTile:
    """Emits `TiledNativeKernelAttention`."""
    tiles = dict(q=q, k=k, v=v)
    require_partitions("attention_kernel", **tiles)
    data = (tile.data for tile in tiles.values())
    attended = attention(*data, Extras(), name=TILED, **config)[0]
    if destination is not None:
        attended = attended.astype(destination.dtype)
    out = MemrefTile(attended, 2 if config["tp_out"] else 1)
    require_fit("attention_kernel", **tiles, out=out)
    return out


def _leaf(q, k, v, extras, *, is_tiled, static=False, **config):
    if is_tiled:
        return attention_tiled_fwd(q, k, v, **config)
    return attention_fwd(q, k, v, extras, static=static, **config)


def static_leaf(*operands, **config):
    """The leaf with loops of fixed length."""
    return _leaf(*operands, static=True, **config)


def _plain(q, k, v, extras, *, is_tiled, **config):
    if not is_tiled:
        return attention_plain(q, k, v, extras, **config)
    q, k, v = _tensors(q, k, v)
    layout: Any = dict(config, tp_q=True, tp_k=True, tp_out=False)
    outs = attention_plain(q, k, v, extras, **layout)
    return tuple(MemrefTile.from_tensor(x, 1).data for x in outs)


def _tensors(q, k, v):
    """Operand tiles as `[heads, seq, width]`."""
    tiles = MemrefTile(q, 2), MemrefTile(k, 2), MemrefTile(v, 1)
    return (tile.to_tensor() for tile in tiles)


def _emit_backward(operands, outs, cotangents, *, name, is_tiled, **config):
    q, k, v, extras = operands
    if not is_tiled:
        return attention_gradients(q, k, v, extras, *outs, *cotangents, **config)
    # BackwardsAttention has no tiled NAME: it reads tensors and its gradients are
    # laid out again.
    config |= dict(tp_q=True, tp_k=True, tp_out=False)
    rows = [
        None if x is None else MemrefTile(x, 1).to_tensor()
        for x in (*outs, *cotangents)
    ]
    tensors: Any = (*_tensors(q, k, v), extras, *rows)
    *grads, none = attention_gradients(*tensors, **config)
    tiles = map(MemrefTile.from_tensor, grads, (2, 2, 1))
    return *(tile.data for tile in tiles), none


attention = MacroFamily(
    "attention",
    (*UNTILED, TILED),
    _leaf,
    plain=_plain,
    outputs=("out", "neg_max", "recip"),
    backward=_emit_backward,
    static=static_leaf,
    guard=(SWAPPED, TILED),
    example=example,
    variants=OPTIONS,
)
