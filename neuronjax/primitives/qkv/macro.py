"""The macros `QKV`, `TiledNativeKernelQKV` and `QKVBwd`: emitters and declarations.

Residuals carry the checkpoint names `qkv_out`, `qkv_fused_hidden` (with a fused add),
`qkv_rstd` (with a norm) and `qkv_mean` (LayerNorm).
"""

import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.qkv import plain, projection
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import (
    NORM_CONFIG,
    NormType,
    QKVOutputLayout,
    member,
)
from neuronjax.primitives.qkv import rules  # noqa: F401  enters the rows
from neuronjax.primitives.qkv.facts import OPERANDS, facts
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

UNTILED, TILED, BACKWARD = "QKV", "TiledNativeKernelQKV", "QKVBwd"
Operand = Array | MemrefTile


@contracts.contracted(facts("qkv_kernel"))
def qkv_kernel(
    hidden: Operand,
    qkv_w: Operand,
    norm_w: Operand | None = None,
    norm_bias: Operand | None = None,
    qkv_bias: Operand | None = None,
    cos_cache: Operand | None = None,
    sin_cache: Operand | None = None,
    *,
    norm_type: NormType | str = "RMS_NORM",
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    d_head: int | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    output_layout: QKVOutputLayout | str = "BSD",
    **hints: Any,
) -> Operand:
    """Emits `QKV`, or for tiles `TiledNativeKernelQKV`: norm, projection, rotation.

    Tiles lie on `H` (`hidden`, `qkv_w`, `norm_w`, `norm_bias`), on `I` (`qkv_bias`) and
    on the head dimension (`cos_cache`, `sin_cache`).

    Args:
        hidden: `[B, S, H]`.
        qkv_w: `[H, I]`; columns are all query heads, then key heads, then value heads.
        norm_w: the norm's gain, `[1, H]`.
        norm_bias: LayerNorm's offset, `[1, H]`.
        qkv_bias: `[1, I]`, added before the rotation.
        cos_cache: `[B, S, d_head]`; given with `sin_cache`, query and key heads are
            rotated half-split, by all columns of both.
        sin_cache: like `cos_cache`.
        norm_type: `NO_NORM`, `RMS_NORM`, `LAYER_NORM` or `RMS_NORM_SKIP_GAMMA`.
        eps: added to the mean square or variance.
        hidden_actual: columns that count in RMSNorm's mean; the rest hold zeros.
        d_head: width of a head.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.
        output_layout: `BSD` or `NBSd`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[B, S, I]`, or for `NBSd` `[num_q_heads + 2*num_kv_heads, B, S, d_head]`; for
        tiles a tile of it on `I`, or on the head dimension. The dtype is `hidden`'s.
    """
    call = SimpleNamespace(**locals())
    operands = (hidden, qkv_w, norm_w, norm_bias, qkv_bias, None, None)
    return _emit("qkv_kernel", (*operands, cos_cache, sin_cache), call)[0]


@contracts.contracted(facts("qkv_fused_add_kernel"))
def qkv_fused_add_kernel(
    hidden: Operand,
    qkv_w: Operand,
    mlp_out: Operand | None = None,
    attn_out: Operand | None = None,
    norm_w: Operand | None = None,
    norm_bias: Operand | None = None,
    qkv_bias: Operand | None = None,
    cos_cache: Operand | None = None,
    sin_cache: Operand | None = None,
    *,
    return_sum: bool = False,
    norm_type: NormType | str = "RMS_NORM",
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    d_head: int | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    output_layout: QKVOutputLayout | str = "BSD",
    **hints: Any,
) -> Operand | tuple[Operand, Operand]:
    """Emits the same NAMEs with `hidden + mlp_out + attn_out` in front of the norm.

    The add is a prologue of the leaf (`fused_add="prologue"`): the widths allow nothing
    else. Without both residuals this is `qkv_kernel`.

    Args:
        hidden: `[B, S, H]`, as are the two residuals; tiles lie on `H`.
        qkv_w: as in `qkv_kernel`.
        mlp_out: the MLP's output of the layer before.
        attn_out: the attention's output of the layer before.
        norm_w: as in `qkv_kernel`.
        norm_bias: as in `qkv_kernel`.
        qkv_bias: as in `qkv_kernel`.
        cos_cache: as in `qkv_kernel`.
        sin_cache: as in `qkv_kernel`.
        return_sum: return the sum as well; without residuals it is `hidden`.
        norm_type: as in `qkv_kernel`.
        eps: as in `qkv_kernel`.
        hidden_actual: as in `qkv_kernel`.
        d_head: as in `qkv_kernel`.
        num_q_heads: as in `qkv_kernel`.
        num_kv_heads: as in `qkv_kernel`.
        output_layout: as in `qkv_kernel`.
        **hints: as in `qkv_kernel`.

    Returns:
        The output of `qkv_kernel`; with `return_sum`, that and the sum `[B, S, H]`,
        rounded once, in the dtype of `hidden`.
    """
    call = SimpleNamespace(**locals())
    operands = (hidden, qkv_w, norm_w, norm_bias, qkv_bias, mlp_out, attn_out)
    outs = _emit("qkv_fused_add_kernel", (*operands, cos_cache, sin_cache), call)
    if not return_sum:
        return outs[0]
    return outs[0], hidden if mlp_out is None else outs[1]


