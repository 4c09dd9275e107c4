"""The public functions of QKV: the dispatching one, and its two paths."""

from typing import Any

from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.options import (
    NormType,
    QKVOutputLayout,
    QKVWeightLayout,
    QuantizationType,
    refuses,
)
from neuronjax.primitives.qkv.facts import facts, is_prefill
from neuronjax.primitives.qkv.macro import qkv_fused_add_kernel, qkv_kernel

Hidden = Float[Array, "batch seq d_model"]
Weight = Float[Array, "d_model columns"]
Table = Float[Array, "batch seq head_dim"]
PerChannel = Float[Array, "1 d_model"]
PerColumn = Float[Array, "1 columns"]

_UNQUANTIZED = dict(
    quantization_type=QuantizationType.NONE,
    qkv_w_scale=None,
    qkv_in_scale=None,
    sbm=None,
)
_NO_CACHE_WRITES = dict(
    dict.fromkeys(
        "k_cache v_cache k_scale v_scale fp8_max fp8_min kv_dtype block_size "
        "slot_mapping".split()
    ),
    use_block_kv=False,
    weight_layout=QKVWeightLayout.CONTIGUOUS,
)
_INSTEAD = (
    "unquantized weights [H, I] in natural order are, and caches are written by the "
    "attention functions"
)


@refuses(_INSTEAD, **_UNQUANTIZED, **_NO_CACHE_WRITES, is_h_dim_4h_transposed=False)
@contracts.contracted(facts("qkv"))
def qkv(
    input: Hidden,
    fused_qkv_weights: Weight,
    output_layout: QKVOutputLayout | str = QKVOutputLayout.BSD,
    bias: PerColumn | None = None,
    quantization_type: QuantizationType | str = QuantizationType.NONE,
    qkv_w_scale: Array | None = None,
    qkv_in_scale: Array | None = None,
    fused_residual_add: bool = False,
    mlp_prev: Hidden | None = None,
    attention_prev: Hidden | None = None,
    fused_norm_type: NormType | str = NormType.NO_NORM,
    gamma_norm_weights: PerChannel | None = None,
    layer_norm_bias: PerChannel | None = None,
    norm_eps: float = 1e-6,
    hidden_actual: int | None = None,
    fused_rope: bool = False,
    cos_cache: Table | None = None,
    sin_cache: Table | None = None,
    d_head: int | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    fp8_max: float | None = None,
    fp8_min: float | None = None,
    kv_dtype: Any = None,
    use_block_kv: bool = False,
    block_size: int | None = None,
    slot_mapping: Array | None = None,
    store_output_in_sbuf: bool = False,
    sbm: None = None,
    use_auto_allocation: bool = False,
    load_input_with_DMA_transpose: bool = True,
    is_h_dim_4h_transposed: bool = False,
    weight_layout: QKVWeightLayout | str = QKVWeightLayout.CONTIGUOUS,
) -> Array | tuple[Array, ...]:
    r"""Projects activations to query, key and value heads, norm and rotation fused.

    $$x = \mathrm{input} + \mathrm{mlp} + \mathrm{attention}, \qquad
      y = \operatorname{norm}(x)\, W + b, \qquad
      [y_1, y_2] \mapsto [y_1, y_2] \cos + [-y_2, y_1] \sin$$

    The rotation turns query and key heads, in half-split pairs. The prefill path
    (`qkv_cte`) is taken for `fused_rope`, `S > 96` or `B*S > 128`, else the decode path
    (`qkv_tkg`). The paths differ in what they return with a residual add, in nothing
    else; a symbolic size takes the prefill path.

    Args:
        input: `[B, S, H]`, any floating dtype of at least 16 bits.
        fused_qkv_weights: `[H, I]`, `I = (num_q_heads + 2*num_kv_heads) * d_head`;
            columns are all query heads, then key heads, then value heads.
        output_layout: `BSD` or `NBSd`.
        bias: `[1, I]`, added before the rotation.
        quantization_type: `NONE`; the others are not built yet.
        qkv_w_scale: not built yet.
        qkv_in_scale: not built yet.
        fused_residual_add: add `mlp_prev` and `attention_prev` to `input` first.
        mlp_prev: `[B, S, H]`.
        attention_prev: `[B, S, H]`.
        fused_norm_type: `NO_NORM`, `RMS_NORM`, `LAYER_NORM`, `RMS_NORM_SKIP_GAMMA`.
        gamma_norm_weights: the norm's gain, `[1, H]`.
        layer_norm_bias: LayerNorm's offset, `[1, H]`.
        norm_eps: added to the mean square or variance.
        hidden_actual: columns that count in RMSNorm's mean; the rest hold zeros.
            LayerNorm counts all columns.
        fused_rope: rotate by `cos_cache` and `sin_cache`.
        cos_cache: `[B, S, d_head]`; all columns count.
        sin_cache: like `cos_cache`.
        d_head: width of a head; `NBSd` and the rotation need it.
        num_q_heads: query heads; the rotation needs it.
        num_kv_heads: key heads, and value heads; the rotation needs it.
        k_cache: not built yet.
        v_cache: not built yet.
        k_scale: not built yet.
        v_scale: not built yet.
        fp8_max: not built yet.
        fp8_min: not built yet.
        kv_dtype: not built yet.
        use_block_kv: not built yet.
        block_size: not built yet.
        slot_mapping: not built yet.
        store_output_in_sbuf: where the output lies; changes no value.
        sbm: the vendor's buffer manager; must be `None`.
        use_auto_allocation: who places buffers; changes no value.
        load_input_with_DMA_transpose: how the input is loaded; changes no value.
        is_h_dim_4h_transposed: not built yet.
        weight_layout: `CONTIGUOUS`; the others are not built yet.

    Returns:
        `[B, S, I]`, or for `NBSd` `[num_q_heads + 2*num_kv_heads, B, S, d_head]`, in
        the dtype of `input`; sums, norm and rotation are float32. The decode path with
        a residual add returns `(out, fused_hidden)`, the second the sum `[B, S, H]`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.
        NotImplementedError: an option is not built yet.

    Source:
        aws-neuron/nki-library, `core/qkv/qkv.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[[3.0, 4.0]]])
        >>> qkv(x, jnp.eye(2), fused_norm_type="RMS_NORM_SKIP_GAMMA", norm_eps=0.0)
        Array([[[0.84852815, 1.1313709 ]]], dtype=float32)
    """
    prefill = is_prefill(fused_rope, *input.shape[:2])
    outs = _project(
        input,
        fused_qkv_weights,
        (gamma_norm_weights, layer_norm_bias, bias),
        (mlp_prev, attention_prev),
        (cos_cache, sin_cache),
        norm_type=fused_norm_type,
        eps=norm_eps,
        hidden_actual=hidden_actual,
        d_head=d_head,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        output_layout=output_layout,
        store_output_in_sbuf=store_output_in_sbuf,
        use_auto_allocation=use_auto_allocation,
        load_input_with_DMA_transpose=load_input_with_DMA_transpose,
    )
    return outs[0] if prefill or not fused_residual_add else outs


