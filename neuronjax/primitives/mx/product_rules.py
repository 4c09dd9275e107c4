"""The rules of MX products: what they read, and one row each."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.mx import layout
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size, told
from neuronjax.primitives.mx.formats import NAMES, format_of

MATMUL, GATE_UP, DOWN = "mx_matmul", "gate_up_proj_mx", "down_proj_mx"
ALL = (MATMUL, GATE_UP, DOWN)
# Of each function, its packed operands: codes, scales, the argument with their format.
PACKED = {
    MATMUL: (
        ("stationary", "stationary_scale", "stationary_dtype"),
        ("moving", "moving_scale", "moving_dtype"),
    ),
    GATE_UP: (
        ("hidden_qtz", "hidden_scale", "hidden_dtype"),
        ("weight_qtz", "weight_scale", "weight_dtype"),
    ),
    DOWN: (("weight_qtz", "weight_scale", "weight_dtype"),),
}


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", type(x).__name__)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read."""
    packed = PACKED[call.function]
    unknown = [name for *_, name in packed if format_of(getattr(call, name)) is None]
    sizes = {
        key: int(getattr(call, key))
        for key in ("H", "I", "BxS")
        if isinstance(getattr(call, key, None), int | np.integer)
    }
    found = dict(
        unknown=", ".join(unknown),
        unknown_given=", ".join(repr(getattr(call, name)) for name in unknown),
        misfit="" if unknown else "; ".join(_misfits(call, packed)),
        unsized=call.function != MATMUL and len(sizes) < 3,
    )
    wanted = {} if found["unsized"] else _wanted(call, sizes)
    return (
        found
        | dict(unlike=_unlike(call, wanted), rows=_rows(call))
        | dict(
            p_shape=_shape(getattr(call, "stationary", None)),
            uncovered="; ".join(_uncovered(call)),
        )
    )


def _misfits(call: SimpleNamespace, packed):
    """Every packed operand of another container than its format's."""
    for codes, scale, name in packed:
        kind, x = format_of(getattr(call, name)), getattr(call, codes)
        assert kind is not None
        if _dtype(x) != kind.container:
            yield f"{codes} must be {kind.container} for {kind.name}, got {_dtype(x)}"
        if _dtype(getattr(call, scale)) != np.uint8:
            yield f"{scale} must be uint8, got {_dtype(getattr(call, scale))}"


