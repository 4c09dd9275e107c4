"""The variable that holds quantized weights.

XLA on a CPU slices no fp8 array: it makes a float16 copy of all of it first, and a scan
over stacked layers is made of slices. So stacked fp8 codes are kept as bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from neuronjax.kernels.quantization.fp8 import is_fp8


class Codes(nnx.Variable):
    """A quantized weight or a scale: a constant, not a parameter to train.

    Its metadata `fp8` names the type of fp8 codes, which may be held as bytes.
    """


def codes(value: jax.Array, names: tuple[str | None, ...], *, stacked: bool) -> Codes:
    """A variable of `value`, whose axes may be split over the mesh axes `names`."""
    kind = value.dtype.name if is_fp8(value.dtype) else None
    held = as_bytes(value) if stacked else value
    return Codes(held, fp8=kind, out_sharding=names, eager_sharding=False)


def read(variable: Codes) -> jax.Array:
    """The value, fp8 codes in their own type."""
    return as_codes(jnp.asarray(variable[...]), variable)


def as_bytes(value: jax.Array) -> jax.Array:
    """fp8 codes as uint8; anything else as it is."""
    if not is_fp8(value.dtype):
        return value
    return lax.bitcast_convert_type(value, jnp.uint8)


def as_codes(value: jax.Array, variable: Any) -> jax.Array:
    """The inverse of `as_bytes` for what `variable` holds."""
    kind = getattr(variable, "fp8", None)
    if kind is None or value.dtype == kind:
        return value
    return lax.bitcast_convert_type(value, jnp.dtype(kind))
