"""The emitters of MLPs with quantized weights: the same NAMEs, scales appended."""

from types import SimpleNamespace
from typing import Any

from neuronjax.primitives import contracts
from neuronjax.primitives.known import require_divisors
from neuronjax.primitives.mlp import (
    mx_rules,  # noqa: F401  enters the rows
    quantized_rules,  # noqa: F401  enters the rows
    rules,  # noqa: F401
)
from neuronjax.primitives.mlp.facts import facts
from neuronjax.primitives.mlp.macro import Operand, emit
from neuronjax.primitives.mlp.mx_facts import config_of as mx_config
from neuronjax.primitives.mlp.quantized_facts import IN_SCALES, forced, takes_prefill
from neuronjax.primitives.options import (
    ActFnType,
    NormType,
    QuantizationType,
    member,
)


def require_values(function: str, call: SimpleNamespace, hidden: Any) -> None:
    """Refuses scales of activations that divide, where they are known.

    Decode reads none; ROW and MX have none.
    """
    prefill = takes_prefill(tuple(hidden.shape), *forced(call))
    if prefill:
        scales = {name: getattr(call, name) for name in IN_SCALES}
        require_divisors(function, **scales)


def _config(call: SimpleNamespace) -> dict[str, Any]:
    if member(QuantizationType, call.quant_type) is QuantizationType.MX:
        return mx_config(call)
    prefill = takes_prefill(tuple(call.hidden.shape), *forced(call))
    return dict(
        quant_mode="QuantOnly",
        quantization=member(QuantizationType, call.quant_type).name,
        is_fp8_kernel=True,
        prefill=bool(prefill),
        quant_clipping_bound=float(call.quant_clipping_bound),
        activation_clipping_bound=float(call.activation_clipping_bound),
    )


@contracts.contracted(facts("quant_mlp_kernel"))
def quant_mlp_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    gate_up_w_scale: Operand | None = None,
    down_w_scale: Operand | None = None,
    gate_up_in_scale: Operand | None = None,
    down_in_scale: Operand | None = None,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    gate_b: Operand | None = None,
    up_b: Operand | None = None,
    down_b: Operand | None = None,
    fused_add: Operand | None = None,
    *,
    quant_type: QuantizationType | str = "ROW",
    weight_dtype: Any = None,
    quant_clipping_bound: float = 0.0,
    activation_clipping_bound: float = 0.0,
    force_cte_mode: bool = False,
    force_tkg_mode: bool = False,
    activation: ActFnType | str = "SiLU",
    norm: NormType | str = "none",
    eps: float = 1e-6,
    skip_gate: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    store_fused_add: bool = False,
    out_dtype: Any = None,
    **hints: Any,
) -> Operand | tuple[Operand, Operand]:
    """Emits the NAMEs of `mlp_kernel`, weights quantized (`quant_mode="QuantOnly"`).

    `neuronjax.mlp` has the equations. With `ROW` and `STATIC` decode (at most 96 rows)
    quantizes no activation and prefill multiplies fp8 codes; `MX` rounds activations in
    both. Weights and scales are constants: their gradient is zero. A tile of a scale
    lies on its last axis.

    Args:
        hidden: as in `mlp_kernel`; in prefill also float8_e4m3, for ROW packed as
            `[B, S, H + 4]`: a row's last four bytes are its float32 scale.
        gate_w: as in `mlp_kernel`, float8_e4m3 or float8_e4m3fn.
        up_w: the same.
        down_w: the same.
        gate_up_w_scale: float32, a row for gate and one for up (up alone with
            `skip_gate`): `[2, I]` for ROW, `[2, 1]` for STATIC.
        down_w_scale: float32, `[1, H]` for ROW, `[1, 1]` for STATIC.
        gate_up_in_scale: STATIC: the scale of an fp8 `hidden`, `[1, 1]`; in prefill
            positive and finite.
        down_in_scale: STATIC: the scale of the gated values in prefill, `[1, 1]`; the
            same.
        gamma: as in `mlp_kernel`.
        beta: as in `mlp_kernel`.
        gate_b: as in `mlp_kernel`.
        up_b: as in `mlp_kernel`.
        down_b: as in `mlp_kernel`.
        fused_add: as in `mlp_kernel`.
        quant_type: `ROW`, `STATIC`, or `MX`: packed weights `[128, H/512, I]` and
            `[Ip, tiles, H]`, scales uint8 `[2, 16, H/512, I]` and `[Ip/8, tiles, H]`,
            biases of gate and up `[Ip, tiles, 4]`, no tiles, no addition.
        weight_dtype: MX: the format of the weights; that of their container unless
            named: float4_e2m1fn in uint16, float8_e4m3fn in uint32.
        quant_clipping_bound: ROW in prefill: gated values are clipped to it; 0 clips
            none.
        activation_clipping_bound: ROW in decode: the normed rows and the gated values
            are clipped to it; 0 clips none.
        force_cte_mode: prefill for few rows.
        force_tkg_mode: decode for many rows.
        activation: as in `mlp_kernel`.
        norm: as in `mlp_kernel`.
        eps: as in `mlp_kernel`.
        skip_gate: as in `mlp_kernel`.
        gate_clamp_upper_limit: as in `mlp_kernel`.
        gate_clamp_lower_limit: as in `mlp_kernel`.
        up_clamp_upper_limit: as in `mlp_kernel`.
        up_clamp_lower_limit: as in `mlp_kernel`.
        store_fused_add: as in `mlp_kernel`.
        out_dtype: as in `mlp_kernel`.
        **hints: as in `mlp_kernel`.

    Returns:
        An array or tile of the shape of `hidden`; with `store_fused_add` that and the
        sum.
    """
    call = SimpleNamespace(**locals())
    require_values("quant_mlp_kernel", call, hidden)
    call.quantized = _config(call)
    form = "none" if fused_add is None else "prologue"
    outs = emit("quant_mlp_kernel", call, form, addend=fused_add)
    return outs if store_fused_add else outs[0]


