"""`mlp`: the feed-forward block by aws-neuron/nki-library's name and arguments."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.mlp.facts import facts
from neuronjax.primitives.mlp.macro import mlp_kernel
from neuronjax.primitives.options import (
    ActFnType,
    NormType,
    QuantizationType,
    refuses,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_INSTEAD = "mlp takes unquantized bfloat16, float16, float32 and float64 operands"
Operand = Float[Array, "..."] | MemrefTile


@refuses(
    _INSTEAD,
    quantization_type=QuantizationType.NONE,
    gate_w_scale=None,
    up_w_scale=None,
    down_w_scale=None,
    gate_up_in_scale=None,
    down_in_scale=None,
    quant_clipping_bound=0.0,
    store_output_in_sbuf=False,
    sbm=None,
)
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
) -> list[Array | MemrefTile]:
    r"""The gated feed-forward block, with a norm and an addition in front.

    $$x = \mathrm{norm}(h + a), \quad
      g = \mathrm{clamp}(x W_g + b_g), \quad u = \mathrm{clamp}(x W_u + b_u), \quad
      y = (\mathrm{act}(g) \cdot u)\, W_d + b_d$$

    The sum `h + a` is not added to the result: it is returned for the next layer to
    add. `neuronjax.emit.mlp_fused_add_kernel` adds its residual to the result instead.

    Args:
        hidden_tensor: `h`, `[B, S, H]` or `[T, H]`.
        gate_proj_weights_tensor: `[H, I]`; ignored, and may be None, with
            `skip_gate_proj`.
        up_proj_weights_tensor: `[H, I]`.
        down_proj_weights_tensor: `[I, H]`.
        normalization_weights_tensor: the norm's gain, `[1, H]`; given exactly when the
            norm has one.
        gate_proj_bias_tensor: `[1, I]`.
        up_proj_bias_tensor: `[1, I]`.
        down_proj_bias_tensor: `[1, H]`.
        normalization_bias_tensor: LayerNorm's offset, `[1, H]`.
        fused_add_tensor: `a`, of the shape of `h`.
        store_fused_add_result: return `h + a` as a second output.
        activation_fn: `SiLU` (`x sigmoid(x)`), `GELU` (exact), `GELU_Tanh_Approx`, or
            `Swish` (`x sigmoid(1.702 x)`: GELU's sigmoid form).
        normalization_type: `NO_NORM`, `RMS_NORM`, `LAYER_NORM` or
            `RMS_NORM_SKIP_GAMMA`, in float32.
        quantization_type: `NONE`; others are not built yet and refuse.
        gate_w_scale: not built yet, refuses; so do `up_w_scale`, `down_w_scale`,
            `gate_up_in_scale`, `down_in_scale` and `quant_clipping_bound`.
        up_w_scale: see `gate_w_scale`.
        down_w_scale: see `gate_w_scale`.
        gate_up_in_scale: see `gate_w_scale`.
        down_in_scale: see `gate_w_scale`.
        quant_clipping_bound: see `gate_w_scale`.
        output_dtype: dtype of the results; None for that of `h`.
        store_output_in_sbuf: refuses; pass tiles, and the result is one.
        eps: added to the mean square or variance.
        skip_gate_proj: `y = act(u) W_d + b_d`, without a gate.
        use_tkg_gate_up_proj_column_tiling: a placement hint; changes no value.
        use_tkg_down_proj_column_tiling: a placement hint; changes no value.
        use_tkg_down_proj_optimized_layout: the down weight is stored with its columns
            permuted for unit strides: `reshape(stored, (I, lnc, H/128/lnc, 128))`,
            transposed to `(0, 1, 3, 2)`, is the weight.
        gate_clamp_upper_limit: `g` is at most this, then at least the lower limit.
        gate_clamp_lower_limit: see `gate_clamp_upper_limit`.
        up_clamp_upper_limit: the same for `u`.
        up_clamp_lower_limit: the same for `u`.
        force_cte_mode: a placement hint: the prefill path for few rows; changes no
            value.
        sbm: a buffer manager; refuses, since arrays need none.
        lnc: how many cores the stored layout of the down weight is for.

    Returns:
        `[y]`, or `[y, h + a]` with `store_fused_add_result`, each of the shape of `h`.
        Products are summed in float32 (float64 for float64) and rounded once. The
        checkpoint names are `mlp_out`, `mlp_added`, `mlp_gate` and `mlp_up`; the last
        two are the pre-activations that the backward macro `MLPBwd` reads. A gradient
        through a clamp is zero outside its limits.

    Raises:
        ValueError: shapes, dtypes or options do not fit together; the message has every
            broken rule. Limits of the chip (`H` a multiple of 128, clamps for few rows
            only) are reported by `neuronjax.can` and refused for tiles alone.
        NotImplementedError: an option is not built yet.

    Source:
        Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 5; aws-neuron/
        nki-library, `core/mlp/mlp.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> h, w = jnp.array([[1.0, -1.0]]), jnp.eye(2)
        >>> mlp(h, w, w, w, skip_gate_proj=True, up_clamp_lower_limit=0.0)[0]
        Array([[0.7310586, 0.       ]], dtype=float32)
    """
    if use_tkg_down_proj_optimized_layout:
        down_proj_weights_tensor = _logical(down_proj_weights_tensor, int(lnc))
    outs = mlp_kernel(
        hidden_tensor,
        gate_proj_weights_tensor,
        up_proj_weights_tensor,
        down_proj_weights_tensor,
        normalization_weights_tensor,
        normalization_bias_tensor,
        gate_proj_bias_tensor,
        up_proj_bias_tensor,
        down_proj_bias_tensor,
        fused_add_tensor,
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
    )
    return list(outs) if store_fused_add_result else [outs]


def _logical(stored: Any, lnc: int) -> jax.Array:
    """The down weight `[I, H]` from its layout of unit strides for `lnc` cores."""
    rows, width = stored.shape
    lanes = stored.reshape(rows, lnc, width // PARTITIONS // lnc, PARTITIONS)
    return jnp.swapaxes(lanes, 2, 3).reshape(rows, width)
