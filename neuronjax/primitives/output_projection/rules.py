"""The rules of output projection calls: what they read, and one row each."""

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.options import QuantizationType, member, members
from neuronjax.primitives.output_projection.mx_facts import mx_facts
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

PREFILL, DECODE = "output_projection_cte", "output_projection_tkg"
EMITTER = "output_projection_kernel"
ALL = (PREFILL, DECODE, EMITTER)
FORMS = {PREFILL: "BNDS", DECODE: "DBNS"}
# What each function calls the scales of the weight and of the input.
SCALES: dict[str, tuple[str, str]] = {
    PREFILL: ("weight_scales", "input_scales"),
    DECODE: ("weight_scale", "input_scale"),
    EMITTER: ("weight_scale", "input_scale"),
}
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def facts(form: str | None):
    """What the rules read; `form` is the layout of attention, or the call's own."""

    def read(call: SimpleNamespace) -> dict[str, Any]:
        layout = form or call.form
        shapes: list[Any] = [
            getattr(x, "shape", None) for x in (call.attention, call.weight)
        ]
        tiled = isinstance(call.attention, MemrefTile)
        ranked = [len(shape or ()) for shape in shapes] == [4, 3 if tiled else 2]
        ranked = ranked and layout in FORMS.values()
        sizes: dict[str, Any] = dict.fromkeys("BNDS", 0)
        if ranked:
            sizes |= zip(layout, shapes[0], strict=True)
        operands = dict(attention=call.attention, weight=call.weight, bias=call.bias)
        kind = member(QuantizationType, call.quantization_type)
        scaled = kind not in (None, QuantizationType.NONE)
        mx = mx_facts(call, kind, *_scales(call).values())
        checked = {k: x for k, x in operands.items() if k not in mx["mx_packed"]}
        width = shapes[1][-1] if ranked else 0
        return dict(
            attention_shape=shapes[0],
            weight_shape=shapes[1],
            bias_shape=getattr(call.bias, "shape", None),
            form=layout,
            quantization=kind,
            scales=_scales(call),
            scale_names=SCALES[call.function],
            scale_kinds=_kinds(_scales(call)),
            layout=", ".join(str(layout)),
            weight_layout="[N, D, H]" if tiled else "[N*D, H]",
            ranked=ranked,
            tiled=tiled,
            H=width,
            transposed=getattr(
                call, "TRANSPOSE_OUT", getattr(call, "transpose_out", 0)
            ),
            cores=core_count(getattr(call, "lnc", None), width),
            odd_dtype=_odd_dtype(checked, {"weight"} if scaled else set()),
            **mx,
            off_axis=_off_axis(operands | _scales(call), layout),
            **sizes,
        )

    return read


def core_count(lnc: Any, width: int) -> int | None:
    """Cores of a logical core: two where the width splits so, unless named."""
    if lnc is None:
        return 2 if width % (2 * PARTITIONS) == 0 else 1
    try:
        return operator.index(lnc)
    except TypeError:
        return None


def _scales(call: Any) -> dict[str, Any]:
    """The scales of weight and input, by their argument names, in this order."""
    return {name: getattr(call, name) for name in SCALES[call.function]}


def _kinds(scales: dict[str, Any]) -> str:
    """The dtype of each scale that is given, or the type of what has none."""
    kinds = {k: getattr(x, "dtype", type(x).__name__) for k, x in scales.items()}
    given = [f"{kinds[k]} for {k}" for k, x in scales.items() if x is not None]
    return " and ".join(given)


def _odd_dtype(operands: dict[str, Any], fp8: set[str]) -> str:
    """The first operand of a dtype that is not built; those of `fp8` may be fp8."""
    for name, x in operands.items():
        dtype: Any = getattr(x, "dtype", None)
        if x is None or dtype in _DTYPES or (name in fp8 and is_fp8(dtype)):
            continue
        return f"{name} of dtype {dtype}"
    return ""


