"""The element formats of MX blocks, their codes, and the powers of two that scale them.

Open Compute Project 2023, OCP Microscaling Formats (MX) Specification 1.0, tables 1 to
7. All of it is integer arithmetic on the bits of float32, or shifts into the bits of
float16: XLA on a CPU flushes subnormal float32, and its casts to narrow types differ
between versions.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8, UInt16, UInt32

Codes = Integer[Array, "..."]
Container = UInt16[Array, "..."] | UInt32[Array, "..."]


class Format(NamedTuple):
    """An element format: sign, exponent and mantissa, four to a container.

    Attributes:
        name: as NumPy's extension types are called.
        bits: width of a code.
        mantissa: bits of the mantissa.
        bias: of the exponent.
        max_exponent: the exponent of the largest value.
        top: the code of the largest value.
        nan: a code of NaN; None where the format has none.
        container: the unsigned integer that holds four codes.
        half_shift: a magnitude's code, shifted so far, is a float16 ...
        half_factor: ... that is smaller than the value by this factor.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    max_exponent: int
    top: int
    nan: int | None
    container: str
    half_shift: int
    half_factor: float

    @property
    def largest(self) -> float:
        """The largest value."""
        steps = (self.top & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        return 2.0**self.max_exponent * (1 + steps)


E4M3FN = Format("float8_e4m3fn", 8, 3, 7, 8, 0x7E, 0x7F, "uint32", 7, 2.0**8)
E5M2 = Format("float8_e5m2", 8, 2, 15, 15, 0x7B, 0x7E, "uint32", 8, 1.0)
E2M1FN = Format("float4_e2m1fn", 4, 1, 1, 2, 0x7, None, "uint16", 9, 2.0**14)
FORMATS = {kind.name: kind for kind in (E4M3FN, E5M2, E2M1FN)}

# The scale that stands for NaN; also what the format's table 7 says.
NAN_SCALE = 255
_SCALE_BIAS = 127
_SIGN, _MAGNITUDE, _IMPLICIT = 31, 0x7FFFFFFF, 1 << 23


def magnitude_bits(x: Float[Array, "..."]) -> Integer[Array, "..."]:
    """The bits of `|x|` in float32: ordered as the magnitudes are, NaN above all."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & _MAGNITUDE


def exponent_field(x: Float[Array, "..."]) -> Integer[Array, "..."]:
    """The exponent field of `x` in float32: 0 for zeros and subnormals."""
    return magnitude_bits(x) >> 23


def encode(
    x: Float[Array, "..."], kind: Format, exponent: Integer[Array, "..."] | int = 0
) -> UInt8[Array, "..."]:
    """Returns the codes of `x / 2**exponent`: nearest, ties to even, saturating.

    Infinities saturate too. NaN stays NaN; a format without one gives its largest
    value, and `quantize_blocks` marks the block's scale instead.
    """
    bits, magnitude = x.astype(jnp.float32), magnitude_bits(x)
    significand, field = _normalized(magnitude)
    wanted = field - _SCALE_BIAS - exponent
    lowest = 1 - kind.bias
    shift = 23 - kind.mantissa + jnp.maximum(lowest - wanted, 0)
    rounded = _shift_to_even(significand, jnp.minimum(shift, 26))
    # The implicit bit and a carry of the rounding both add one to the exponent.
    code = ((jnp.maximum(wanted, lowest) + kind.bias - 1) << kind.mantissa) + rounded
    code = jnp.minimum(code, kind.top)
    if kind.nan is not None:
        code = jnp.where(magnitude > 0x7F800000, kind.nan, code)
    negative = lax.bitcast_convert_type(bits, jnp.uint32) >> jnp.uint32(_SIGN)
    return (code.astype(jnp.uint32) | negative << jnp.uint32(kind.bits - 1)).astype(
        jnp.uint8
    )


def _normalized(magnitude):
    """Significand with its leading bit at 23, and the exponent field that it has."""
    field = magnitude >> 23
    fraction = magnitude & (_IMPLICIT - 1)
    shift = lax.clz(fraction) - 8
    significand = jnp.where(field > 0, fraction | _IMPLICIT, fraction << shift)
    below = jnp.where(magnitude > 0, 1 - shift, -(1 << 20))  # zero is below them all
    return significand, jnp.where(field > 0, field, below)


def _shift_to_even(value, shift):
    """`value / 2**shift`, rounded to nearest, ties to even."""
    below_half = (1 << (shift - 1)) - 1
    return (value + below_half + ((value >> shift) & 1)) >> shift


def decode(codes: Codes, kind: Format) -> Float[Array, "..."]:
    """Returns the float32 values of `codes`, exactly.

    A code's magnitude, shifted, is a float16, subnormals included; hardware widens it.
    """
    codes = codes.astype(jnp.uint16)
    size = codes & jnp.uint16((1 << (kind.bits - 1)) - 1)
    sign = (codes >> jnp.uint16(kind.bits - 1)) << jnp.uint16(15)
    half = sign | size << jnp.uint16(kind.half_shift)
    value = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    if kind.half_factor != 1:
        value = value * np.float32(kind.half_factor)
    if kind == E4M3FN:  # one NaN a sign; e5m2's are those of float16
        value = jnp.where(size == jnp.uint16(0x7F), np.float32(np.nan), value)
    return value


def scaled(value: Float[Array, "..."], scale: UInt8[Array, "..."]):
    """Returns `value * 2**(scale - 127)`; the scale 255 is NaN.

    In two steps, since the smallest power is a subnormal float32.
    """
    field = jnp.maximum(scale, jnp.uint8(1)).astype(jnp.uint32) << jnp.uint32(23)
    nan = (scale == NAN_SCALE).astype(jnp.uint32) << jnp.uint32(22)
    power = lax.bitcast_convert_type(field | nan, jnp.float32)
    return value * jnp.where(scale == 0, np.float32(0.5), np.float32(1)) * power


def pack(codes: Codes, kind: Format) -> Container:
    """Packs the last axis, four codes to a container, the first one lowest."""
    wide = codes.astype(kind.container).reshape(*codes.shape[:-1], -1, 4)
    first, second, third, fourth = (wide[..., q] << _place(kind, q) for q in range(4))
    return first | second | third | fourth


def element(packed: Container, kind: Format, q: int) -> Codes:
    """The `q`-th code of every container."""
    mask = packed.dtype.type((1 << kind.bits) - 1)
    return (packed >> _place(kind, q)) & mask


def unpack(packed: Container, kind: Format) -> UInt8[Array, "..."]:
    """The inverse of `pack`: the last axis is four times as long."""
    codes = [element(packed, kind, q).astype(jnp.uint8) for q in range(4)]
    return jnp.stack(codes, axis=-1).reshape(*packed.shape[:-1], -1)


def _place(kind: Format, q: int):
    """Where the `q`-th code begins, as a value of the container's dtype."""
    return jnp.dtype(kind.container).type(kind.bits * q)
