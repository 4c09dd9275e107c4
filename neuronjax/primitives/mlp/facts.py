"""What the rules of the MLP read, from the public function and the emitters alike.

The functions call their arguments differently: `ARGUMENTS` translates, so that each
rule is written once.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.mlp.mx_facts import logical_operands, mx_facts
from neuronjax.primitives.mlp.quantized_facts import quantized_facts
from neuronjax.primitives.options import NORM_CONFIG, ActFnType, NormType, member
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

# The operands, and the axis that a tile of each lays on the partitions.
TILE_AXES = dict(
    hidden=-1,
    gate_w=0,
    up_w=0,
    down_w=0,
    gamma=-1,
    beta=-1,
    gate_b=-1,
    up_b=-1,
    down_b=-1,
    addend=-1,
    residual=-1,
    mlp_out=-1,
    gate_up_w_scale=-1,
    gate_w_scale=-1,
    up_w_scale=-1,
    down_w_scale=-1,
    gate_up_in_scale=-1,
    down_in_scale=-1,
)
OPERANDS = tuple(TILE_AXES)
LIMITS = (
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
)
_PUBLIC = dict(
    hidden="hidden_tensor",
    gate_w="gate_proj_weights_tensor",
    up_w="up_proj_weights_tensor",
    down_w="down_proj_weights_tensor",
    gamma="normalization_weights_tensor",
    beta="normalization_bias_tensor",
    gate_b="gate_proj_bias_tensor",
    up_b="up_proj_bias_tensor",
    down_b="down_proj_bias_tensor",
    addend="fused_add_tensor",
    activation="activation_fn",
    norm="normalization_type",
    skip_gate="skip_gate_proj",
    store="store_fused_add_result",
    out_dtype="output_dtype",
    quantization="quantization_type",
    gate_w_scale="gate_w_scale",
    up_w_scale="up_w_scale",
    down_w_scale="down_w_scale",
    gate_up_in_scale="gate_up_in_scale",
    down_in_scale="down_in_scale",
)
_EMITTER = dict(
    {name: name for name in OPERANDS[: OPERANDS.index("addend")]},
    activation="activation",
    norm="norm",
    skip_gate="skip_gate",
    store="store_fused_add",
    out_dtype="out_dtype",
)
_FUSED = {
    key: name for key, name in _EMITTER.items() if key not in ("out_dtype", "store")
}
_SCALES = ("gate_up_w_scale", "down_w_scale", "gate_up_in_scale", "down_in_scale")
_QUANTIZED = {name: name for name in _SCALES} | dict(quantization="quant_type")
ARGUMENTS = {
    "mlp": _PUBLIC,
    "mlp_kernel": dict(_EMITTER, addend="fused_add"),
    "mlp_fused_add_kernel": dict(_FUSED, residual="attn_out", mlp_out="mlp_out"),
}
ARGUMENTS["quant_mlp_kernel"] = ARGUMENTS["mlp_kernel"] | _QUANTIZED
ARGUMENTS["quant_mlp_fused_add_kernel"] = ARGUMENTS["mlp_fused_add_kernel"] | _QUANTIZED
ALL = tuple(ARGUMENTS)
QUANTIZED = ALL[3:]
DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
# The words of the config bag are norms too.
_NORM_WORDS = {word: kind for kind, word in NORM_CONFIG.items()}


def norm_of(value: Any) -> NormType | None:
    """The norm that an argument names: a member, its name, or the config bag's word."""
    if isinstance(value, str) and value in _NORM_WORDS:
        return _NORM_WORDS[value]
    return member(NormType, value)


def norm_word(value: Any) -> str:
    """The config bag's word for a norm that the rules have let pass."""
    kind = norm_of(value)
    assert kind is not None
    return NORM_CONFIG[kind]


def facts(function: str) -> Callable[[SimpleNamespace], dict[str, Any]]:
    """What the rows read, from the arguments of `function`."""
    names = ARGUMENTS[function]

    def read(call: SimpleNamespace) -> dict[str, Any]:
        def given(key: str, default: Any = None) -> Any:
            return getattr(call, names[key]) if key in names else default

        operands = {key: given(key) for key in OPERANDS}
        mx = mx_facts(call, operands, names)
        matrices = logical_operands(operands) if mx["is_mx"] else operands
        shape = {key: getattr(x, "shape", None) for key, x in matrices.items()}
        hidden, up = shape["hidden"] or (), shape["up_w"] or ()
        quantized = quantized_facts(call, operands, names)
        return operands | dict(
            vars(quantized) | mx,
            arg=SimpleNamespace(**dict(zip(OPERANDS, OPERANDS, strict=True)) | names),
            shape=SimpleNamespace(**shape),
            H=quantized.width,
            I=up[1] if len(up) == 2 else 0,
            ranked=len(hidden) >= 2 and len(up) == 2,
            kind=member(ActFnType, given("activation")),
            kind_given=given("activation"),
            norm_kind=norm_of(given("norm")),
            norm_given=given("norm"),
            skip=bool(given("skip_gate")),
            store=bool(given("store", False)),
            missing=_missing(operands, names, bool(given("skip_gate"))),
            misfit=_misfit(operands, names, quantized.kind_of_weights),
            unlike=_unlike(matrices, names, quantized.width),
            traced=_traced(call),
            off_axis=_off_axis(operands, names),
            out=given("out_dtype", getattr(operands["mlp_out"], "dtype", None)),
            tiled=any(isinstance(x, MemrefTile) for x in operands.values()),
        )

    return read


