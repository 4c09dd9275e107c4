"""`mlp`: the feed-forward block by aws-neuron/nki-library's name and arguments."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from neuronjax.primitives import contracts
from neuronjax.primitives.mlp.emitters import mlp_kernel
from neuronjax.primitives.mlp.facts import facts
from neuronjax.primitives.mlp.quantized import quant_mlp_kernel, require_values
from neuronjax.primitives.options import (
    ActFnType,
    NormType,
    QuantizationType,
    member,
    refuses,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

Operand = Shaped[Array, "..."] | MemrefTile


@refuses(store_output_in_sbuf=False, sbm=None)
@contracts.contracted(facts("mlp"))
def mlp(
    hidden_tensor: Operand,
    gate_proj_weights_tensor: Operand | None,
    up_proj_weights_tensor: Operand,
    down_proj_weights_tensor: Operand,
    normalization_weights_tensor: Operand | None = None,
    gate_proj_bias_tensor: Operand | None = None,
    up_proj_bias_tensor: Operand | None = None,
    down_proj_bias_tensor: Operand | None = None,
    normalization_bias_tensor: Operand | None = None,
    fused_add_tensor: Operand | None = None,
    store_fused_add_result: bool = False,
    activation_fn: ActFnType | str = ActFnType.SiLU,
    normalization_type: NormType | str = NormType.NO_NORM,
    quantization_type: QuantizationType | str = QuantizationType.NONE,
    gate_w_scale: Array | None = None,
    up_w_scale: Array | None = None,
    down_w_scale: Array | None = None,
    gate_up_in_scale: Array | None = None,
    down_in_scale: Array | None = None,
    quant_clipping_bound: float = 0.0,
    output_dtype: Any = None,
    store_output_in_sbuf: bool = False,
    eps: float = 1e-6,
    skip_gate_proj: bool = False,
    use_tkg_gate_up_proj_column_tiling: bool = True,
    use_tkg_down_proj_column_tiling: bool = True,
    use_tkg_down_proj_optimized_layout: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    force_cte_mode: bool = False,
    sbm: Any = None,
    lnc: int = 1,
    weight_dtype: Any = None,
) -> list[Array | MemrefTile]:
    r"""The gated feed-forward block, with a norm and an addition in front.

    $$x = \mathrm{norm}(h + a), \quad
      g = \mathrm{clamp}(x W_g + b_g), \quad u = \mathrm{clamp}(x W_u + b_u), \quad
      y = (\mathrm{act}(g) \cdot u)\, W_d + b_d$$

    The sum `h + a` is not added to the result: it is returned for the next layer to
    add. `neuronjax.emit.mlp_fused_add_kernel` adds its residual to the result instead.

    Quantized weights are float8_e4m3 or float8_e4m3fn with float32 scales: one a column
    (`ROW`), or one for all (`STATIC`; `STATIC_MX` is the same, with weights stored in
    another order and `H` and `I` multiples of 512). Decode (`B*S <= 96`) quantizes no
    activation:

    $$x W \to (x\, W_q) \cdot s_w$$

    Prefill does, and multiplies float8_e4m3 codes, which end at 240: `h` may come as
    codes, and the gated values `m` are quantized in front of `W_d`, with a clip first.

    $$\mathrm{ROW}: \quad h = c_h a, \quad
      s = \max(\max |m| / 240,\ 10^{-6}), \quad
      m W_d \to (\mathrm{fp8}(m / s)\, W_q) \cdot s_w s$$

    $$\mathrm{STATIC}: \quad h = c_h s_h, \quad
      m W_d \to (\mathrm{fp8}(\mathrm{clip}(m / s_m, \pm 240))\, W_q) \cdot s_w s_m$$

    `MX` weights are packed in blocks of 32 with one power of two, `s` of
    `neuronjax.quantize_to_mx`; activations are rounded to float8_e4m3fn blocks:

    $$x W \to \mathrm{mx}(x)\, W_q 2^{s - 127}$$

    Columns of `h`, of the norm's gain and offset are swizzled then, in order
    `(q, t, p)` of `[4, H/512, 128]`; biases `b_g`, `b_u` are `[Ip, ceil(I/512), 4]`,
    output `512 j + Ip r + c` at `[c, j, r]`. What is rounded is float32: the norm's
    result, and the gated values.

    Args:
        hidden_tensor: `h`, `[B, S, H]` or `[T, H]`. In prefill also float8_e4m3, for
            ROW packed as `[B, S, H + 4]`: the last four bytes of a row are its float32
            scale `a`, little-endian (`neuronjax.pack_rows`).
            Such an `h` takes no norm and no addition, and needs `output_dtype`.
        gate_proj_weights_tensor: `[H, I]`, for MX `[128, H/512, I]` containers.
            Ignored, and may be None, with `skip_gate_proj`; so is its scale.
        up_proj_weights_tensor: `[H, I]`.
        down_proj_weights_tensor: `[I, H]`, for MX `[Ip, ceil(I/512), H]` containers,
            `Ip` 128, or `I/4` for `I < 512`.
        normalization_weights_tensor: the norm's gain, `[1, H]`; given exactly when the
            norm has one.
        gate_proj_bias_tensor: `[1, I]`.
        up_proj_bias_tensor: `[1, I]`.
        down_proj_bias_tensor: `[1, H]`.
        normalization_bias_tensor: LayerNorm's offset, `[1, H]`.
        fused_add_tensor: `a`, of the shape of `h`; MX takes none.
        store_fused_add_result: return `h + a` as a second output.
        activation_fn: `SiLU` (`x sigmoid(x)`), `GELU` (exact), `GELU_Tanh_Approx`, or
            `Swish` (`x sigmoid(1.702 x)`: GELU's sigmoid form).
        normalization_type: `NO_NORM`, `RMS_NORM`, `LAYER_NORM` or
            `RMS_NORM_SKIP_GAMMA`, in float32.
        quantization_type: `NONE`, `ROW`, `STATIC`, `STATIC_MX` or `MX`.
        gate_w_scale: of `W_g`, float32, all 128 rows alike: `[128, I]` for ROW,
            `[128, 1]` for STATIC. MX: uint8 `[16, H/512, I]`.
        up_w_scale: the same of `W_u`.
        down_w_scale: of `W_d`, `[128, H]` for ROW, `[128, 1]` for STATIC; MX: uint8
            `[Ip/8, ceil(I/512), H]`.
        gate_up_in_scale: STATIC: the scale of an fp8 `h`, `[128, 1]`; in prefill
            positive and finite. Decode needs it given and does not read it.
        down_in_scale: STATIC: the scale of the gated values in prefill; the same.
        quant_clipping_bound: ROW in prefill: magnitudes of the gated values are clipped
            to it before their scale is taken; at least 0, and 0 clips none.
        output_dtype: dtype of the results; None for that of `h`.
        store_output_in_sbuf: refuses; pass tiles, and the result is one.
        eps: added to the mean square or variance; finite, at least 0.
        skip_gate_proj: `y = act(u) W_d + b_d`, without a gate.
        use_tkg_gate_up_proj_column_tiling: a placement hint; changes no value.
        use_tkg_down_proj_column_tiling: a placement hint; changes no value.
        use_tkg_down_proj_optimized_layout: the down weight is stored with its columns
            permuted for unit strides: `reshape(stored, (I, lnc, H/128/lnc, 128))`,
            transposed to `(0, 1, 3, 2)`, is the weight.
        gate_clamp_upper_limit: `g` is at most this, then at least the lower limit,
            which is not above it.
        gate_clamp_lower_limit: see `gate_clamp_upper_limit`.
        up_clamp_upper_limit: the same for `u`.
        up_clamp_lower_limit: the same for `u`.
        force_cte_mode: the prefill path for few rows; without quantized weights it
            changes no value.
        sbm: a buffer manager; refuses, since arrays lie in no SBUF.
        lnc: how many cores the stored layout of the down weight is for.
        weight_dtype: MX: the format of the weights, as in `neuronjax.quantize_to_mx`;
            that of their container unless named, float4_e2m1fn in uint16 and
            float8_e4m3fn in uint32.

    Returns:
        `[y]`, or `[y, h + a]` with `store_fused_add_result`, each of the shape of `h`.
        Products are summed in float32 (float64 for float64) and rounded once. The
        checkpoint names are `mlp_out`, `mlp_added`, `mlp_gate` and `mlp_up`; the last
        two are the pre-activations that the backward macro `MLPBwd` reads. A gradient
        through a clamp is zero outside its limits. A rounding to fp8 passes it on
        unchanged, a clip in front of one not from outside; fp8 values and all scales
        are constants, and the gradient of a scale is zero.

    Raises:
        ValueError: shapes, dtypes or options do not fit together; the message has every
            broken rule. Or a scale that must be positive is not, where its value is
            known while tracing. Limits of the chip (`H` a multiple of 128, clamps for
            few rows only) are reported by `neuronjax.can` and refused for tiles alone.
        NotImplementedError: `store_output_in_sbuf` or `sbm` is given.

    Source:
        Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 5; aws-neuron/
        nki-library, `core/mlp/mlp.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> h, w = jnp.array([[1.0, -1.0]]), jnp.eye(2)
        >>> mlp(h, w, w, w, skip_gate_proj=True, up_clamp_lower_limit=0.0)[0]
        Array([[0.7310586, 0.       ]], dtype=float32)
    """
    require_values("mlp", SimpleNamespace(**locals()), hidden_tensor)
    if use_tkg_down_proj_optimized_layout:
        down_proj_weights_tensor = _logical(down_proj_weights_tensor, int(lnc))
    kind = member(QuantizationType, quantization_type)
    weights = gate_proj_weights_tensor, up_proj_weights_tensor, down_proj_weights_tensor
    scales = gate_w_scale, up_w_scale, down_w_scale, gate_up_in_scale, down_in_scale
    if kind is QuantizationType.STATIC_MX:
        weights, kind = _from_mx_order(*weights), QuantizationType.STATIC
    emit, quantized = mlp_kernel, {}
    if kind is not QuantizationType.NONE:
        emit, quantized = quant_mlp_kernel, _quantized(kind, scales, skip_gate_proj)
        quantized["quant_clipping_bound"] = quant_clipping_bound
        quantized["weight_dtype"] = weight_dtype
    outs = emit(
        hidden_tensor,
        *weights,
        gamma=normalization_weights_tensor,
        beta=normalization_bias_tensor,
        gate_b=gate_proj_bias_tensor,
        up_b=up_proj_bias_tensor,
        down_b=down_proj_bias_tensor,
        fused_add=fused_add_tensor,
        activation=activation_fn,
        norm=normalization_type,
        eps=eps,
        skip_gate=skip_gate_proj,
        gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit,
        up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit,
        store_fused_add=store_fused_add_result,
        out_dtype=output_dtype,
        use_tkg_gate_up_proj_column_tiling=use_tkg_gate_up_proj_column_tiling,
        use_tkg_down_proj_column_tiling=use_tkg_down_proj_column_tiling,
        force_cte_mode=force_cte_mode,
        **quantized,
    )
    return list(outs) if store_fused_add_result else [outs]


def _logical(stored: Any, lnc: int) -> jax.Array:
    """The down weight `[I, H]` from its layout of unit strides for `lnc` cores."""
    rows, width = stored.shape
    lanes = stored.reshape(rows, lnc, width // PARTITIONS // lnc, PARTITIONS)
    return jnp.swapaxes(lanes, 2, 3).reshape(rows, width)


def _quantized(
    kind: QuantizationType, scales: tuple, skip_gate: bool
) -> dict[str, Any]:
    """The emitter's kind of quantization and its scales."""
    operands = _block_scales if kind is QuantizationType.MX else _scale_operands
    return operands(scales, skip_gate) | dict(quant_type=kind)


def _scale_operands(scales: tuple, skip_gate: bool) -> dict[str, Any]:
    """The emitter's scales: one row of the 128 equal ones, gate's above up's."""
    first: list[Any] = [None if scale is None else scale[:1] for scale in scales]
    gate, up, down, gate_up_in, down_in = first
    return dict(
        gate_up_w_scale=up if skip_gate else jnp.concatenate([gate, up]),
        down_w_scale=down,
        gate_up_in_scale=gate_up_in,
        down_in_scale=down_in,
    )


def _block_scales(scales: tuple, skip_gate: bool) -> dict[str, Any]:
    """The emitter's block scales, gate's above up's."""
    gate, up, down, *_ = scales
    pair = (up,) if skip_gate else (gate, up)
    return dict(gate_up_w_scale=jnp.stack(pair), down_w_scale=down)


def _from_mx_order(gate: Any, up: Any, down: Any) -> tuple[Any, Any, jax.Array]:
    """The weights in natural order from that of STATIC_MX.

    Gate and up are stored as `(2, H/512, 128, 2, I/512, 128, 4)` transposed to
    `(2, 1, 4, 6, 5, 0, 3)`, down as `(I/512, 128, 4, H)` transposed to `(1, 0, 3, 2)`.
    """
    width, d_ff = up.shape

    def natural(stored: Any) -> Any:
        if stored is None:
            return None
        lanes = stored.reshape(128, width // 512, d_ff // 512, 4, 128, 2, 2)
        return lanes.transpose(5, 1, 0, 6, 2, 4, 3).reshape(width, d_ff)

    lanes = down.reshape(128, d_ff // 512, width, 4).transpose(1, 0, 3, 2)
    return natural(gate), natural(up), lanes.reshape(d_ff, width)
