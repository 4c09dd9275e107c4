"""fp8 values with a scale: `x ~ q * scale`, saturating, NaN kept.

The projections' fp8 is `float8_e4m3`, which ends at 240 and has an infinity; the block
formats' is `float8_e4m3fn`, which ends at 448 and has none. A cast alone gives infinity
for the one and NaN for the other beyond the end, so every cast here is preceded by a
clip.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from neuronjax.kernels.dtypes import accumulator

E4M3, E4M3FN, E5M2 = (
    jnp.dtype(kind) for kind in (jnp.float8_e4m3, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
FP8 = (E4M3, E4M3FN, E5M2)
# The smallest scale of a row: a row of zeros keeps finite codes.
FLOOR = 1e-6
# A packed row ends in the four bytes of its float32 scale.
SCALE_BYTES = 4
_SHIFTS = np.arange(0, 8 * SCALE_BYTES, 8, dtype=np.uint32)


def is_fp8(dtype: DTypeLike) -> bool:
    """Whether `dtype` is one of the three fp8 types."""
    return jnp.dtype(dtype) in FP8


def largest(dtype: DTypeLike) -> float:
    """The largest finite value of an fp8 type: 240, 448 or 57344."""
    return float(jnp.finfo(dtype).max)


def e4m3_bytes(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The bytes of a float32 `x` in e4m3, clipped to +-240; NaN stays NaN.

    Rounds to nearest, ties to even, in integer arithmetic, which takes XLA on a CPU
    half the time of a clip and its own cast. A normal result drops 20 bits of the
    fraction with a rounding carry and rebases the exponent by 120; a subnormal one is
    rounded by adding 2**14, whose last bit is worth 2**-9.
    """
    word = jnp.uint32
    bits = lax.bitcast_convert_type(x, word)
    size = bits & word(0x7FFFFFFF)
    clipped = jnp.minimum(size, word(0x43700000))  # 240.0
    carry = word(0x7FFFF) + ((clipped >> 20) & word(1))
    normal = ((clipped + carry) >> 20) - word(120 << 3)
    raised = lax.bitcast_convert_type(clipped, jnp.float32) + jnp.float32(2**14)
    subnormal = lax.bitcast_convert_type(raised, word) & word(0xFF)
    code = jnp.where(clipped < word(121 << 23), subnormal, normal)
    code = jnp.where(size > word(0x7F800000), word(0x7F), code)
    return (code | ((bits >> 24) & word(0x80))).astype(jnp.uint8)


def saturate(
    x: Float[Array, "..."], dtype: DTypeLike = E4M3, *, limit: float | None = None
) -> Shaped[Array, "..."]:
    """Returns `x` in `dtype`, clipped to `+-limit` first; NaN stays NaN.

    Rounds to nearest, ties to even. `limit` is the type's largest value by default.
    """
    limit = largest(dtype) if limit is None else limit
    if jnp.dtype(dtype) == E4M3 and limit == largest(E4M3) and x.dtype == jnp.float32:
        return lax.bitcast_convert_type(e4m3_bytes(x), E4M3)
    bound = jnp.asarray(limit, x.dtype)
    return lax.clamp(-bound, x, bound).astype(dtype)


def row_scales(
    x: Float[Array, "..."],
    *,
    limit: float = 240.0,
    floor: float = FLOOR,
    axis: int | tuple[int, ...] = -1,
) -> Float[Array, "..."]:
    """Returns `max(max |x| / limit, floor)` of each row, in the accumulator's dtype.

    A row lies on `axis`, which stays as a unit axis.
    The maximum is that of the finite values, so that an infinity saturates and a NaN
    stays alone in its row.
    """
    size = jnp.abs(x.astype(accumulator(x.dtype)))
    size = jnp.where(jnp.isfinite(size), size, 0)
    top = jnp.max(size, axis=axis, keepdims=True, initial=0)
    return jnp.maximum(top / limit, jnp.asarray(floor, top.dtype))


def quantize_rows(
    x: Float[Array, "*rows d"],
    dtype: DTypeLike = E4M3,
    *,
    limit: float = 240.0,
    floor: float = FLOOR,
    bound: float = 0.0,
) -> tuple[Shaped[Array, "*rows d"], Float[Array, "*rows 1"]]:
    """Returns codes in `dtype` and the scale of each row: `x ~ codes * scale`.

    With a positive `bound` magnitudes are clipped to it first.
    """
    wide = x.astype(accumulator(x.dtype))
    if bound > 0:
        edge = jnp.asarray(bound, wide.dtype)
        wide = lax.clamp(-edge, wide, edge)
    scale = row_scales(wide, limit=limit, floor=floor)
    return saturate(wide * (1 / scale), dtype, limit=limit), scale


def pack_rows(
    codes: Shaped[Array, "*rows d"], scale: Float[Array, "*rows 1"]
) -> Shaped[Array, "*rows d_packed"]:
    """Returns `[..., H + 4]`: the codes, then the bytes of the row's float32 scale.

    The bytes are little-endian and stand there as codes: only `unpack_rows` may read
    them.
    """
    raw = lax.bitcast_convert_type(codes, jnp.uint8)
    return join_rows(raw, scale.astype(jnp.float32), codes.dtype)


def join_rows(
    raw: UInt8[Array, "*rows d"],
    scale: Float[Array, "*rows 1"],
    dtype: DTypeLike = E4M3,
) -> Shaped[Array, "*rows d_packed"]:
    """`pack_rows` of the codes' bytes, as `dtype`.

    Bytes of a scale may read as NaN, and XLA gives a NaN that it moves as fp8 another
    byte: they are joined and taken apart as uint8. Shifts, not a bitcast, know symbolic
    sizes.
    """
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    tail = (bits >> _SHIFTS).astype(jnp.uint8)
    return lax.bitcast_convert_type(jnp.concatenate([raw, tail], -1), dtype)


def unpack_rows(
    packed: Shaped[Array, "*rows d_packed"],
) -> tuple[Shaped[Array, "*rows d"], Float[Array, "*rows 1"]]:
    """Returns the codes and the float32 scales that `pack_rows` was given."""
    raw = lax.bitcast_convert_type(packed, jnp.uint8)
    codes, tail = jnp.split(raw, [raw.shape[-1] - SCALE_BYTES], axis=-1)
    bits = tail.astype(jnp.uint32) << _SHIFTS
    scale = jnp.sum(bits, axis=-1, keepdims=True, dtype=jnp.uint32)
    codes = lax.bitcast_convert_type(codes, packed.dtype)
    return codes, lax.bitcast_convert_type(scale, jnp.float32)
