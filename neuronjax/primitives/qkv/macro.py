"""The macros `QKV`, `TiledNativeKernelQKV` and `QKVBwd`: emitters and declarations.

Residuals carry the checkpoint names `qkv_out`, `qkv_fused_hidden` (with a fused add),
`qkv_rstd` (with a norm), `qkv_mean` (LayerNorm), `qkv_k_cache` and `qkv_v_cache`.

A quantized call keeps the NAME: its scales and caches are appended operands, the config
says `quantization` and `is_fp8_kernel`. Its weight and all scales are constants, and so
are the caches it returns: fp8 operands take no part in differentiation, and fp8 outputs
have a zero tangent.
"""

import math
import operator
from types import SimpleNamespace
from typing import Any

from jaxtyping import Array

from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.known import require_divisors, require_slots
from neuronjax.primitives.macro import MacroFamily
from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import (
    NORM_CONFIG,
    NormType,
    QKVOutputLayout,
    QKVWeightLayout,
    QuantizationType,
    member,
    refuses,
)
from neuronjax.primitives.qkv import mx_rules, rules  # noqa: F401  enters the rows
from neuronjax.primitives.qkv.examples import example
from neuronjax.primitives.qkv.facts import OPERANDS, PLAIN, facts
from neuronjax.primitives.qkv.leaves import (
    BACKWARD,
    BLOCK_SCALED,
    GRADIENTS,
    QUANTIZED,
    TILED,
    UNTILED,
    backward_leaf,
    leaf,
    live_operands,
    no_gradient,
    output_names,
    plain_backward_leaf,
    plain_leaf,
)
from neuronjax.primitives.qkv.quantized_rules import kv_limits
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

Operand = Array | MemrefTile
INSTEAD = "STATIC, ROW and MX are, and unquantized weights [H, I] in natural order"
# What `quantization_type` may be before it is looked at; ROW_MX breaks a rule.
BUILT = tuple(
    kind for kind in QuantizationType if kind is not QuantizationType.STATIC_MX
)


@refuses(INSTEAD, quantization_type=BUILT)
@contracts.contracted(facts("qkv_kernel"))
def qkv_kernel(
    hidden: Operand,
    qkv_w: Operand,
    norm_w: Operand | None = None,
    norm_bias: Operand | None = None,
    qkv_bias: Operand | None = None,
    cos_cache: Operand | None = None,
    sin_cache: Operand | None = None,
    qkv_w_scale: Operand | None = None,
    qkv_in_scale: Operand | None = None,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    slot_mapping: Array | None = None,
    *,
    norm_type: NormType | str = "RMS_NORM",
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    d_head: int | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    output_layout: QKVOutputLayout | str = "BSD",
    quantization_type: QuantizationType | str = "NONE",
    weight_layout: QKVWeightLayout | str = "CONTIGUOUS",
    kv_dtype: Any = None,
    fp8_max: float | None = None,
    fp8_min: float | None = None,
    **hints: Any,
) -> Operand | tuple[Operand, ...]:
    """Emits `QKV`, or for tiles `TiledNativeKernelQKV`: norm, projection, rotation.

    Tiles lie on `H` (`hidden`, `qkv_w`, `norm_w`, `norm_bias`), on `I` (`qkv_bias`), on
    the head dimension (`cos_cache`, `sin_cache`) and on the columns of both scales.

    Args:
        hidden: `[B, S, H]`.
        qkv_w: `[H, I]`; columns are all query heads, then key heads, then value heads.
        norm_w: the norm's gain, `[1, H]`.
        norm_bias: LayerNorm's offset, `[1, H]`.
        qkv_bias: `[1, I]`, added before the rotation.
        cos_cache: `[B, S, d_head]`; given with `sin_cache`, query and key heads are
            rotated half-split, by all columns of both.
        sin_cache: like `cos_cache`.
        qkv_w_scale: as in `qkv`, and so are all arguments of quantization.
        qkv_in_scale: as in `qkv`.
        k_cache: as in `qkv`; never a tile.
        v_cache: as in `qkv`; never a tile.
        k_scale: as in `qkv`.
        v_scale: as in `qkv`.
        slot_mapping: as in `qkv`; the caches are block caches when it is given.
        norm_type: `NO_NORM`, `RMS_NORM`, `LAYER_NORM` or `RMS_NORM_SKIP_GAMMA`.
        eps: added to the mean square or variance.
        hidden_actual: columns that count in RMSNorm's mean; the rest hold zeros.
        d_head: width of a head.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.
        output_layout: `BSD` or `NBSd`.
        quantization_type: `NONE`, `STATIC`, `ROW`, or `MX`, which takes no tiles.
        weight_layout: as in `qkv`.
        kv_dtype: the caches' fp8 dtype.
        fp8_max: as in `qkv`.
        fp8_min: as in `qkv`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[B, S, I]`, or for `NBSd` `[num_q_heads + 2*num_kv_heads, B, S, d_head]`; for
        tiles a tile of it on `I`, or on the head dimension. The dtype is `hidden`'s,
        bfloat16 for STATIC with an fp8 weight. With caches `(q, k_cache, v_cache)`.
    """
    call = SimpleNamespace(**locals())
    operands = (hidden, qkv_w, norm_w, norm_bias, qkv_bias, None, None)
    outs = _emit("qkv_kernel", (*operands, cos_cache, sin_cache), call)
    return outs[0] if k_cache is None else (outs[0], *outs[-2:])


