"""The emitters of unquantized MLPs."""

from types import SimpleNamespace
from typing import Any

from neuronjax.primitives import contracts
from neuronjax.primitives.mlp import rules  # noqa: F401  enters the rows
from neuronjax.primitives.mlp.facts import facts
from neuronjax.primitives.mlp.macro import Operand, emit
from neuronjax.primitives.options import ActFnType, NormType


@contracts.contracted(facts("mlp_kernel"))
def mlp_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    gate_b: Operand | None = None,
    up_b: Operand | None = None,
    down_b: Operand | None = None,
    fused_add: Operand | None = None,
    *,
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
    """Emits `MLP`, or for tiles `TiledNativeKernelMLP`: norm, projections, activation.

    A tile lies on `H` (`hidden`, `gate_w`, `up_w`, `gamma`, `beta`, `down_b`,
    `fused_add`) or on `I` (`down_w`, `gate_b`, `up_b`).

    Args:
        hidden: `[B, S, H]` or `[T, H]`.
        gate_w: `[H, I]`; may be None with `skip_gate`, and is ignored then.
        up_w: `[H, I]`.
        down_w: `[I, H]`.
        gamma: the norm's gain, `[1, H]`.
        beta: LayerNorm's offset, `[1, H]`.
        gate_b: `[1, I]`.
        up_b: `[1, I]`.
        down_b: `[1, H]`.
        fused_add: `[B, S, H]`, added to `hidden` before the norm (`"prologue"`).
        activation: `SiLU`, `GELU`, `GELU_Tanh_Approx` or `Swish`.
        norm: `"none"`, `"rms"`, `"layer"`, `"rms_skip_gamma"`, or a `NormType`.
        eps: added to the mean square or variance.
        skip_gate: `act(up)` instead of `act(gate) * up`.
        gate_clamp_upper_limit: the gate's pre-activation is at most this.
        gate_clamp_lower_limit: and at least this.
        up_clamp_upper_limit: the same for up.
        up_clamp_lower_limit: the same for up.
        store_fused_add: return the prologue's sum too.
        out_dtype: dtype of the results; None for that of `hidden`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        An array or tile of the shape of `hidden`; with `store_fused_add` that and the
        sum.
    """
    call = SimpleNamespace(**locals())
    form = "none" if fused_add is None else "prologue"
    outs = emit("mlp_kernel", call, form, addend=fused_add)
    return outs if store_fused_add else outs[0]


@contracts.contracted(facts("mlp_fused_add_kernel"))
def mlp_fused_add_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    mlp_out: Operand | None = None,
    attn_out: Operand | None = None,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    gate_b: Operand | None = None,
    up_b: Operand | None = None,
    down_b: Operand | None = None,
    *,
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
    """Emits the same NAMEs with `attn_out` added to the result (`"epilogue"`).

    The leaf adds it: no add stands in the program. Without both residuals this is
    `mlp_kernel`.

    Args:
        hidden: as in `mlp_kernel`.
        gate_w: as in `mlp_kernel`.
        up_w: as in `mlp_kernel`.
        down_w: as in `mlp_kernel`.
        mlp_out: the destination. Its shape and dtype are the result's; its values are
            never read, so that its gradient is zero.
        attn_out: the residual, of the shape of `hidden`.
        gamma: as in `mlp_kernel`.
        beta: as in `mlp_kernel`.
        gate_b: as in `mlp_kernel`.
        up_b: as in `mlp_kernel`.
        down_b: as in `mlp_kernel`.
        activation: as in `mlp_kernel`.
        norm: as in `mlp_kernel`.
        eps: as in `mlp_kernel`.
        skip_gate: as in `mlp_kernel`.
        gate_clamp_upper_limit: as in `mlp_kernel`.
        gate_clamp_lower_limit: as in `mlp_kernel`.
        up_clamp_upper_limit: as in `mlp_kernel`.
        up_clamp_lower_limit: as in `mlp_kernel`.
        **hints: as in `mlp_kernel`.

    Returns:
        An array or tile of the shape and dtype of `mlp_out`.
    """
    call = SimpleNamespace(**locals(), out_dtype=getattr(mlp_out, "dtype", None))
    form = "none" if attn_out is None else "epilogue"
    outs = emit("mlp_fused_add_kernel", call, form, residual=attn_out)
    return outs[0]