def _wanted(call: SimpleNamespace, sizes: dict[str, int]) -> dict[str, tuple]:
    """The shape of every operand, `None` where it is free."""
    if call.function == MATMUL:
        p = (_shape(call.stationary) or (0,))[0]
        return dict(
            stationary=(p, None),
            moving=(p, None),
            stationary_scale=(p // 8, None),
            moving_scale=(p // 8, None),
        )
    h, i, rows = sizes["H"], sizes["I"], sizes["BxS"]
    tiles, bias = layout.tiles(max(i, 1)), _shape(call.bias)
    if call.function == GATE_UP:
        return dict(
            hidden_qtz=(128, h // 512, rows),
            hidden_scale=(16, h // 512, rows),
            weight_qtz=(128, h // 512, i),
            weight_scale=(16, h // 512, i),
            bias=(None if len(bias) == 3 else 0, tiles, 4),
        )
    p = layout.partitions(max(i, 1))
    return dict(
        inter=(128, tiles, rows, 4),
        weight_qtz=(p, tiles, h),
        weight_scale=(p // 8, tiles, h),
        bias=(1, h),
    )


def _unlike(call: SimpleNamespace, wanted: dict[str, tuple]) -> str:
    found = []
    for name, shape in wanted.items():
        x = getattr(call, name)
        fits = len(_shape(x)) == len(shape) and all(
            b is None or a == b for a, b in zip(_shape(x), shape, strict=True)
        )
        if not fits and not (name == "bias" and x is None):
            axes = ", ".join("any" if s is None else str(s) for s in shape)
            found.append(f"{name} must have shape ({axes}), got {_shape(x)}")
    return "; ".join(found)


def _uncovered(call: SimpleNamespace):
    """For each operand of a matrix product, whether it has more columns than scales."""
    for codes, scale, _ in PACKED[MATMUL] if call.function == MATMUL else ():
        shapes = _shape(getattr(call, codes)), _shape(getattr(call, scale))
        if len(shapes[0]) == len(shapes[1]) == 2 and shapes[1][1] < shapes[0][1]:
            yield (
                f"{scale} must have a column for each of {codes}, {shapes[0][1]}, got "
                f"{shapes[1][1]}"
            )


def _rows(call: SimpleNamespace) -> int:
    """Contraction rows of a matrix product; others have theirs by their shapes."""
    return (_shape(call.stationary) or (0,))[0] if call.function == MATMUL else 8


def arguments(**changes: Any):
    """Arguments that keep the rules but for `changes`; a tuple is a shape."""

    def build(function: str) -> dict[str, Any]:
        fp8, fp4, u8, f32 = np.uint32, np.uint16, np.uint8, np.float32
        if function == MATMUL:
            given = dict(stationary=((8, 3), fp8), moving=((8, 2), fp8))
            given |= dict(stationary_scale=((1, 3), u8), moving_scale=((1, 2), u8))
        elif function == GATE_UP:
            given = dict(hidden_qtz=((128, 1, 2), fp8), weight_qtz=((128, 1, 32), fp4))
            given |= dict(hidden_scale=((16, 1, 2), u8), weight_scale=((16, 1, 32), u8))
            given |= dict(bias=((8, 1, 4), f32))
        else:
            given = dict(inter=((128, 1, 2, 4), f32), weight_qtz=((8, 1, 6), fp4))
            given |= dict(weight_scale=((1, 1, 6), u8), bias=((1, 6), f32))
        sizes = dict(H=6 if function == DOWN else 512, I=32, BxS=2)
        whole: dict[str, Any] = {k: np.zeros(*v) for k, v in given.items()}
        for key, value in changes.items():
            if type(value) is tuple:
                whole[key] = np.zeros(value, whole[key].dtype)
            elif key in whole or key not in sizes:
                whole[key] = value
        extra = {} if function == MATMUL else sizes
        return whole | extra | {k: v for k, v in changes.items() if k in extra}

    return build


def _row(rule: str, functions, message: str, violated=None, **kwargs: Any) -> None:
    kwargs.setdefault("stage", 2)
    text = "{function}: " + message
    contracts.add(Contract(f"mx.{rule}", tuple(functions), text, violated, **kwargs))


def _misnamed(function: str) -> dict[str, Any]:
    return arguments()(function) | {PACKED[function][0][2]: "float6"}


def _miscast(function: str) -> dict[str, Any]:
    codes = PACKED[function][0][0]
    return arguments(**{codes: np.zeros((1,), np.int32)})(function)


def _misshapen(function: str) -> dict[str, Any]:
    return arguments(**{PACKED[function][0][1]: (3, 3)})(function)


_row(
    "product_format",
    ALL,
    f"{{unknown}} must be one of {NAMES}, got {{unknown_given}}",
    lambda c: c.unknown,
    example=_misnamed,
    stage=1,
)
_row(
    "product_sizes",
    (GATE_UP, DOWN),
    "H, I and BxS must be Python integers, got {H!r}, {I!r} and {BxS!r}",
    lambda c: c.unsized,
    example=arguments(BxS=None),
    stage=1,
)
_row(
    "containers",
    ALL,
    "{misfit}",
    lambda c: c.misfit,
    example=_miscast,
)
_row(
    "product_shapes",
    ALL,
    "{unlike}",
    lambda c: c.unlike,
    example=_misshapen,
)
_row(
    "scale_columns",
    (MATMUL,),
    "{uncovered}",
    lambda c: c.uncovered,
    example=arguments(stationary_scale=(1, 2)),
)
_row(
    "product_rows",
    (MATMUL,),
    "P of stationary must be a multiple of 8, the rows of a block, got {p_shape}",
    size=Size("P", lambda c: c.rows, multiple=8),
    example=arguments(
        stationary=(12, 3),
        moving=(12, 2),
        stationary_scale=(1, 3),
        moving_scale=(1, 2),
    ),
)
_row(
    "hidden_width",
    (GATE_UP,),
    "H must be a multiple of 512, got {H}",
    size=Size("H", lambda c: c.H if not c.unsized else 512, multiple=512),
    example=arguments(H=520),
)
_row(
    "intermediate",
    (GATE_UP, DOWN),
    "I must be positive, got {I}",
    size=Size("I", lambda c: c.I if not c.unsized else 1),
    example=lambda function: arguments(
        I=0,
        **(
            dict(weight_qtz=(128, 1, 0), weight_scale=(16, 1, 0))
            if function == GATE_UP
            else {}
        ),
    )(function),
)


def _narrow(call: SimpleNamespace) -> str:
    """The dtype of what is added or multiplied in float32, where it is none for it."""
    x = call.inter if call.function == DOWN else call.bias
    dtype = getattr(x, "dtype", np.float32)
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
    return "" if wide else str(jnp.dtype(dtype))


_row(
    "product_values",
    (GATE_UP, DOWN),
    "bias and inter must be floating and at least 16 bits wide, got {narrow}",
    told("narrow", _narrow),
    example=lambda function: arguments(
        **(
            dict(inter=np.zeros((128, 1, 2, 4), np.int8))
            if function == DOWN
            else dict(bias=np.zeros((8, 1, 4), np.int8))
        )
    )(function),
)
