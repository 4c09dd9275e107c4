"""The probes as one sum of products, whatever the plan."""

from typing import Any

import jax.numpy as jnp

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.kernels.hw_ubench.layout import (
    addressed,
    data_of,
    tensor_of,
    unflattened,
)


def tiled_mm_plain(
    stationary, moving, added, *, name: str, transpose: bool, is_tiled: bool, **_: Any
):
    """`out[.., m, n] = sum_k stationary[.., k, m] moving[.., k, n]`, and `added`."""
    if is_tiled:
        stationary, moving = (tensor_of(x, 2) for x in (stationary, moving))
    return _sum("...km,...kn->...mn", stationary, moving, added, transpose, is_tiled)


def packed_plain(
    stationary,
    moving,
    added,
    *,
    name: str,
    transpose: bool,
    is_tiled: bool,
    lhs_free_and_double_row_shape: tuple[int, int] | None,
    stationary_index: tuple[int, ...] | None,
    moving_index: tuple[int, ...] | None,
    **_: Any,
):
    """The sum over rows and their halves; how they are paired changes no sum."""
    flat = lhs_free_and_double_row_shape
    if is_tiled:
        stationary = tensor_of(stationary, 3 if flat is None else 2)
        moving = tensor_of(moving, 3)
    s = addressed(unflattened(stationary, flat), stationary_index)
    x = addressed(moving, moving_index)
    spec = "...krm,...krn->...mn"
    return _sum(spec, s, x, added, transpose, is_tiled)


def _sum(spec: str, s, x, added, transpose: bool, is_tiled: bool):
    factor = promoted(s.dtype, x.dtype)
    factors = s.astype(factor), x.astype(factor)
    out = jnp.einsum(spec, *factors, preferred_element_type=accumulator(factor))
    out = out.swapaxes(-1, -2) if transpose else out
    out = data_of(out, 2) if is_tiled else out
    return (out if added is None else out + added.astype(out.dtype),)
