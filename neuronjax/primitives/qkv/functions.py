"""The public functions of QKV: the dispatching one, and its two paths."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.options import (
    NormType,
    QKVOutputLayout,
    QKVWeightLayout,
    QuantizationType,
    refuses,
)
from neuronjax.primitives.qkv.facts import ARGUMENTS, facts, is_prefill
from neuronjax.primitives.qkv.macro import (
    BUILT,
    INSTEAD,
    qkv_fused_add_kernel,
    require_values,
)

Hidden = Float[Array, "batch seq d_model"]
Weight = Float[Array, "d_model columns"]
Table = Float[Array, "batch seq head_dim"]
PerChannel = Float[Array, "1 d_model"]
PerColumn = Float[Array, "1 columns"]

# STATIC_MX is not built, nor the hidden order that belongs to it.
_REFUSED = dict(quantization_type=BUILT, sbm=None)
# What the emitters take under the same names: settings, and hints of placement.
_SETTINGS = (
    "hidden_actual d_head num_q_heads num_kv_heads quantization_type kv_dtype fp8_max "
    "fp8_min store_output_in_sbuf output_in_sbuf use_auto_allocation "
    "load_input_with_DMA_transpose weight_layout"
).split()


@refuses(INSTEAD, **_REFUSED, is_h_dim_4h_transposed=False)
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

    With a quantized weight, $y = c(x)\, W \cdot s + b$, the scale after the product:

    - `ROW`: $c(x) = x$ and `s` is `qkv_w_scale`, one value a column;
    - `STATIC`: $c(x) = \mathrm{fp8}(\mathrm{clip}(x / s_{in}, \pm 240))$ and `s` is
      $s_{in}$ times one value for all query, all key and all value columns. A weight
      in a wider dtype than fp8 is the vendor's reference: it clips and does not round.

    With caches the keys and values come back as fp8, in them:
    $\mathrm{fp8}(\mathrm{clip}(k / s_k, \mathrm{fp8\_min}, \mathrm{fp8\_max}))$.

    Differentiation: a rounding passes straight through, beyond a clip the derivative
    is zero; a quantized weight, all scales and both caches are constants.

    The rotation turns query and key heads, in half-split pairs. The prefill path
    (`qkv_cte`) is taken for `fused_rope`, caches, `S > 96` or `B*S > 128`, else decode
    (`qkv_tkg`). The paths differ in what they return with a residual add, in nothing
    else; a symbolic size takes the prefill path.

    Args:
        input: `[B, S, H]`, any floating dtype; fp8 counts as bfloat16 of its values.
        fused_qkv_weights: `[H, I]`, `I = (num_q_heads + 2*num_kv_heads) * d_head`;
            columns are all query heads, then key heads, then value heads.
        output_layout: `BSD` or `NBSd`.
        bias: `[1, I]`, added before the rotation.
        quantization_type: `NONE`, `STATIC`, `ROW` or `MX`; `STATIC_MX` is not built
            yet. `MX` rounds what meets the weight to float8_e4m3fn blocks of 32
            channels, each with one power of two, as the weight's are.
        qkv_w_scale: float32, `[1, I]` for `ROW`, `[1, 3]` for `STATIC`, or that on 128
            equal rows, of which the first is read. uint8 `[H/32, I]` for `MX`.
        qkv_in_scale: float32, `[1, 1]` or `[128, 1]`, for `STATIC`; positive.
        fused_residual_add: add `mlp_prev` and `attention_prev` to `input` first.
        mlp_prev: `[B, S, H]`.
        attention_prev: `[B, S, H]`.
        fused_norm_type: `NO_NORM`, `RMS_NORM`, `LAYER_NORM`, `RMS_NORM_SKIP_GAMMA`.
        gamma_norm_weights: the norm's gain, `[1, H]`.
        layer_norm_bias: LayerNorm's offset, `[1, H]`.
        norm_eps: added to the mean square or variance; finite, at least 0.
        hidden_actual: columns that count in RMSNorm's mean; the rest hold zeros.
            LayerNorm counts all columns.
        fused_rope: rotate by `cos_cache` and `sin_cache`.
        cos_cache: `[B, S, d_head]`; all columns count.
        sin_cache: like `cos_cache`.
        d_head: width of a head; `NBSd` and the rotation need it.
        num_q_heads: query heads; the rotation needs it.
        num_kv_heads: key heads, and value heads; the rotation needs it.
        k_cache: fp8, `[B, max_seq, num_kv_heads*d_head]`, of which positions `0..S-1`
            are written; with `use_block_kv` `[num_blocks, block_size, ...]`. Donate it
            to `jit` to have it updated in place: the caches come back as new arrays.
        v_cache: like `k_cache`.
        k_scale: float32, `[1, 1]` or `[128, 1]`: keys are divided by it; positive.
        v_scale: like `k_scale`.
        fp8_max: where quantized values are clipped, 240 unless named.
        fp8_min: the lower end, -240 unless named.
        kv_dtype: the fp8 dtype of the caches, theirs unless named.
        use_block_kv: the caches are block caches.
        block_size: slots of a block.
        slot_mapping: integers `[B, S]`: token `t` goes to block `t // block_size`,
            offset `t % block_size`. A slot outside the caches, and one that is named
            twice, is an error when the slots are known while tracing. Under `jit` a
            token whose slot is outside is written nowhere, and which token a slot
            named twice holds is not defined.
        store_output_in_sbuf: where the output lies; changes no value.
        sbm: the vendor's buffer manager; must be `None`.
        use_auto_allocation: who places buffers; changes no value.
        load_input_with_DMA_transpose: how the input is loaded; changes no value.
        is_h_dim_4h_transposed: not built yet.
        weight_layout: `CONTIGUOUS`; for `MX` the weight is `[H/4, I]`, float4_e2m1fn in
            uint16 or float8_e4m3fn in uint32, and container `p` holds rows `4p` to
            `4p + 3` (`MX_CONTIGUOUS`) or `2p`, `2p + 1`, `H/2 + 2p`, `H/2 + 2p + 1`
            (`MX_INTERLEAVED`).

    Returns:
        `[B, S, I]`, or for `NBSd` `[num_q_heads + 2*num_kv_heads, B, S, d_head]`, in
        the dtype of `input`, bfloat16 for `STATIC` with an fp8 weight; sums, norm and
        rotation are float32. The decode path with a residual add returns
        `(out, fused_hidden)`, the second the sum `[B, S, H]`. With caches
        `(q, k_cache, v_cache)`: `q` is `[B, S, num_q_heads*d_head]`, the query heads.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. Or a scale
            that divides is not positive and finite, or a slot lies outside the caches
            or is named twice, where their values are known while tracing.
        NotImplementedError: `quantization_type` is STATIC_MX, `is_h_dim_4h_transposed`
            is set, or a buffer manager is given.

    Source:
        aws-neuron/nki-library, `core/qkv/qkv.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[[3.0, 4.0]]])
        >>> qkv(x, jnp.eye(2), fused_norm_type="RMS_NORM_SKIP_GAMMA", norm_eps=0.0)
        Array([[[0.84852815, 1.1313709 ]]], dtype=float32)
    """
    call = SimpleNamespace(**locals())
    outs = _project("qkv", call)
    prefill = is_prefill(
        fused_rope, input.shape[0], input.shape[1], k_cache is not None
    )
    return _without_sum(call, outs) if prefill else outs


