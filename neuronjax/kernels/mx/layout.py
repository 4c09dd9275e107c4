"""Where the elements of a contraction axis lie in blocks: swizzles and their inverses.

A contraction axis of `K` logical elements is laid out as `[4, P, R]`: element `q` of
container `p` in tile `r`. A block is eight consecutive `p` and all `q`. The orders:

- `"hidden"`: `k = (q, r, p)` with 128 partitions: the columns of a swizzled activation;
- `"intermediate"`: tiles of 512, `k = 512 r + 128 q + p`; a last tile of fewer rows is
  padded to a multiple of eight, split in four quarters, the rest zero;
- `"contiguous"`: `k = 4 p + q`;
- `"interleaved"`: `k = a K/2 + 2 p + b` with `q = 2 a + b`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from neuronjax.kernels.mx.formats import (
    Container,
    Format,
    decode,
    element,
    pack,
    scaled,
)
from neuronjax.kernels.mx.quantize import ROWS, closest_blocks, quantize_blocks

PARTITIONS, TILE = 128, 512
HIDDEN, INTERMEDIATE = "hidden", "intermediate"
CONTIGUOUS, INTERLEAVED = "contiguous", "interleaved"
# The axes of `[..., 4, P/8, 8, R]` that a block fills.
BLOCK = (-4, -2)


def quarter(size: int) -> int:
    """Partitions that the last tile of an intermediate axis of `size` fills."""
    rest = size % TILE
    return -(-rest // ROWS) * ROWS // 4 if rest else PARTITIONS


def partitions(size: int) -> int:
    """Partitions of an intermediate axis: 128, or whole blocks of a single tile."""
    return PARTITIONS if size >= TILE else -(-quarter(size) // ROWS) * ROWS


def tiles(size: int) -> int:
    """Tiles of an intermediate axis."""
    return -(-size // TILE)


def to_blocks(x: Float[Array, "... k"], order: str) -> Float[Array, "... 4 p r"]:
    """Lays the last axis out as `[4, P, R]`."""
    lead, k = x.shape[:-1], x.shape[-1]
    if order == HIDDEN:
        return jnp.swapaxes(x.reshape(*lead, 4, k // TILE, PARTITIONS), -1, -2)
    if order == CONTIGUOUS:
        return jnp.swapaxes(x.reshape(*lead, k // 4, 4), -1, -2)[..., None]
    if order == INTERLEAVED:
        pairs = jnp.swapaxes(x.reshape(*lead, 2, k // 4, 2), -1, -2)
        return lax.collapse(pairs, len(lead), len(lead) + 2)[..., None]
    assert order == INTERMEDIATE
    return _to_tiles(x)


def from_blocks(
    x: Float[Array, "... 4 p r"], order: str, size: int
) -> Float[Array, "... k"]:
    """The inverse of `to_blocks`: `size` is `K`; padding is dropped."""
    lead = x.shape[:-3]
    if order == HIDDEN:
        return jnp.swapaxes(x, -1, -2).reshape(*lead, size)
    if order == CONTIGUOUS:
        return jnp.swapaxes(x[..., 0], -1, -2).reshape(*lead, size)
    if order == INTERLEAVED:
        pairs = x[..., 0].reshape(*lead, 2, 2, size // 4)
        return jnp.swapaxes(pairs, -1, -2).reshape(*lead, size)
    assert order == INTERMEDIATE
    return _from_tiles(x, size)


def _to_tiles(x):
    lead, size = x.shape[:-1], x.shape[-1]
    full, p = size // TILE, partitions(size)
    parts = [x[..., : full * TILE].reshape(*lead, full, 4, PARTITIONS)] if full else []
    if size % TILE:
        q = quarter(size)
        rest = _padded(x[..., full * TILE :], 4 * q)
        parts.append(_padded(rest.reshape(*lead, 1, 4, q), p))
    return jnp.moveaxis(jnp.concatenate(parts, axis=-3), -3, -1)


def _from_tiles(x, size):
    lead, full = x.shape[:-3], size // TILE
    whole = jnp.moveaxis(x, -1, -3)
    parts = [whole[..., :full, :, :].reshape(*lead, full * TILE)] if full else []
    if size % TILE:
        rest = whole[..., full, :, : quarter(size)]
        parts.append(rest.reshape(*lead, -1)[..., : size % TILE])
    return jnp.concatenate(parts, axis=-1)


def _padded(x, size: int):
    """The last axis zero-padded to `size`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def grouped(x: Float[Array, "... 4 p r"]) -> Float[Array, "... 4 g 8 r"]:
    """Splits the partitions into groups of eight: blocks fill the axes `BLOCK`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // ROWS, ROWS, x.shape[-1])


def swizzle_hidden(
    x: Shaped[Array, "*rows d_model"],
) -> Shaped[Array, "*rows d_model"]:
    """Columns in order `512 t + 4 p + q` put in order `(q, t, p)`."""
    parts = x.reshape(*x.shape[:-1], -1, PARTITIONS, 4)
    return jnp.moveaxis(parts, -1, -3).reshape(x.shape)


def unswizzle_hidden(
    x: Shaped[Array, "*rows d_model"],
) -> Shaped[Array, "*rows d_model"]:
    """The inverse of `swizzle_hidden`."""
    parts = x.reshape(*x.shape[:-1], 4, -1, PARTITIONS)
    return jnp.moveaxis(parts, -3, -1).reshape(x.shape)


def pack_weight(
    w: Float[Array, "k n"], order: str, kind: Format, *, closest: bool = False
) -> tuple[Container, UInt8[Array, "p_blocks r n"]]:
    """Quantizes a weight along its rows: containers `[P, R, N]`, scales `[P/8, R, N]`.

    Its rows are in the logical order of the activation that it meets.
    """
    encode_blocks = closest_blocks if closest else quantize_blocks
    codes, scale = encode_blocks(grouped(to_blocks(w.T, order)), BLOCK, kind)
    codes = lax.collapse(jnp.moveaxis(codes, 1, -1), 1, 3)  # [n, p, r, 4]
    packed = pack(codes, kind)[..., 0]
    return jnp.moveaxis(packed, 0, -1), jnp.moveaxis(scale[:, 0, :, 0], 0, -1)


def unpack_weight(
    packed: Container,
    scale: UInt8[Array, "p_blocks r n"],
    order: str,
    kind: Format,
    size: int,
) -> Float[Array, "k n"]:
    """The whole weight of `size` rows that `pack_weight` was given, in float32."""
    blocks = dequantized(packed, scale, kind)
    return from_blocks(jnp.moveaxis(blocks, -1, 0), order, size).T


def dequantized(
    packed: Container, scale: UInt8[Array, "p_blocks r n"], kind: Format
) -> Float[Array, "4 p r n"]:
    """The float32 values of containers `[P, R, N]` with scales `[P/8, R, N]`."""
    values = jnp.stack([decode(element(packed, kind, q), kind) for q in range(4)])
    return scaled(values, jnp.repeat(scale, ROWS, axis=0))


def to_partitions(
    blocks: Float[Array, "rows 4 p r"], count: int = PARTITIONS
) -> Float[Array, "count r rows 4"]:
    """Lays rows out as the chip holds a result: `[128, R, T, 4]`, the rest zero."""
    result = blocks.transpose(2, 3, 0, 1)
    return jnp.pad(result, [(0, count - result.shape[0])] + [(0, 0)] * 3)


def from_partitions(x: Float[Array, "p r rows 4"]) -> Float[Array, "rows 4 p r"]:
    """The inverse of `to_partitions`, with all of its partitions."""
    return x.transpose(2, 3, 0, 1)


def bias_to_row(bias: Float[Array, "p r 4"], size: int) -> Float[Array, " k"]:
    """A bias `[Ip, R, 4]` of the gate or up projection in logical order."""
    return from_blocks(bias.transpose(2, 0, 1), INTERMEDIATE, size)


def row_to_bias(row: Float[Array, " k"]) -> Float[Array, "p r 4"]:
    """The inverse of `bias_to_row`."""
    return to_blocks(row, INTERMEDIATE).transpose(1, 2, 0)
