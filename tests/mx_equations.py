"""The MX equations in float64 NumPy, written from the specification alone."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

LARGEST = dict(float8_e4m3fn=448.0, float8_e5m2=57344.0, float4_e2m1fn=6.0)
MAX_EXPONENT = dict(float8_e4m3fn=8, float8_e5m2=15, float4_e2m1fn=2)
BITS = dict(float8_e4m3fn=8, float8_e5m2=8, float4_e2m1fn=4)
FORMATS = tuple(LARGEST)


def cast(x, name):
    """Rounds to the format, to nearest and ties to even, after a clip."""
    clipped = np.clip(np.asarray(x, np.float32), -LARGEST[name], LARGEST[name])
    return clipped.astype(getattr(ml_dtypes, name))


def all_values(name):
    """The value of every code, in the order of the codes."""
    codes = np.arange(2 ** BITS[name], dtype=np.uint8)
    return codes.view(getattr(ml_dtypes, name)).astype(np.float32)


def quantize(x, name):
    """Values and scales of blocks that fill the last axis: `[..., 32]`."""
    x = np.asarray(x, np.float32)
    field = (x.view(np.uint32) >> 23 & 0xFF).astype(np.int64)
    top = field.max(-1, keepdims=True) - MAX_EXPONENT[name]
    values = cast(np.asarray(x, np.float64) / 2.0 ** (top - 127), name)
    return values.astype(np.float64), np.clip(top, 0, 255)


def rounded(x, name="float8_e4m3fn"):
    """Quantized and dequantized, blocks along the last axis."""
    values, scale = quantize(x, name)
    return values * 2.0 ** (scale - 127.0)


def row_of(order, size, q, p, r):
    """The logical index of element `q` of container `p` in tile `r`; None for none."""
    if order == "hidden":
        return (q * (size // 512) + r) * 128 + p
    if order == "contiguous":
        return 4 * p + q
    if order == "interleaved":
        return (q // 2) * (size // 2) + 2 * p + q % 2
    valid = min(size - 512 * r, 512)
    part = -(-valid // 8) * 8 // 4
    inside = p < part and q * part + p < valid
    return 512 * r + q * part + p if inside else None


def shape_of(order, size):
    """Partitions and tiles of a contraction axis."""
    if order == "hidden":
        return 128, size // 512
    if order != "intermediate":
        return size // 4, 1
    if size >= 512:
        return 128, -(-size // 512)
    return -(-(-(-size // 8) * 2) // 8) * 8, 1


def index_blocks(order, size):
    """`[P/8, R, 32]`: logical rows of each block, -1 where there is none."""
    p, r = shape_of(order, size)
    index = np.full((p // 8, r, 32), -1)
    for container, tile, q in np.ndindex(p, r, 4):
        row = row_of(order, size, q, container, tile)
        if row is not None:
            index[container // 8, tile, container % 8 * 4 + q] = row
    return index


def rounded_rows(x, order, name="float8_e4m3fn"):
    """`x` `[..., K]` rounded in the blocks of `order`."""
    index = index_blocks(order, x.shape[-1])
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], 1))], -1)
    blocks = rounded(padded[..., index], name)
    result = np.zeros(padded.shape)
    result[..., index] = blocks
    return result[..., :-1]


def saturated_rows(x, order, name="float8_e4m3fn"):
    """Where rounding clips `x`: beyond the largest value of its block's scale."""
    index = index_blocks(order, x.shape[-1])
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], 1))], -1).astype(np.float32)
    blocks = padded[..., index]
    field = (blocks.view(np.uint32) >> 23 & 0xFF).astype(np.int64)
    top = field.max(-1, keepdims=True) - MAX_EXPONENT[name] - 127
    result = np.zeros(padded.shape, bool)
    result[..., index] = np.abs(np.float64(blocks)) > LARGEST[name] * 2.0**top
    return result[..., :-1]


def codes_of(values, name):
    """The codes of values that the format has."""
    return np.asarray(values).astype(getattr(ml_dtypes, name)).view(np.uint8)


def packed_weight(w, order, name):
    """A weight `[K, N]` as containers `[P, R, N]` and scales `[P/8, R, N]`."""
    size, columns = w.shape
    index = index_blocks(order, size)
    padded = np.concatenate([w, np.zeros((1, columns))]).T
    values, scale = quantize(padded[:, index], name)  # [N, P/8, R, 32]
    codes = codes_of(values, name).astype(np.uint32)
    codes = codes.reshape(columns, index.shape[0], index.shape[1], 8, 4)
    shifts = np.arange(4, dtype=np.uint32) * BITS[name]
    packed = (codes << shifts).sum(-1, dtype=np.uint32).transpose(1, 3, 2, 0)
    container = np.uint16 if BITS[name] == 4 else np.uint32
    packed = packed.reshape(-1, index.shape[1], columns).astype(container)
    return packed, np.moveaxis(scale[..., 0], 0, -1).astype(np.uint8)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def weight(k, n, order, name, seed=0):
    packed, scale = packed_weight(normal(k, n, seed=seed), order, name)
    dense = rounded_rows(normal(k, n, seed=seed).T, order, name).T
    return jnp.asarray(packed), jnp.asarray(scale), dense