@refuses(INSTEAD, **_REFUSED, is_input_swizzled=False)
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
) -> Array | tuple[Array, ...]:
    """The prefill path of `qkv`; returns the projected heads alone.

    Args:
        input: as in `qkv`, and so are the arguments not described here.
        fused_qkv_weights: `[H, I]`.
        output_layout: `BSD` or `NBSd`.
        bias: `[1, I]`.
        quantization_type: `NONE`, `STATIC`, `ROW` or `MX`.
        qkv_w_scale: `[1, I]` or `[1, 3]`, for `MX` uint8 `[H/32, I]`.
        qkv_in_scale: `[1, 1]`, for `STATIC`.
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
        k_cache: the fp8 cache that keys are written to.
        v_cache: the fp8 cache that values are written to.
        k_scale: what keys are divided by.
        v_scale: what values are divided by.
        fp8_max: the clip's upper end.
        fp8_min: the clip's lower end.
        kv_dtype: the fp8 dtype of the caches.
        use_block_kv: the caches are block caches.
        block_size: slots of a block.
        slot_mapping: the slot of each token, `[B, S]`.
        store_output_in_sbuf: the chip's prefill path has no such placement.
        sbm: must be `None`.
        use_auto_allocation: changes no value.
        load_input_with_DMA_transpose: changes no value.
        is_input_swizzled: not built yet.
        weight_layout: `CONTIGUOUS`, or for `MX` as in `qkv`.

    Returns:
        `[B, S, I]`, or for `NBSd` `[num_q_heads + 2*num_kv_heads, B, S, d_head]`; with
        caches `(q, k_cache, v_cache)`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.
        NotImplementedError: `quantization_type` is STATIC_MX, `is_input_swizzled` is
            set, or a buffer manager is given.

    Source:
        aws-neuron/nki-library, `core/qkv/qkv_cte.py`.
    """
    call = SimpleNamespace(**locals())
    return _without_sum(call, _project("qkv_cte", call))


@refuses(INSTEAD, sbm=None, is_h_dim_4h_transposed=False)
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
        quantization_type: `NONE`, `STATIC` or `ROW`; decode takes no other.
        is_h_dim_4h_transposed: not built yet.
        qkv_w_scale: as in `qkv`.
        qkv_in_scale: as in `qkv`.
        output_in_sbuf: where the output lies; changes no value.
        qkv_bias: `[1, I]`.
        norm_bias: LayerNorm's offset, `[1, H]`.
        hidden_actual: columns that count in RMSNorm's mean; the rest hold zeros.
        sbm: the vendor's buffer manager; must be `None`.

    Returns:
        The projected heads as in `qkv`; with `fused_add`, that and the sum `[B, S, H]`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.
        NotImplementedError: `is_h_dim_4h_transposed` is set, or a buffer manager is
            given.

    Source:
        aws-neuron/nki-library, `core/qkv/qkv_tkg.py`.
    """
    return _project("qkv_tkg", SimpleNamespace(**locals()))


def _project(function: str, call: SimpleNamespace) -> Any:
    """The emitter's outputs: `out`, with residuals the sum, with caches these."""
    ours, theirs = ARGUMENTS[function], ARGUMENTS["qkv_fused_add_kernel"]
    given = {theirs[key]: getattr(call, ours[key]) for key in ours if key in theirs}
    given |= {key: getattr(call, key) for key in _SETTINGS if hasattr(call, key)}
    require_values(function, call)
    if is_fp8(given["hidden"].dtype):
        given["hidden"] = given["hidden"].astype(jnp.bfloat16)
    return qkv_fused_add_kernel(**given, return_sum=call.mlp_prev is not None)


def _without_sum(call: SimpleNamespace, outs: Any) -> Any:
    """What the prefill path returns of them."""
    if call.mlp_prev is None:
        return outs
    return outs[0] if len(outs) == 2 else (outs[0], *outs[2:])