@refuses(_INSTEAD, **_UNQUANTIZED, **_NO_CACHE_WRITES, is_input_swizzled=False)
@contracts.contracted(facts("qkv_cte"))
def qkv_cte(
    input: Hidden,
    fused_qkv_weights: Weight,
    output_layout: QKVOutputLayout | str = QKVOutputLayout.BSD,
    bias: PerColumn | None = None,
    quantization_type: QuantizationType | str = QuantizationType.NONE,
    qkv_w_scale: Array | None = None,
    qkv_in_scale: Array | None = None,
    fused_residual_add: bool = False,
    mlp_prev: Hidden | None = None,
    attention_prev: Hidden | None = None,
    fused_norm_type: NormType | str = NormType.NO_NORM,
    gamma_norm_weights: PerChannel | None = None,
    layer_norm_bias: PerChannel | None = None,
    norm_eps: float = 1e-6,
    hidden_actual: int | None = None,
    fused_rope: bool = False,
    cos_cache: Table | None = None,
    sin_cache: Table | None = None,
    d_head: int | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    fp8_max: float | None = None,
    fp8_min: float | None = None,
    kv_dtype: Any = None,
    use_block_kv: bool = False,
    block_size: int | None = None,
    slot_mapping: Array | None = None,
    store_output_in_sbuf: bool = False,
    sbm: None = None,
    use_auto_allocation: bool = False,
    load_input_with_DMA_transpose: bool = True,
    is_input_swizzled: bool = False,
    weight_layout: QKVWeightLayout | str = QKVWeightLayout.CONTIGUOUS,
) -> Array:
    """The prefill path of `qkv`; returns the projected heads alone.

    Args:
        input: as in `qkv`, and so are the arguments not described here.
        fused_qkv_weights: `[H, I]`.
        output_layout: `BSD` or `NBSd`.
        bias: `[1, I]`.
        quantization_type: `NONE`.
        qkv_w_scale: not built yet.
        qkv_in_scale: not built yet.
        fused_residual_add: add both residuals first; the sum is not returned.
        mlp_prev: `[B, S, H]`.
        attention_prev: `[B, S, H]`.
        fused_norm_type: the norm, `NO_NORM` unless named.
        gamma_norm_weights: `[1, H]`.
        layer_norm_bias: `[1, H]`.
        norm_eps: added to the mean square or variance.
        hidden_actual: columns that count in RMSNorm's mean.
        fused_rope: rotate query and key heads.
        cos_cache: `[B, S, d_head]`.
        sin_cache: `[B, S, d_head]`.
        d_head: width of a head.
        num_q_heads: query heads.
        num_kv_heads: key heads, and value heads.
        k_cache: not built yet.
        v_cache: not built yet.
        k_scale: not built yet.
        v_scale: not built yet.
        fp8_max: not built yet.
        fp8_min: not built yet.
        kv_dtype: not built yet.
        use_block_kv: not built yet.
        block_size: not built yet.
        slot_mapping: not built yet.
        store_output_in_sbuf: the chip's prefill path has no such placement.
        sbm: must be `None`.
        use_auto_allocation: changes no value.
        load_input_with_DMA_transpose: changes no value.
        is_input_swizzled: not built yet.
        weight_layout: `CONTIGUOUS`.

    Returns:
        `[B, S, I]`, or for `NBSd` `[num_q_heads + 2*num_kv_heads, B, S, d_head]`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.
        NotImplementedError: an option is not built yet.

    Source:
        aws-neuron/nki-library, `core/qkv/qkv_cte.py`.
    """
    return _project(
        input,
        fused_qkv_weights,
        (gamma_norm_weights, layer_norm_bias, bias),
        (mlp_prev, attention_prev),
        (cos_cache, sin_cache),
        norm_type=fused_norm_type,
        eps=norm_eps,
        hidden_actual=hidden_actual,
        d_head=d_head,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        output_layout=output_layout,
        store_output_in_sbuf=store_output_in_sbuf,
        use_auto_allocation=use_auto_allocation,
        load_input_with_DMA_transpose=load_input_with_DMA_transpose,
    )[0]


