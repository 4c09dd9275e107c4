"""The rules of `rmsnorm_quant` calls: what they read, and one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_flag
from neuronjax.primitives.known import known
from neuronjax.primitives.options import (
    NORM_CONFIG,
    NormType,
    QuantizationType,
    member,
    odd_dtype,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

PUBLIC, EMITTER = "rmsnorm_quant", "rmsnorm_quant_kernel"
ALL = (PUBLIC, EMITTER)
NORMS = ("rms", "none")
ARGUMENTS = {
    PUBLIC: dict(hidden="hidden", gain="ln_w", scale="input_dequant_scale"),
    EMITTER: dict(hidden="hidden_in", gain="weight", scale="dst_scale"),
}
EPS_TYPE = "Expecting eps input to have type float"
DST_DTYPE = "dst_dtype must be float32 or bfloat16."
_KINDS = (QuantizationType.ROW, QuantizationType.STATIC)


def norm_word(norm: Any) -> str | None:
    """`"rms"` or `"none"` for a word or a `NormType`; None for another."""
    word = NORM_CONFIG.get(member(NormType, norm), norm)
    return word if word in NORMS else None


def public_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `rmsnorm_quant`."""
    kind = member(QuantizationType, getattr(call.kargs, "quantization_type", None))
    settings = {k: getattr(call.kargs, k, None) for k in ("eps", "lower_bound")}
    facts = _facts(call, getattr(call.kargs, "norm_type", None), settings)
    return facts | dict(kind=kind, is_static=kind is QuantizationType.STATIC)


def emitter_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `rmsnorm_quant_kernel`."""
    settings = dict(eps=call.eps, lower_bound=call.lower_bound)
    facts = _facts(call, call.norm, settings)
    static = call.dst_scale is not None
    return facts | dict(kind=_KINDS[static], is_static=static)


def _facts(call: SimpleNamespace, norm: Any, settings: dict) -> dict[str, Any]:
    names = ARGUMENTS[call.function]
    given = {key: getattr(call, name) for key, name in names.items()}
    shapes: dict[str, tuple[int, ...]] = {
        key: tuple(getattr(x, "shape", None) or ()) for key, x in given.items()
    }
    shape = shapes["hidden"]
    numbers = {key: _number(value) for key, value in settings.items()}
    rows = 1
    for size in shape[:-1]:
        rows = rows * size
    deep = len(shape) > 2
    return dict(
        arg=SimpleNamespace(**names),
        shape=SimpleNamespace(**shapes),
        given=SimpleNamespace(**given),
        tiled=isinstance(given["hidden"], MemrefTile),
        norm_word=norm_word(norm),
        norm_given=norm,
        misfit=odd_dtype({names[key]: x for key, x in given.items()}),
        off_axis=_off_axis(given, names, shapes),
        traced=", ".join(k for k, v in numbers.items() if v is None),
        bound=numbers["lower_bound"] or 0.0,
        eps_value=numbers["eps"] or 0.0,
        H=shape[-1] if shape else 0,
        B=shape[0] if deep else 1,
        S=rows // shape[0] if deep and shape[0] else 1,
        rows=1 if deep else rows,
        is_packed=getattr(call, "packed", None),
    )


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        return None


def _off_axis(given: dict, names: dict, shapes: dict) -> str:
    axes = dict(hidden=-1, gain=-1, scale=-2)
    for key, x in given.items():
        if isinstance(x, MemrefTile) and x.axis != len(shapes[key]) + axes[key]:
            return f"{names[key]} axis = {len(shapes[key]) + axes[key]}, got {x.axis}"
    return ""


def _settings(**changes: Any) -> SimpleNamespace:
    whole = dict(lower_bound=0.0, norm_type="RMS_NORM", quantization_type="ROW")
    return SimpleNamespace(**dict(whole, eps=1e-6) | changes)


def _arguments(tiles: bool = False, **changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape.

    Arrays and settings are named as the facts name them.
    """

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(hidden=(2, 8), gain=(8,)) | changes
        arrays = {}
        for key, name in ARGUMENTS[function].items():
            x: Any = given.pop(key, None)
            if type(x) is tuple:
                big = np.prod(x) > 1 << 16
                x = jax.ShapeDtypeStruct(x, jnp.float32) if big else jnp.zeros(x)
            if tiles and x is not None:
                x = MemrefTile.from_tensor(x, x.ndim - (2 if key == "scale" else 1))
            arrays[name] = x
        if function == PUBLIC:
            packed = {"packed": given.pop("packed")} if "packed" in given else {}
            return dict(arrays, kargs=_settings(**given), **packed)
        if "norm_type" in given:
            given["norm"] = given.pop("norm_type")
        return arrays | given

    return build


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    kwargs.setdefault("stage", 2)
    if not kwargs.get("literal"):
        message = "{function}: " + message
    contracts.add(
        Contract(f"rmsnorm_quant.{rule}", functions, message, *args, **kwargs)
    )


