"""What the rules of the MLP read, from the public function and the emitters alike.

The functions call their arguments differently: `ARGUMENTS` translates, so that each
rule is written once.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

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
)
_EMITTER = dict(
    {name: name for name in OPERANDS if name not in ("addend", "residual", "mlp_out")},
    activation="activation",
    norm="norm",
    skip_gate="skip_gate",
    store="store_fused_add",
    out_dtype="out_dtype",
)
_FUSED = {
    key: name for key, name in _EMITTER.items() if key not in ("out_dtype", "store")
}
ARGUMENTS = {
    "mlp": _PUBLIC,
    "mlp_kernel": dict(_EMITTER, addend="fused_add"),
    "mlp_fused_add_kernel": dict(_FUSED, residual="attn_out", mlp_out="mlp_out"),
}
QUANTIZED = {
    "quant_mlp_kernel": ("hidden", "gate_w", "up_w", "down_w", "gate_up_w_scale"),
    "quant_mlp_fused_add_kernel": ("hidden", "gate_w", "up_w", "down_w", "mlp_out"),
}
ALL = tuple(ARGUMENTS)
DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
# The decode path takes at most this many rows.
DECODE_ROWS = 96
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
        shape = {key: getattr(x, "shape", None) for key, x in operands.items()}
        hidden, up = shape["hidden"] or (), shape["up_w"] or ()
        return operands | dict(
            arg=SimpleNamespace(**dict(zip(OPERANDS, OPERANDS, strict=True)) | names),
            shape=SimpleNamespace(**shape),
            H=hidden[-1] if hidden else 0,
            I=up[1] if len(up) == 2 else 0,
            ranked=len(hidden) >= 2 and len(up) == 2,
            kind=member(ActFnType, given("activation")),
            norm_kind=norm_of(given("norm")),
            norm_given=given("norm"),
            skip=bool(given("skip_gate")),
            store=bool(given("store", False)),
            missing=_missing(operands, names, bool(given("skip_gate"))),
            misfit=_misfit(operands, names),
            unlike=_unlike(operands, names),
            traced=_traced(call),
            off_axis=_off_axis(operands, names),
            out=given("out_dtype"),
            tiled=any(isinstance(x, MemrefTile) for x in operands.values()),
        )

    return read


def _missing(operands: dict[str, Any], names: dict[str, str], skip: bool) -> str:
    needed = ("hidden", "up_w", "down_w") + (() if skip else ("gate_w",))
    return ", ".join(names[key] for key in needed if operands[key] is None)


def _misfit(operands: dict[str, Any], names: dict[str, str]) -> str:
    """Every operand of a dtype that is not built, described."""
    found = []
    for key, x in operands.items():
        dtype = getattr(x, "dtype", None)
        if x is not None and dtype not in DTYPES:
            found.append(f"{names[key]} of dtype {dtype}")
    return ", ".join(found)


def _unlike(operands: dict[str, Any], names: dict[str, str]) -> str:
    """Every operand whose shape does not follow from `hidden` and `up_w`."""
    hidden, up = (getattr(operands[key], "shape", ()) for key in ("hidden", "up_w"))
    if len(hidden) < 2 or len(up) != 2:
        return ""
    sizes = dict(H=hidden[-1], I=up[1])
    wanted = dict(up_w="HI", gate_w="HI", down_w="IH", gamma="1H", beta="1H")
    wanted |= dict(gate_b="1I", up_b="1I", down_b="1H")
    shapes = {key: tuple(sizes.get(a, 1) for a in axes) for key, axes in wanted.items()}
    shapes |= dict.fromkeys(("addend", "residual", "mlp_out"), tuple(hidden))
    found = []
    for key, shape in shapes.items():
        x = operands[key]
        if x is not None and tuple(x.shape) != shape:
            axes = f"[{', '.join(wanted[key])}] = " if key in wanted else ""
            found.append(f"{names[key]} must have shape {axes}{shape}, got {x.shape}")
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
        given = dict(hidden=(1, 2, 8), gate_w=(8, 6), up_w=(8, 6), down_w=(6, 8))
        given = dict(given, norm="NO_NORM") | changes
        arrays = {k: jnp.zeros(v) if type(v) is tuple else v for k, v in given.items()}
        if tiles:
            arrays |= {
                key: MemrefTile.from_tensor(x, TILE_AXES[key])
                for key, x in arrays.items()
                if isinstance(x, jax.Array)
            }
        return {names.get(key, key): x for key, x in arrays.items()}

    return build