@refuses(_INSTEAD, **_UNQUANTIZED, is_h_dim_4h_transposed=False)
@contracts.contracted(facts("qkv_tkg"))
def qkv_tkg(
    hidden: Hidden,
    qkv_w: Weight,
    norm_w: PerChannel | None = None,
    fused_add: bool = False,
    mlp_prev: Hidden | None = None,
    attn_prev: Hidden | None = None,
    d_head: int | None = None,
    num_kv_heads: int | None = None,
    num_q_heads: int | None = None,
    output_layout: QKVOutputLayout | str = QKVOutputLayout.BSD,
    eps: float = 1e-6,
    norm_type: NormType | str = NormType.RMS_NORM,
    quantization_type: QuantizationType | str = QuantizationType.NONE,
    is_h_dim_4h_transposed: bool = False,
    qkv_w_scale: Array | None = None,
    qkv_in_scale: Array | None = None,
    output_in_sbuf: bool = False,
    qkv_bias: PerColumn | None = None,
    norm_bias: PerChannel | None = None,
    hidden_actual: int | None = None,
    sbm: None = None,
) -> Array | tuple[Array, ...]:
    """The decode path of `qkv`; its norm is RMSNorm unless another is named.

    Args:
        hidden: `[B, S, H]`.
        qkv_w: `[H, I]`, as in `qkv`.
        norm_w: the norm's gain, `[1, H]`.
        fused_add: add `mlp_prev` and `attn_prev` to `hidden` first.
        mlp_prev: `[B, S, H]`.
        attn_prev: `[B, S, H]`.
        d_head: width of a head; `NBSd` needs it.
        num_kv_heads: key heads, and value heads.
        num_q_heads: query heads.
        output_layout: `BSD` or `NBSd`.
        eps: added to the mean square or variance.
        norm_type: the norm.
        quantization_type: `NONE`; the others are not built yet.
        is_h_dim_4h_transposed: not built yet.
        qkv_w_scale: not built yet.
        qkv_in_scale: not built yet.
        output_in_sbuf: where the output lies; changes no value.
        qkv_bias: `[1, I]`.
        norm_bias: LayerNorm's offset, `[1, H]`.
        hidden_actual: columns that count in RMSNorm's mean; the rest hold zeros.
        sbm: the vendor's buffer manager; must be `None`.

    Returns:
        The projected heads as in `qkv`; with `fused_add`, that and the sum `[B, S, H]`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.
        NotImplementedError: an option is not built yet.

    Source:
        aws-neuron/nki-library, `core/qkv/qkv_tkg.py`.
    """
    outs = _project(
        hidden,
        qkv_w,
        (norm_w, norm_bias, qkv_bias),
        (mlp_prev, attn_prev),
        (None, None),
        norm_type=norm_type,
        eps=eps,
        hidden_actual=hidden_actual,
        d_head=d_head,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        output_layout=output_layout,
        output_in_sbuf=output_in_sbuf,
    )
    return outs if fused_add else outs[0]


def _project(x, w, vectors, residuals, tables, **options) -> tuple[Array, ...]:
    """The output, and with residuals their sum."""
    if residuals[0] is None:
        return (qkv_kernel(x, w, *vectors, *tables, **options),)
    return qkv_fused_add_kernel(
        x, w, *residuals, *vectors, *tables, return_sum=True, **options
    )