def _gain_misfits(c: SimpleNamespace) -> bool:
    if c.norm_word == "none":
        return c.given.gain is not None
    return c.shape.gain not in ((c.H,), (1, c.H))


contracts.add(
    only_hints(EMITTER, _arguments()),
    *only_flags(EMITTER),
    contracts.all_or_none_tiles(
        EMITTER,
        ARGUMENTS[EMITTER].values(),
        lambda function: dict(
            hidden_in=MemrefTile.from_tensor(jnp.zeros((2, 8)), 1), weight=jnp.zeros(8)
        ),
    ),
)
_row(
    "kargs",
    (PUBLIC,),
    "kargs must be an RmsNormQuantKernelArgs, got {kargs!r}",
    lambda c: not all(hasattr(c.kargs, key) for key in vars(_settings())),
    example=lambda function: _arguments()(function) | dict(kargs=None),
    stage=0,
)
_row(
    "tensors",
    (PUBLIC,),
    "its operands must be tensors; emit.rmsnorm_quant_kernel takes tiles",
    lambda c: any(isinstance(x, MemrefTile) for x in vars(c.given).values()),
    example=_arguments(tiles=True),
    stage=1,
)
_row(
    "eps_type",
    (EMITTER,),
    EPS_TYPE,
    lambda c: not isinstance(c.eps, float | np.floating),
    example=_arguments(eps=1),
    stage=1,
    literal=True,
)
_row(
    "dst_dtype",
    (EMITTER,),
    DST_DTYPE,
    lambda c: c.dst_dtype not in ("float32", "bfloat16", jnp.float32, jnp.bfloat16),
    example=_arguments(dst_dtype="float16"),
    stage=1,
    literal=True,
)
_row(
    "rank",
    ALL,
    "{arg.hidden} must have shape [..., H] with at least two axes, got {shape.hidden}",
    lambda c: len(c.shape.hidden) < 2,
    example=_arguments(hidden=(8,)),
    stage=1,
)
_row(
    "dtype",
    ALL,
    "operands must be bfloat16, float16, float32 or float64, got {misfit}",
    lambda c: c.misfit,
    example=lambda function: _arguments(hidden=jnp.zeros((2, 8), jnp.int8))(function),
    stage=1,
)
_row(
    "norm",
    ALL,
    "the norm must be RMS_NORM or NO_NORM, got {norm_given}",
    lambda c: c.norm_word is None,
    example=_arguments(norm_type="LAYER_NORM"),
    stage=1,
)
_row(
    "quantization",
    (PUBLIC,),
    "quantization_type must be ROW or STATIC, got {kargs.quantization_type}",
    lambda c: c.kind not in _KINDS,
    example=_arguments(quantization_type="MX"),
    stage=1,
)
_row(
    "static",
    ALL,
    "eps and lower_bound must be Python numbers, known while tracing; not so: {traced}",
    lambda c: c.traced,
    example=_arguments(lower_bound=np.zeros(2)),
    stage=1,
)
_row(
    "tile_axis",
    (EMITTER,),
    "tiles must have {off_axis}",
    lambda c: c.off_axis,
    example=lambda function: (
        _arguments(tiles=True)(function)
        | dict(hidden_in=MemrefTile.from_tensor(jnp.zeros((2, 8)), 0))
    ),
    stage=1,
)
_row(
    "positive",
    ALL,
    "H of {arg.hidden} must be positive, got {shape.hidden}",
    lambda c: c.shape.hidden[-1] == 0,
    example=_arguments(hidden=(2, 0)),
)
_row(
    "lower_bound",
    ALL,
    "lower_bound must not be negative, got {bound}",
    lambda c: not c.bound >= 0,
    example=_arguments(lower_bound=-0.1),
)
_row(
    "eps",
    ALL,
    "eps must be finite and not negative, got {eps_value}",
    lambda c: not 0 <= c.eps_value < np.inf,
    example=_arguments(eps=-1e-6),
)
_row(
    "gain",
    ALL,
    "{arg.gain} must have shape [H] or [1, H], H = {H}, with RMS_NORM, and be None "
    "with NO_NORM, got {shape.gain}",
    _gain_misfits,
    example=_arguments(gain=(4,)),
)
_row(
    "scale",
    ALL,
    "{arg.scale} must have shape (128, 1) for STATIC and be None for ROW, got "
    "{shape.scale}",
    lambda c: (
        c.shape.scale != (PARTITIONS, 1) if c.is_static else c.given.scale is not None
    ),
    example=lambda function: _static(scale=(1, 1))(function),
)