@refuses(INSTEAD, quantization_type=BUILT)
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
    qkv_w_scale: Operand | None = None,
    qkv_in_scale: Operand | None = None,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    slot_mapping: Array | None = None,
    *,
    return_sum: bool = False,
    norm_type: NormType | str = "RMS_NORM",
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    d_head: int | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    output_layout: QKVOutputLayout | str = "BSD",
    quantization_type: QuantizationType | str = "NONE",
    weight_layout: QKVWeightLayout | str = "CONTIGUOUS",
    kv_dtype: Any = None,
    fp8_max: float | None = None,
    fp8_min: float | None = None,
    **hints: Any,
) -> Operand | tuple[Operand, ...]:
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
        qkv_w_scale: as in `qkv_kernel`.
        qkv_in_scale: as in `qkv_kernel`.
        k_cache: as in `qkv_kernel`.
        v_cache: as in `qkv_kernel`.
        k_scale: as in `qkv_kernel`.
        v_scale: as in `qkv_kernel`.
        slot_mapping: as in `qkv_kernel`.
        return_sum: return the sum as well; without residuals it is `hidden`.
        norm_type: as in `qkv_kernel`.
        eps: as in `qkv_kernel`.
        hidden_actual: as in `qkv_kernel`.
        d_head: as in `qkv_kernel`.
        num_q_heads: as in `qkv_kernel`.
        num_kv_heads: as in `qkv_kernel`.
        output_layout: as in `qkv_kernel`.
        quantization_type: as in `qkv_kernel`.
        weight_layout: as in `qkv_kernel`.
        kv_dtype: as in `qkv_kernel`.
        fp8_max: as in `qkv_kernel`.
        fp8_min: as in `qkv_kernel`.
        **hints: as in `qkv_kernel`.

    Returns:
        The output of `qkv_kernel`; with `return_sum`, behind it the sum `[B, S, H]`,
        rounded once, in the dtype of `hidden`; caches come last.
    """
    call = SimpleNamespace(**locals())
    operands = (hidden, qkv_w, norm_w, norm_bias, qkv_bias, mlp_out, attn_out)
    outs = _emit("qkv_fused_add_kernel", (*operands, cos_cache, sin_cache), call)
    total = hidden if mlp_out is None else outs[1]
    results = (outs[0], *(outs[-2:] if k_cache is not None else ()))
    if return_sum:
        results = (outs[0], total, *results[1:])
    return results[0] if len(results) == 1 else results


def _emit(emitter: str, operands: tuple, call: SimpleNamespace) -> tuple:
    """Picks the NAME and binds the macro; tiles come back as tiles."""
    is_tiled = is_all_io_type_memref_tile(operands, emitter)
    require_values(emitter, call)
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
    if _is_quantized(call):
        operands = (*operands, *_appended(call))
        config |= _quantized_config(call)
    if not is_tiled:
        return qkv_family(*operands, name=UNTILED, **config)
    tiles = dict(zip(OPERANDS, operands, strict=False))
    require_partitions(emitter, **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    outs = qkv_family(*data, name=TILED, **config)
    axes = (3 if config["layout"] == "NBSd" else 2, 2)
    results = tuple(map(MemrefTile, outs[: 1 + (operands[5] is not None)], axes))
    require_fit(emitter, **tiles, **dict(zip(("out", "sum"), results, strict=False)))
    return results


def require_values(function: str, call: Any) -> None:
    """Refuses values that break a rule, where they are known while tracing."""
    scales = {
        name: getattr(call, name, None)
        for name in ("qkv_in_scale", "k_scale", "v_scale")
    }
    require_divisors(function, **scales)
    if getattr(call, "slot_mapping", None) is not None:
        require_slots(function, call.slot_mapping, math.prod(call.k_cache.shape[:2]))


def _is_quantized(call: SimpleNamespace) -> bool:
    kind = member(QuantizationType, call.quantization_type)
    return kind is not QuantizationType.NONE or call.k_cache is not None


def _appended(call: SimpleNamespace) -> tuple:
    """The operands that quantization appends."""
    scales = (call.qkv_w_scale, call.qkv_in_scale)
    caches = (call.k_cache, call.v_cache, call.k_scale, call.v_scale)
    return (*scales, *caches, call.slot_mapping)


def _quantized_config(call: SimpleNamespace) -> dict[str, Any]:
    """What a quantized call has in its config beside the rest.

    `out_dtype` is `None` for the dtype of `hidden`, `kv_dtype` for a call without
    caches.
    """
    kind = member(QuantizationType, call.quantization_type)
    is_fp8_kernel = is_fp8(call.qkv_w.dtype)
    static = kind is QuantizationType.STATIC and is_fp8_kernel
    cached = call.k_cache is not None
    config = dict(
        quantization=kind.name,
        is_fp8_kernel=is_fp8_kernel,
        out_dtype="bfloat16" if static else None,
        kv_dtype=call.k_cache.dtype.name if cached else None,
        kv_limits=kv_limits(call.fp8_min, call.fp8_max) if cached else None,
    )
    return config | _block_config(call, kind)


def _block_config(call: SimpleNamespace, kind: QuantizationType) -> dict[str, Any]:
    """How the containers of a block-scaled weight are read."""
    if kind is not QuantizationType.MX:
        return {}
    found = weight_format(call.qkv_w)
    assert found is not None
    order = member(QKVWeightLayout, call.weight_layout)
    return dict(
        weight_format=found.name,
        weight_layout=order.name,
        is_fp8_kernel=found.bits == 8,
    )


def _index(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    live = live_operands(operands, config)
    args = (*operands, *outs, *cotangents)
    grads = qkv_backward(*args, name=BACKWARD, live=live, **config)
    found = dict(zip(live, grads, strict=True))
    keys = [*GRADIENTS, *OPERANDS[len(PLAIN) :]]
    return tuple(
        found[key] if key in found else no_gradient(x)
        for key, x in zip(keys, operands, strict=False)
    )


qkv_backward = MacroFamily(
    "qkv_bwd",
    (BACKWARD,),
    backward_leaf,
    plain=plain_backward_leaf,
    outputs=lambda *, live, **_: tuple(f"d_{key}" for key in live),
    example=example,
)
qkv_family = MacroFamily(
    "qkv",
    (UNTILED, TILED),
    leaf,
    plain=plain_leaf,
    outputs=output_names,
    backward=_emit_backward,
    example=example,
    variants=(QUANTIZED, BLOCK_SCALED),
)
