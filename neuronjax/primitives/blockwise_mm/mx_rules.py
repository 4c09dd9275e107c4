"""The rules of block-scaled expert weights."""

from neuronjax.kernels.mx import layout
from neuronjax.primitives.blockwise_mm.arguments import arguments, block_scaled
from neuronjax.primitives.blockwise_mm.facts import CTE, EMITTERS, weight_dtype_of
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.contracts import Size
from neuronjax.primitives.mx.formats import NAMES

_CALLS = (CTE, *EMITTERS)


def _unlike_container(c) -> bool:
    fmt = c.mx_format
    held = {str(c.operands[key].dtype) for key in ("gate_up_w", "down_w")}
    return c.is_mx and fmt is not None and held != {fmt.container}


row(
    "mx_width",
    "block-scaled weights take H in multiples of 512, got {H}",
    # Named apart: its multiple does not count in the nearest H of other weights.
    size=Size("H (MX)", lambda c: c.H if c.is_mx else layout.TILE, layout.TILE),
    functions=_CALLS,
    example=block_scaled(hidden=(4, 500)),
)
row(
    "mx_compute_dtype",
    "block-scaled weights are rounded by their format: compute_dtype must be None, got "
    "{compute_dtype}",
    lambda c: c.is_mx and c.compute_dtype is not None,
    functions=_CALLS,
    example=block_scaled(compute_dtype="bfloat16"),
)
row(
    "mx_format",
    f"the format of block-scaled weights must be one of {NAMES}, or None for uint16 "
    "and uint32 containers, got {named}",
    lambda c: (
        vars(c).setdefault("named", str(weight_dtype_of(c)))
        and c.is_mx
        and c.mx_format is None
    ),
    functions=_CALLS,
    example=lambda function: block_scaled(
        **{"weight_dtype" if function == CTE else "weight_format": "float6"}
    )(function),
)
row(
    "mx_container",
    "{arg.gate_up_w} and {arg.down_w} must be of one container, that of their format",
    _unlike_container,
    functions=_CALLS,
    example=lambda function: block_scaled(
        **{"weight_dtype" if function == CTE else "weight_format": "float8_e5m2"}
    )(function),
)
row(
    "mx_weight_dtype",
    "a weight format is for block-scaled weights, got {named}",
    lambda c: (
        vars(c).setdefault("named", str(weight_dtype_of(c)))
        and not c.is_mx
        and weight_dtype_of(c) is not None
    ),
    functions=_CALLS,
    example=lambda function: arguments(
        **{"weight_dtype" if function == CTE else "weight_format": "float8_e5m2"}
    )(function),
)