def _emit(emitter: str, operands: tuple, call: SimpleNamespace) -> tuple:
    """Picks the NAME and binds the macro; tiles come back as tiles."""
    is_tiled = is_all_io_type_memref_tile(operands, emitter)
    layout = member(QKVOutputLayout, call.output_layout)
    config = dict(
        norm=NORM_CONFIG[member(NormType, call.norm_type)],
        eps=float(call.eps),
        hidden_actual=_index(call.hidden_actual),
        d_head=_index(call.d_head),
        num_q_heads=_index(call.num_q_heads),
        num_kv_heads=_index(call.num_kv_heads),
        layout=layout.name,
        fused_add="none" if operands[5] is None else "prologue",
        fused_rope=operands[7] is not None,
        is_tiled=is_tiled,
        **call.hints,
    )
    if not is_tiled:
        return qkv_family(*operands, name=UNTILED, **config)
    tiles = dict(zip(OPERANDS, operands, strict=True))
    require_partitions(emitter, **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    outs = qkv_family(*data, name=TILED, **config)
    axes = (3 if config["layout"] == "NBSd" else 2, 2)
    results = tuple(map(MemrefTile, outs[: 1 + (operands[5] is not None)], axes))
    require_fit(emitter, **tiles, **dict(zip(("out", "sum"), results, strict=False)))
    return results


def _index(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def _leaf(*operands, name, is_tiled, **config):
    leaf = projection.qkv_tiled_fwd if is_tiled else projection.qkv_fwd
    return leaf(*operands, name=name, **config)


def _outputs(*, norm, fused_add, **_):
    """The names of the outputs that a config gives."""
    stored = () if fused_add == "none" else ("fused_hidden",)
    statistics = {"none": (), "layer": ("mean", "rstd")}.get(norm, ("rstd",))
    return ("out", *stored, *statistics)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    live = tuple(k for k, x in zip(GRADIENTS, operands, strict=True) if x is not None)
    args = (*operands, *outs, *cotangents)
    grads = iter(qkv_backward(*args, name=BACKWARD, live=live, **config))
    return tuple(None if x is None else next(grads) for x in operands)


def _backward_leaf(*args, name, live, **config):
    grads = projection.qkv_bwd(*args, name=name, **config)
    return tuple(grad for grad in grads if grad is not None)


def _plain_backward(*args, name, live, **config):
    grads = plain.qkv_bwd_plain(*args, name=name, **config)
    return tuple(grad for grad in grads if grad is not None)


def _example(name: str, dtype: Any, batch: int) -> Example:
    if name == TILED:
        return _tiled_example(dtype, batch)
    x, w, gamma, bias, mlp_prev, attn_prev, cos, sin = _normal(
        dtype,
        *((batch, 3, 6), (6, 16), (1, 6), (1, 16), (batch, 3, 6), (batch, 3, 6)),
        *((batch, 3, 4), (batch, 3, 4)),
    )
    operands = (x, w, gamma, None, bias, mlp_prev, attn_prev, cos, sin)
    split = (0, None, None, None, 0, 0, 0, 0)
    config = dict(_CONFIG, norm="rms", fused_add="prologue", layout="BSD")
    config["is_tiled"] = False
    if name == UNTILED:
        return Example(operands, config, split, (0, 0, 0))
    outs = _leaf(*operands, name=UNTILED, **config)
    cotangents = [jnp.cos(out + 1) for out in outs]
    live = tuple(k for k, x in zip(GRADIENTS, operands, strict=True) if x is not None)
    return Example(
        (*operands, *outs, *cotangents),
        config | {"live": live},
        split + (0,) * 6,
        split,
    )


def _tiled_example(dtype: Any, batch: int) -> Example:
    x, w, gamma, beta, bias, cos, sin = _normal(
        dtype,
        *((128, 2, batch, 3), (128, 2, 16), (128, 2, 1), (128, 2, 1), (16, 1, 1)),
        *((4, 1, batch, 3), (4, 1, batch, 3)),
    )
    operands = (x, w / 16, gamma, beta, bias, None, None, cos, sin)
    config = dict(_CONFIG, norm="layer", fused_add="none", layout="NBSd")
    config["is_tiled"] = True
    return Example(operands, config, (2, None, None, None, None, 2, 2), (3, 2, 2))


def _normal(dtype: Any, *shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


_CONFIG = dict(
    eps=1e-6,
    hidden_actual=None,
    d_head=4,
    num_q_heads=2,
    num_kv_heads=1,
    fused_rope=True,
)
GRADIENTS = tuple("hidden w gamma beta bias mlp_prev attn_prev cos sin".split())

qkv_backward = MacroFamily(
    "qkv_bwd",
    (BACKWARD,),
    _backward_leaf,
    plain=_plain_backward,
    outputs=lambda *, live, **_: tuple(f"d_{key}" for key in live),
    example=_example,
)
qkv_family = MacroFamily(
    "qkv",
    (UNTILED, TILED),
    _leaf,
    plain=plain.qkv_plain,
    outputs=_outputs,
    backward=_emit_backward,
    example=_example,
)
