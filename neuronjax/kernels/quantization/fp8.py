"""fp8 values with a scale: `x ~ q * scale`, saturating, NaN kept.

The projections' fp8 is `float8_e4m3`, which ends at 240 and has an infinity; the block
formats' is `float8_e4m3fn`, which ends at 448 and has none. A cast alone gives infinity
for the one and NaN for the other beyond the end, so every cast here is preceded by a
clip.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from neuronjax.kernels.dtypes import accumulator

E4M3, E4M3FN, E5M2 = (
    jnp.dtype(kind) for kind in (jnp.float8_e4m3, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
FP8 = (E4M3, E4M3FN, E5M2)
# The smallest scale of a row: a row of zeros keeps finite codes.
FLOOR = 1e-6
# A packed row ends in the four bytes of its float32 scale.
SCALE_BYTES = 4


def is_fp8(dtype: DTypeLike) -> bool:
    """Whether `dtype` is one of the three fp8 types."""
    return jnp.dtype(dtype) in FP8


def largest(dtype: DTypeLike) -> float:
    """The largest finite value of an fp8 type: 240, 448 or 57344."""
    return float(jnp.finfo(dtype).max)


def saturate(
    x: Float[Array, "..."], dtype: DTypeLike = E4M3, *, limit: float | None = None
) -> Shaped[Array, "..."]:
    """Returns `x` in `dtype`, clipped to `+-limit` first; NaN stays NaN.

    Rounds to nearest, ties to even. `limit` is the type's largest value by default.
    """
    limit = largest(dtype) if limit is None else limit
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
    raw = lax.bitcast_convert_type(scale.astype(jnp.float32)[..., 0], jnp.uint8)
    tail = lax.bitcast_convert_type(raw, codes.dtype)
    return jnp.concatenate([codes, tail], axis=-1)


def unpack_rows(
    packed: Shaped[Array, "*rows d_packed"],
) -> tuple[Shaped[Array, "*rows d"], Float[Array, "*rows 1"]]:
    """Returns the codes and the float32 scales that `pack_rows` was given."""
    codes, tail = jnp.split(packed, [packed.shape[-1] - SCALE_BYTES], axis=-1)
    raw = lax.bitcast_convert_type(tail, jnp.uint8)
    return codes, lax.bitcast_convert_type(raw, jnp.float32)[..., None]