def _off_axis(operands: dict[str, Any], form: str) -> str:
    first = 2 if form == "BNDS" else 0
    for name, x in operands.items():
        axis = first if name == "attention" else 1
        if isinstance(x, MemrefTile) and x.axis != axis:
            return f"{name} axis = {axis}, got {x.axis}"
    return ""


def given_arguments(
    tiles: bool = False, **changes: Any
) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape.

    `attention` is given as `(B, N, D, S)` and laid out as the function wants it.
    """

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(attention=(1, 2, 4, 3), weight=(8, 6)) | changes
        form = given.get("form", FORMS.get(function, "BNDS"))
        if form == "DBNS" and len(given["attention"]) == 4:
            b, n, d, s = given["attention"]
            given["attention"] = (d, b, n, s)
        axes = dict(attention=2 if form == "BNDS" else 0, weight=1, bias=1)
        for key in axes:
            if type(given.get(key)) is tuple:
                given[key] = jax.ShapeDtypeStruct(given[key], jnp.float32)
                if given[key].size < 1 << 20:
                    given[key] = jnp.zeros(given[key].shape)
                if tiles:
                    given[key] = MemrefTile.from_tensor(given[key], axes[key])
        return given

    return build


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage = kwargs.pop("stage", 2)
    rule, text = f"output_projection.{rule}", "{function}: " + message
    contracts.add(Contract(rule, functions, text, *args, stage=stage, **kwargs))


def _floating(dtype: Any) -> bool:
    try:
        return dtype is None or jnp.dtype(dtype) in _DTYPES
    except TypeError:
        return False


contracts.add(
    only_hints(EMITTER, given_arguments(), ("out_in_sb",)),
    *only_flags(EMITTER, DECODE),
    contracts.all_or_none_tiles(
        EMITTER,
        ("attention", "weight", "bias", *SCALES[EMITTER]),
        lambda function: given_arguments(
            weight=MemrefTile.from_tensor(jnp.zeros((2, 4, 6)), 1)
        )(function),
    ),
)
_row(
    "form",
    (EMITTER,),
    "form must be BNDS or DBNS, got {form}",
    lambda c: c.form not in FORMS.values(),
    example=given_arguments(form="SBND"),
    stage=1,
)
_row(
    "rank",
    ALL,
    "attention must have shape [{layout}] and weight {weight_layout}, got "
    "{attention_shape} and {weight_shape}",
    lambda c: not c.ranked,
    example=given_arguments(attention=(2, 4, 3)),
    stage=1,
)
_row(
    "quantization",
    ALL,
    f"quantization_type must be one of {members(QuantizationType)}, "
    "got {quantization_type}",
    lambda c: c.quantization is None,
    example=given_arguments(quantization_type="INT3"),
    stage=1,
)
_row(
    "dtype",
    ALL,
    "operands must be floating and at least 16 bits wide, got {odd_dtype}",
    lambda c: c.odd_dtype,
    example=lambda function: given_arguments(weight=jnp.zeros((8, 6), jnp.int8))(
        function
    ),
    stage=1,
)
_row(
    "output_dtype",
    (PREFILL, EMITTER),
    "output_dtype must be floating and at least 16 bits wide, got {output_dtype}",
    lambda c: not _floating(c.output_dtype),
    example=given_arguments(output_dtype="int32"),
    stage=1,
)
_row(
    "lnc",
    (DECODE, EMITTER),
    "lnc must be a positive Python number, and is for the transposed output only, "
    "got {lnc}",
    lambda c: c.lnc is not None and (not c.transposed or (c.cores or 0) < 1),
    example=given_arguments(lnc=2),
    stage=1,
)
_row(
    "transposed_form",
    (EMITTER,),
    "transpose_out is for form DBNS only, got {form}",
    lambda c: c.transpose_out and c.form != "DBNS",
    example=given_arguments(transpose_out=True),
    stage=1,
)
_row(
    "tile_axis",
    (EMITTER,),
    "a tile must lie on its axis: {off_axis}",
    lambda c: c.off_axis,
    example=lambda function: given_arguments(
        tiles=True, weight=MemrefTile.from_tensor(jnp.zeros((2, 4, 6)), 0)
    )(function),
    stage=1,
)
_row(
    "rows",
    ALL,
    "weight must have N*D = {N}*{D} rows, those of attention, got {weight_shape}",
    lambda c: (
        not c.is_mx and c.weight_shape[:-1] != ((c.N, c.D) if c.tiled else (c.N * c.D,))
    ),
    example=given_arguments(weight=(6, 6)),
)
_row(
    "bias",
    ALL,
    "bias must have shape (1, H) = (1, {H}), got {bias_shape}",
    lambda c: c.bias is not None and c.bias_shape != (1, c.H),
    example=given_arguments(bias=(6,)),
)
_row(
    "transposed_width",
    (DECODE, EMITTER),
    "the transposed output needs H in multiples of 128*{cores} for weight, got "
    "{weight_shape}",
    lambda c: c.transposed and c.H % (PARTITIONS * c.cores),
    example=lambda function: given_arguments(
        **({"form": "DBNS"} if function == EMITTER else {}),
        **{"transpose_out" if function == EMITTER else "TRANSPOSE_OUT": True},
    )(function),
)
_row(
    "chip_tokens",
    (PREFILL,),
    "the chip takes B*S up to 131072 for attention, got {attention_shape}",
    size=Size("B*S", lambda c: c.B * c.S, maximum=131072, minimum=0),
    example=given_arguments(attention=(1, 2, 4, 131073)),
    tag="hw",
)
_row(
    "chip_head_dim",
    ALL,
    "the chip takes D up to 128 for attention, got {attention_shape}",
    size=Size("D", lambda c: 1 if c.is_mx else c.D, maximum=128),
    example=given_arguments(attention=(1, 2, 130, 3), weight=(260, 6)),
    tag="hw",
)
_row(
    "chip_heads",
    (PREFILL,),
    "the chip takes N up to 17 for attention, got {attention_shape}",
    size=Size("N", lambda c: 1 if c.is_mx else c.N, maximum=17),
    example=given_arguments(attention=(1, 18, 4, 3), weight=(72, 6)),
    tag="hw",
)
_row(
    "chip_width",
    (PREFILL,),
    "the chip takes H up to 20705 for weight, got {weight_shape}",
    size=Size("H", lambda c: c.H, maximum=20705),
    example=given_arguments(weight=(8, 20706)),
    tag="hw",
)
_row(
    "chip_cores",
    (PREFILL,),
    "the chip's two cores share an even H for weight, got {weight_shape}",
    size=Size("H", lambda c: c.H, multiple=2, minimum=2),
    example=given_arguments(weight=(8, 5)),
    tag="hw",
)
_row(
    "chip_transposed",
    (DECODE,),
    "the chip's transposed output takes N*H up to 163840, 81920 in float32, got "
    "N = {N} for attention and weight {weight_shape}",
    lambda c: c.transposed and c.N * c.H * jnp.dtype(c.weight.dtype).itemsize > 327680,
    example=lambda function: given_arguments(
        attention=(1, 4, 2, 3), weight=(8, 20736), TRANSPOSE_OUT=True
    )(function),
    tag="hw",
)
_row(
    "chip_output",
    (DECODE,),
    "the chip keeps an output of at most 128 rows B*S on chip, got {attention_shape}",
    size=Size(
        "B*S",
        lambda c: c.B * c.S if c.OUT_IN_SB and not c.transposed else 0,
        maximum=128,
        minimum=0,
    ),
    example=given_arguments(attention=(1, 2, 4, 129), OUT_IN_SB=True),
    tag="hw",
)
_row(
    "tile_columns",
    (EMITTER,),
    "a tile's columns H fill whole partitions: at most 128 or a multiple, got "
    "{weight_shape}",
    size=Size(
        "H",
        lambda c: c.H if c.tiled and c.H > PARTITIONS else PARTITIONS,
        multiple=PARTITIONS,
    ),
    example=given_arguments(tiles=True, weight=(2, 4, 160)),
    tag="hw",
)