@contracts.contracted(facts("quant_mlp_fused_add_kernel"))
def quant_mlp_fused_add_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    mlp_out: Operand | None = None,
    attn_out: Operand | None = None,
    gate_up_w_scale: Operand | None = None,
    down_w_scale: Operand | None = None,
    gate_up_in_scale: Operand | None = None,
    down_in_scale: Operand | None = None,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    gate_b: Operand | None = None,
    up_b: Operand | None = None,
    down_b: Operand | None = None,
    *,
    quant_type: QuantizationType | str = "ROW",
    weight_dtype: Any = None,
    quant_clipping_bound: float = 0.0,
    activation_clipping_bound: float = 0.0,
    force_cte_mode: bool = False,
    force_tkg_mode: bool = False,
    activation: ActFnType | str = "SiLU",
    norm: NormType | str = "none",
    eps: float = 1e-6,
    skip_gate: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    **hints: Any,
) -> Operand:
    """Emits `quant_mlp_kernel` with `attn_out` added to the result (`"epilogue"`).

    Args:
        hidden: as in `quant_mlp_kernel`.
        gate_w: as in `quant_mlp_kernel`.
        up_w: as in `quant_mlp_kernel`.
        down_w: as in `quant_mlp_kernel`.
        mlp_out: the destination. Its shape and dtype are the result's; its values are
            never read, so that its gradient is zero.
        attn_out: the residual, of the shape of the result.
        gate_up_w_scale: as in `quant_mlp_kernel`.
        down_w_scale: as in `quant_mlp_kernel`.
        gate_up_in_scale: as in `quant_mlp_kernel`.
        down_in_scale: as in `quant_mlp_kernel`.
        gamma: as in `quant_mlp_kernel`.
        beta: as in `quant_mlp_kernel`.
        gate_b: as in `quant_mlp_kernel`.
        up_b: as in `quant_mlp_kernel`.
        down_b: as in `quant_mlp_kernel`.
        quant_type: as in `quant_mlp_kernel`.
        weight_dtype: as in `quant_mlp_kernel`.
        quant_clipping_bound: as in `quant_mlp_kernel`.
        activation_clipping_bound: as in `quant_mlp_kernel`.
        force_cte_mode: as in `quant_mlp_kernel`.
        force_tkg_mode: as in `quant_mlp_kernel`.
        activation: as in `quant_mlp_kernel`.
        norm: as in `quant_mlp_kernel`.
        eps: as in `quant_mlp_kernel`.
        skip_gate: as in `quant_mlp_kernel`.
        gate_clamp_upper_limit: as in `quant_mlp_kernel`.
        gate_clamp_lower_limit: as in `quant_mlp_kernel`.
        up_clamp_upper_limit: as in `quant_mlp_kernel`.
        up_clamp_lower_limit: as in `quant_mlp_kernel`.
        **hints: as in `quant_mlp_kernel`.

    Returns:
        An array or tile of the shape and dtype of `mlp_out`.
    """
    call = SimpleNamespace(**locals(), out_dtype=getattr(mlp_out, "dtype", None))
    require_values("quant_mlp_fused_add_kernel", call, hidden)
    call.quantized = _config(call)
    form = "none" if attn_out is None else "epilogue"
    outs = emit("quant_mlp_fused_add_kernel", call, form, residual=attn_out)
    return outs[0]
