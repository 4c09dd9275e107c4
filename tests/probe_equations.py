"""The products of the matmul probes as their equations have them, in float64 NumPy."""

import numpy as np

from neuronjax import emit
from tests.arrays import array

EMITTERS = dict(row=emit.row_tiled_mm_kernel, column=emit.column_tiled_mm_kernel)
NAMES = dict(row="RowTiledMM", column="ColumnTiledMM", packed="CaymanPackedPETranspose")


def drawn(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [array(rng.normal(size=shape), dtype) for shape in shapes]


def products(stationary, moving, psum=None, transpose=False):
    """`out[t, m, n] = sum_k stationary[t, k, m] moving[t, k, n] + psum`, row by row."""
    s, x = np.asarray(stationary, np.float64), np.asarray(moving, np.float64)
    out = np.zeros((s.shape[0], s.shape[2], x.shape[2]))
    for tile in range(s.shape[0]):
        for k in range(s.shape[1]):
            out[tile] += np.outer(s[tile, k], x[tile, k])
    out = out.transpose(0, 2, 1) if transpose else out
    return out if psum is None else out + np.asarray(psum, np.float64)


def double_products(stationary, moving, transpose=False):
    """`out[c, m, n] = sum_{k, r} stationary[c, k, r, m] moving[c, k, r, n]`."""
    s, x = np.asarray(stationary, np.float64), np.asarray(moving, np.float64)
    out = np.zeros((s.shape[0], s.shape[3], x.shape[3]))
    for channel in range(s.shape[0]):
        for k in range(s.shape[1]):
            for r in (0, 1):
                out[channel] += np.outer(s[channel, k, r], x[channel, k, r])
    return out.transpose(0, 2, 1) if transpose else out


def gradients(stationary, moving, d_out):
    """`d_stationary = moving d_out^T` and `d_moving = stationary d_out`, each tile."""
    s, x, d = (np.asarray(a, np.float64) for a in (stationary, moving, d_out))
    pairs = list(zip(s, x, d, strict=True))
    return np.stack([x @ d.T for _, x, d in pairs]), np.stack(
        [s @ d for s, _, d in pairs]
    )
