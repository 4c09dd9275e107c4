"""The rules of MLP calls: one row each, for the public function and the emitters."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.known import is_epsilon
from neuronjax.primitives.mlp.facts import (
    ALL,
    ARGUMENTS,
    DTYPES,
    LIMITS,
    OPERANDS,
    arguments,
)
from neuronjax.primitives.options import (
    ActFnType,
    NormType,
    QuantizationType,
    member,
    members,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

PAIR = "Fused add requires both mlp_out and attn_out to be provided or neither of them"
FUSED_ADD = ("mlp_fused_add_kernel", "quant_mlp_fused_add_kernel")
_HIDDEN = (1, 2, 8)
_HINTS = (
    "use_tkg_gate_up_proj_column_tiling",
    "use_tkg_down_proj_column_tiling",
    "force_cte_mode",
)
_WEIGHTED = (NormType.RMS_NORM, NormType.LAYER_NORM)


def _row(rule: str, message: str, violated=None, functions=ALL, **kwargs) -> None:
    kwargs.setdefault("stage", 2)
    text = "{function}: " + message
    contracts.add(Contract(f"mlp.{rule}", functions, text, violated, **kwargs))


def _mixed(function: str) -> dict[str, Any]:
    tile = MemrefTile.from_tensor(jnp.zeros(_HIDDEN), 2)
    return arguments(hidden=tile)(function)


for _emitter in ALL[1:]:
    contracts.add(only_hints(_emitter, arguments(), _HINTS))
contracts.add(*only_flags(*ALL))
for _function, _names in ARGUMENTS.items():
    _ios = [_names[key] for key in OPERANDS if key in _names]
    contracts.add(contracts.all_or_none_tiles(_function, _ios, _mixed))
contracts.add(
    Contract(
        "mlp.fused_add_pair",
        FUSED_ADD,
        PAIR,
        lambda c: (c.mlp_out is None) != (c.attn_out is None),
        example=arguments(mlp_out=_HIDDEN),
        stage=0,
        literal=True,
    )
)
_row(
    "required",
    "{missing} must be given",
    lambda c: c.missing,
    example=arguments(down_w=None),
    stage=1,
)
_row(
    "rank",
    "{arg.hidden} must have shape [B, S, H] or [T, H] and {arg.up_w} [H, I], got "
    "{shape.hidden} and {shape.up_w}",
    lambda c: not c.missing and not c.ranked,
    example=arguments(hidden=(8,)),
    stage=1,
)
_row(
    "activation",
    f"{{arg.activation}} must be one of {members(ActFnType)}, got {{kind_given!r}}",
    lambda c: c.kind is None,
    example=arguments(activation="ReLU"),
    stage=1,
)
_row(
    "norm",
    f"{{arg.norm}} must be one of {members(NormType)}, got {{norm_given}}",
    lambda c: c.norm_kind is None,
    example=arguments(norm="BATCH_NORM"),
    stage=1,
)
_row(
    "quantization",
    f"quantization_type must be one of {members(QuantizationType)}, got "
    "{quantization_type!r}",
    lambda c: member(QuantizationType, c.quantization_type) is None,
    functions=("mlp",),
    example=arguments(quantization_type="INT3"),
    stage=1,
)
_row(
    "dtype",
    "operands must be bfloat16, float16, float32 or float64, got {misfit}",
    lambda c: c.misfit,
    example=lambda function: arguments(up_b=jnp.zeros((1, 6), jnp.int8))(function),
    stage=1,
)
_row(
    "static",
    "eps, clamp limits and lnc must be Python numbers, known while tracing, got "
    "{traced}",
    lambda c: c.traced,
    example=arguments(eps=(2,)),
    stage=1,
)
_row(
    "eps",
    "eps must be finite and at least 0, got {eps}",
    lambda c: not c.traced and not is_epsilon(c.eps),
    example=arguments(eps=-1.0),
    stage=1,
)


def _crossed(c: SimpleNamespace) -> bool:
    """Whether a clamp has no value between its limits; a NaN leaves none."""

    def keeps(upper: Any, lower: Any) -> bool:
        high = math.inf if upper is None else float(upper)
        return (-math.inf if lower is None else float(lower)) <= high

    limits = [getattr(c, key) for key in LIMITS]
    return not (keeps(*limits[:2]) and keeps(*limits[2:]))


_row(
    "clamps",
    "a clamp's upper limit must be at least its lower one, and neither NaN, got "
    "{gate_clamp_lower_limit} to {gate_clamp_upper_limit} for the gate and "
    "{up_clamp_lower_limit} to {up_clamp_upper_limit} for up",
    lambda c: not c.traced and _crossed(c),
    example=arguments(up_clamp_upper_limit=-1.0, up_clamp_lower_limit=1.0),
    stage=1,
)


def _odd_output(c: SimpleNamespace) -> bool:
    try:
        return c.out is not None and jnp.dtype(c.out) not in DTYPES
    except TypeError:
        return True


_row(
    "output_dtype",
    "{arg.out_dtype} must be bfloat16, float16, float32 or float64, got {out}",
    _odd_output,
    functions=("mlp", "mlp_kernel", "quant_mlp_kernel"),
    example=arguments(out_dtype="int8"),
    stage=1,
)
_row(
    "tile_axis",
    "{off_axis}",
    lambda c: c.off_axis,
    example=lambda function: arguments(
        tiles=True, up_w=MemrefTile.from_tensor(jnp.zeros((8, 6)), 1)
    )(function),
    stage=1,
)
_row(
    "positive",
    "H of {arg.hidden} and no axis of {arg.up_w} may be 0, got {shape.hidden} and "
    "{shape.up_w}",
    lambda c: c.shape.hidden[-1] == 0 or 0 in c.shape.up_w,
    example=arguments(hidden=(1, 2, 0)),
)
_row(
    "shapes",
    "{unlike}",
    lambda c: c.unlike,
    example=arguments(down_w=(6, 9)),
)
_row(
    "gain",
    "{arg.gamma} must be given for {arg.norm} RMS_NORM and LAYER_NORM, for no other",
    lambda c: (c.gamma is not None) != (c.norm_kind in _WEIGHTED),
    example=arguments(norm="RMS_NORM"),
)
_row(
    "offset",
    "{arg.beta} is for {arg.norm} LAYER_NORM only",
    lambda c: c.beta is not None and c.norm_kind is not NormType.LAYER_NORM,
    example=arguments(norm="RMS_NORM", gamma=(1, 8), beta=(1, 8)),
)
_row(
    "store",
    "{arg.store} needs {arg.addend}",
    lambda c: c.store and c.addend is None,
    functions=("mlp", "mlp_kernel", "quant_mlp_kernel"),
    example=arguments(store=True),
)


def _gated(c: SimpleNamespace) -> bool:
    limits = (c.gate_clamp_upper_limit, c.gate_clamp_lower_limit)
    return c.skip and (c.gate_b is not None or limits != (None, None))


_row(
    "skipped_gate",
    "{arg.skip_gate} leaves no gate for {arg.gate_b} and gate clamps",
    _gated,
    example=arguments(skip_gate=True, gate_b=(1, 6)),
)
_row(
    "stored_layout",
    "use_tkg_down_proj_optimized_layout takes tensors with H a multiple of 128 * lnc "
    "= 128 * {lnc}, got {shape.hidden}",
    lambda c: (
        c.use_tkg_down_proj_optimized_layout
        and (c.tiled or c.lnc < 1 or c.H % (PARTITIONS * int(c.lnc)) != 0)
    ),
    functions=("mlp",),
    example=arguments(use_tkg_down_proj_optimized_layout=True),
)
_row(
    "chip_width",
    "the chip takes H in multiples of 128 for {arg.hidden}, got {shape.hidden}",
    size=Size("H", lambda c: c.H, multiple=PARTITIONS),
    example=arguments(tiles=True),
    tag="hw",
    stage=3,
)


_row(
    "chip_clamps",
    "the chip clamps on its decode path only (B * S <= 96, no force_cte_mode), got "
    "{shape.hidden}",
    lambda c: (
        any(getattr(c, key) is not None for key in LIMITS) and c.prefill is not False
    ),
    functions=("mlp",),
    example=arguments(hidden=(1, 97, 8), up_clamp_upper_limit=1.0),
    tag="hw",
    stage=3,
)
_row(
    "chip_stored_layout",
    "the chip takes use_tkg_down_proj_optimized_layout on its decode path only, with "
    "use_tkg_down_proj_column_tiling=False",
    lambda c: (
        c.use_tkg_down_proj_optimized_layout
        and (c.use_tkg_down_proj_column_tiling or c.prefill is not False)
    ),
    functions=("mlp",),
    example=arguments(
        hidden=(1, 2, 128),
        gate_w=(128, 6),
        up_w=(128, 6),
        down_w=(6, 128),
        use_tkg_down_proj_optimized_layout=True,
    ),
    tag="hw",
    stage=3,
)
