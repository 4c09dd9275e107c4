"""Blocks of 32 values with one power of two: quantizing, dequantizing, rounding.

    e = max of the exponent fields of a block;  scale = clip(e - max_exponent, 0, 255)
    q = round(clip(x / 2**(e - max_exponent - 127), -largest, largest))

The scale is the floor of the logarithm: values above the largest mantissa saturate.
OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt8

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.mx.formats import (
    E4M3FN,
    NAN_SCALE,
    Container,
    Format,
    decode,
    encode,
    exponent_field,
    magnitude_bits,
    pack,
    scaled,
    unpack,
)
from neuronjax.kernels.own_derivative import own_derivative

ROWS, COLUMNS = 8, 4  # a block: eight rows of one container each
Axes = tuple[int, ...]


def _exponent_and_scale(x, axes: Axes, kind: Format):
    """The divisor's exponent and the stored scale of each block, with unit axes."""
    top = jnp.max(exponent_field(x), axis=axes, keepdims=True)
    exponent = top - kind.max_exponent
    scale = jnp.clip(exponent, 0, 255)
    if kind.nan is None:
        marked = jnp.any(jnp.isnan(x), axis=axes, keepdims=True)
        scale = jnp.where(marked, NAN_SCALE, scale)
    return exponent - 127, scale.astype(jnp.uint8)


def quantize_blocks(
    x: Float[Array, "..."], axes: Axes, kind: Format
) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
    """Returns the codes of `x` and the scales, with unit `axes`, of its blocks.

    `axes` are the two axes that a block fills. An infinity saturates; a NaN stays one,
    or makes its block's scale NaN where the format has none.
    """
    exponent, scale = _exponent_and_scale(x, axes, kind)
    return encode(x, kind, exponent), scale


def closest_blocks(
    x: Float[Array, "..."], axes: Axes, kind: Format
) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
    """`quantize_blocks` under the better of two scales: the floor, or the next power.

    Better is the smaller sum of squared errors in a block. The next power saturates
    nothing, at the price of half the resolution.
    """
    exponent, scale = _exponent_and_scale(x, axes, kind)
    floor = encode(x, kind, exponent), scale
    step = (scale < NAN_SCALE - 1).astype(scale.dtype)
    above = scale + step
    next_one = encode(x, kind, exponent + step.astype(exponent.dtype)), above

    def error(codes, scale):
        lost = scaled(decode(codes, kind), scale) - x.astype(jnp.float32)
        return jnp.sum(jnp.square(lost), axis=axes, keepdims=True)

    better = error(*next_one) < error(*floor)
    codes, scale = (
        jnp.where(better, b, a) for a, b in zip(floor, next_one, strict=True)
    )
    return codes, scale


def is_clipped(x: Float[Array, "..."], axes: Axes, kind: Format) -> Bool[Array, "..."]:
    """Whether quantizing saturates a value: its mantissa is beyond the largest."""
    top = jnp.max(exponent_field(x), axis=axes, keepdims=True)
    steps = kind.top & ((1 << kind.mantissa) - 1)
    return magnitude_bits(x) > (top << 23 | steps << (23 - kind.mantissa))


@own_derivative(lambda x, dx, axes, kind: straight_through(dx[0], x[0], axes, kind))
def round_blocks(
    x: Float[Array, "..."], *, axes: Axes, kind: Format
) -> Float[Array, "..."]:
    """Returns `x` quantized and dequantized, in float32, or float64 where `x` is.

    The tangent passes straight through the rounding, and is zero where a value
    saturates.
    """
    codes, scale = quantize_blocks(x, axes, kind)
    return scaled(decode(codes, kind), scale).astype(accumulator(x.dtype))


def straight_through(
    dx: Float[Array, "..."], x: Float[Array, "..."], axes: Axes, kind: Format = E4M3FN
) -> Float[Array, "..."]:
    """The derivative of `round_blocks` applied to `dx`: zero where `x` saturates."""
    return jnp.where(is_clipped(x, axes, kind), 0, dx.astype(accumulator(x.dtype)))


def quantize_fwd(
    data: Float[Array, "p f"], kind: Format
) -> tuple[Container, UInt8[Array, "p_blocks f_packed"]]:
    """Returns the containers `[P, F/4]` and scales `[P/8, F/4]` of a matrix."""
    p, f = data.shape
    blocks = data.reshape(p // ROWS, ROWS, f // COLUMNS, COLUMNS)
    codes, scale = quantize_blocks(blocks, (1, 3), kind)
    return pack(codes.reshape(p, f), kind), lax.squeeze(scale, (1, 3))


def dequantize_fwd(
    packed: Container, scale: UInt8[Array, "p_blocks f_packed"], kind: Format
) -> Float[Array, "p f"]:
    """The float32 values of what `quantize_fwd` returns."""
    values = decode(unpack(packed, kind), kind)
    repeated = jnp.repeat(jnp.repeat(scale, ROWS, axis=0), COLUMNS, axis=1)
    return scaled(values, repeated)


def to_hardware_scale(scale: UInt8[Array, "p_blocks f"]) -> UInt8[Array, "p f"]:
    """Lays scales `[P/8, F]` on `P` partitions: four on top of each quadrant of 32."""
    quadrants = scale.reshape(-1, 4, scale.shape[1])
    return jnp.pad(quadrants, ((0, 0), (0, 28), (0, 0))).reshape(-1, scale.shape[1])


def from_hardware_scale(scale: UInt8[Array, "p f"]) -> UInt8[Array, "p_blocks f"]:
    """The inverse of `to_hardware_scale`."""
    return scale.reshape(-1, 32, scale.shape[1])[:, :4].reshape(-1, scale.shape[1])