def _is_bad_scale(scale: Any) -> bool:
    """Whether values known while tracing are several, or cannot divide."""
    held = known(scale)
    if held is None:
        return False
    held = held.astype(np.float64)
    return bool((held != held.flat[0]).any() or not 0 < held.flat[0] < np.inf)


def _static(**changes: Any) -> Callable[[str], dict[str, Any]]:
    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(scale=(128, 1)) | changes
        if function == PUBLIC:
            given["quantization_type"] = "STATIC"
        return _arguments(**given)(function)

    return build


_row(
    "scale_value",
    ALL,
    "{arg.scale} must hold one positive, finite value on every partition",
    lambda c: c.is_static and _is_bad_scale(c.given.scale),
    example=_static(scale=np.zeros((128, 1), np.float32)),
)
_row(
    "bound_of_rows",
    ALL,
    "lower_bound clips rows that get their own scale: it must be 0 for STATIC, got "
    "{bound}",
    lambda c: c.is_static and c.bound > 0,
    example=_static(lower_bound=0.5),
)
_row(
    "packed_flag",
    (PUBLIC,),
    "packed must be None, True or False, known while tracing, got {packed!r}",
    lambda c: c.packed is not None and not is_flag(c.packed),
    example=_arguments(packed="no"),
    stage=1,
)
_row(
    "packed",
    ALL,
    "packed rows end in their own scale: STATIC has none, and tiles have no such axis",
    lambda c: c.is_packed and (c.is_static or c.tiled),
    example=_static(packed=True),
)
_row(
    "chip_batch",
    ALL,
    "the chip takes at most 2 batches for {arg.hidden}, got {shape.hidden}",
    size=Size("B", lambda c: c.B, maximum=2),
    example=_arguments(hidden=(3, 2, 8)),
    tag="hw",
    stage=3,
)
_row(
    "chip_seq",
    ALL,
    "the chip takes at most 32768 rows a batch for {arg.hidden}, got {shape.hidden}",
    size=Size("S", lambda c: c.S, maximum=32768),
    example=_arguments(hidden=(1, 32769, 8)),
    tag="hw",
    stage=3,
)
_row(
    "chip_rows",
    ALL,
    "the chip takes at most 65536 rows for {arg.hidden} of two axes, got "
    "{shape.hidden}",
    size=Size("rows", lambda c: c.rows, maximum=65536),
    example=_arguments(hidden=(65537, 8)),
    tag="hw",
    stage=3,
)
_row(
    "chip_width",
    ALL,
    "the chip takes H up to 16384 for {arg.hidden}, got {shape.hidden}",
    size=Size("H", lambda c: c.H, maximum=16384),
    example=_arguments(hidden=(2, 16385), gain=(16385,)),
    tag="hw",
    stage=3,
)