def _missing(operands: dict[str, Any], names: dict[str, str], skip: bool) -> str:
    needed = ("hidden", "up_w", "down_w") + (() if skip else ("gate_w",))
    return ", ".join(names[key] for key in needed if operands[key] is None)


def _misfit(operands: dict[str, Any], names: dict[str, str], kind: Any) -> str:
    """Every operand of a dtype that is not built, described.

    Scales have a rule of their own; quantized, so do weights and `hidden`.
    """
    found = []
    own = () if kind is None else ("hidden", "gate_w", "up_w", "down_w")
    for key, x in operands.items():
        dtype = getattr(x, "dtype", None)
        if x is None or key in own or key.endswith("_scale"):
            continue
        if dtype is None or dtype not in DTYPES:
            found.append(f"{names[key]} of dtype {dtype}")
    return ", ".join(found)


def _unlike(operands: dict[str, Any], names: dict[str, str], width: int) -> str:
    """Every operand whose shape does not follow from `hidden` and `up_w`."""
    hidden, up = (getattr(operands[key], "shape", ()) for key in ("hidden", "up_w"))
    if len(hidden) < 2 or len(up) != 2:
        return ""
    sizes = dict(H=width, I=up[1])
    wanted = dict(up_w="HI", gate_w="HI", down_w="IH", gamma="1H", beta="1H")
    wanted |= dict(gate_b="1I", up_b="1I", down_b="1H")
    shapes = {key: tuple(sizes.get(a, 1) for a in axes) for key, axes in wanted.items()}
    whole = (*hidden[:-1], width)
    shapes |= dict.fromkeys(("addend", "residual", "mlp_out"), whole)
    found = []
    for key, shape in shapes.items():
        x = operands[key]
        held = getattr(x, "shape", type(x).__name__)
        if x is not None and held != shape:
            axes = f"[{', '.join(wanted[key])}] = " if key in wanted else ""
            found.append(f"{names[key]} must have shape {axes}{shape}, got {held}")
    return "; ".join(found)


def _traced(call: SimpleNamespace) -> str:
    """The first setting that is no Python number, described; empty if none is."""
    for key in ("eps", *LIMITS, "lnc"):
        value = vars(call).get(key, 0)
        if not _is_number(value) and (value is not None or key == "eps"):
            return f"{key} of type {type(value).__name__}"
    return ""


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _off_axis(operands: dict[str, Any], names: dict[str, str]) -> str:
    """The first tile that is not as `MemrefTile.from_tensor` makes it, described."""
    for key, x in operands.items():
        if not isinstance(x, MemrefTile):
            continue
        wanted, size = TILE_AXES[key] % len(x.shape), x.shape[x.axis]
        if x.axis != wanted:
            return f"{names[key]} must lie on its axis {wanted}, got axis {x.axis}"
        if x.data.shape[0] < min(size, PARTITIONS):
            return f"{names[key]} must fill its partitions, got data of {x.data.shape}"
    return ""


def arguments(tiles: bool = False, **changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape of zeros."""

    def build(function: str) -> dict[str, Any]:
        names = ARGUMENTS[function]
        given: dict[str, Any] = dict(hidden=(1, 2, 8), norm="NO_NORM")
        given |= dict(gate_w=(8, 6), up_w=(8, 6), down_w=(6, 8))
        if function in QUANTIZED:
            given |= dict(quantization="ROW")
            given |= dict(gate_up_w_scale=(2, 6), down_w_scale=(1, 8))
        given |= changes
        arrays = {k: jnp.zeros(v) if type(v) is tuple else v for k, v in given.items()}
        if given.get("quantization") not in (None, "NONE"):
            arrays |= {
                key: arrays[key].astype(E4M3)
                for key in ("gate_w", "up_w", "down_w")
                if isinstance(arrays[key], jax.Array | np.ndarray)
                and arrays[key].dtype == "float32"
            }
        if tiles:
            arrays |= {
                key: MemrefTile.from_tensor(x, TILE_AXES[key])
                for key, x in arrays.items()
                if isinstance(x, jax.Array | np.ndarray)
            }
        return {names.get(key, key): x for key, x in arrays.items()}

    return build
