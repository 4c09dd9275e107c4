"""The macros `RowTiledMM`, `ColumnTiledMM` and `CaymanPackedPETranspose`.

Their results carry the checkpoint names `row_tiled_mm_out`, `column_tiled_mm_out` and
`packed_cayman_pe_tp_out`. A product is linear in each operand, and its gradients are
products again: the backward emits the same NAME twice, once for each operand.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from neuronjax.kernels.hw_ubench import plain, tiled_mm
from neuronjax.kernels.hw_ubench.layout import (
    addressed,
    data_of,
    doubled,
    logical,
    tensor_of,
    unflattened,
)
from neuronjax.kernels.hw_ubench.plan import PARTITIONS, plan_of
from neuronjax.kernels.hw_ubench.tiled_mm import KIND
from neuronjax.primitives.macro import Example, MacroFamily

ROW, COLUMN, PACKED = "RowTiledMM", "ColumnTiledMM", "CaymanPackedPETranspose"
_GUARD = "Must be {expected} but got {name}"
_DIVIDED = (
    "a pass loads whole tiles into the rows of one array: divide operands with "
    "jax.shard_map, not over an explicit mesh"
)
# What of a config says how the operands of this one call lie.
_LAYOUT = ("double_row_indices", "lhs_free_and_double_row_shape")
_LAYOUT += ("stationary_index", "moving_index")


def placed(
    name: str, rows: Any, columns: int, tiles: int, size: Any = None, where: Any = None
) -> dict[str, Any]:
    """The band's size and positions of a call, as the config bag has them."""
    plan = plan_of(KIND[name], tiles, rows, columns, size, where)
    return dict(tile_size=plan.tile_size, tile_position=plan.positions)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    """`d_stationary = moving d_out^T` and `d_moving = stationary d_out`, by rows."""
    stationary, moving, added = operands
    (d_out,) = cotangents
    d_mn = tensor_of(d_out, 2) if config["is_tiled"] else d_out
    d_mn = d_mn.swapaxes(-1, -2) if config["transpose"] else d_mn
    left, pull_left = jax.vjp(_rows_of(name, True, config), stationary)
    right, pull_right = jax.vjp(_rows_of(name, False, config), moving)
    d_left = _product(name, config, right.swapaxes(-1, -2), d_mn.swapaxes(-1, -2))
    d_right = _product(name, config, left.swapaxes(-1, -2), d_mn)
    (d_stationary,) = pull_left(d_left.astype(left.dtype))
    (d_moving,) = pull_right(d_right.astype(right.dtype))
    return d_stationary, d_moving, None if added is None else d_out


def _rows_of(name: str, is_left: bool, config: dict[str, Any]) -> Callable:
    """An operand to `[*tiles, rows, columns]`, the rows of both halves among them."""
    packed, tiled = name == PACKED, config["is_tiled"]
    flat = config.get("lhs_free_and_double_row_shape") if is_left else None
    index = config.get("stationary_index" if is_left else "moving_index")

    def rows(x: Array) -> Array:
        x = tensor_of(x, 3 if packed and flat is None else 2) if tiled else x
        return logical(addressed(unflattened(x, flat), index)) if packed else x

    return rows


def _product(name: str, config: dict[str, Any], a: Array, b: Array) -> Array:
    """The sum over rows `c` of `a[.., c, i] b[.., c, j]`: the same NAME again."""
    packed, b = name == PACKED, b.astype(a.dtype)
    rank = 3 if packed else 2
    a, b = (doubled(x) if packed else x for x in (a, b))
    rows, tiles = a.shape[-rank], a.shape[0] if a.ndim > rank else 1
    # A tile holds at most 128 rows here, and so does its result: more are passes over
    # tensors.
    tiled = config["is_tiled"] and max(rows, a.shape[-1]) <= PARTITIONS
    config = config | placed(name, rows, a.shape[-1], tiles)
    config |= {key: None for key in _LAYOUT if key in config}
    config |= dict(transpose=False, psum="start", is_tiled=tiled)
    pair = [data_of(x, rank) if tiled else x for x in (a, b)]
    (out,) = FAMILIES[name](*pair, None, name=name, **config)
    return tensor_of(out, 2) if tiled else out


def _example(name: str, dtype: Any, batch: int) -> Example:
    """Three tiles in two bands: two groups, and of the rows two passes each."""
    columns = 2 * batch
    shapes = {
        ROW: ((3, 34, 3), (3, 34, columns), (3, 3, columns)),
        COLUMN: ((2, 5, 3), (2, 5, columns), None),
        PACKED: ((2, 3, 2, 3), (2, 3, 2, columns), None),
    }[name]
    keys = jax.random.split(jax.random.key(7), 3)
    operands = tuple(
        None if s is None else jax.random.normal(k, s, dtype)
        for k, s in zip(keys, shapes, strict=True)
    )
    config: dict[str, Any] = dict(transpose=name == COLUMN, is_tiled=False)
    config |= dict(psum="start" if operands[2] is None else "add")
    if name == ROW:
        config |= placed(ROW, 34, 3, 3, (32, 128), ((32, 0), (96, 0)))
        return Example(operands, config, (None, 2, 2), (2,))
    if name == COLUMN:
        return Example(operands, config | placed(name, 5, 3, 2), (None, 2), (1,))
    config |= placed(name, 3, 3, 2) | dict(perf_mode="double_row_gen3", num_channels=2)
    config |= dict(double_row_indices=((0, 3), (1, 4), (2, 5)))
    config |= dict(
        lhs_free_and_double_row_shape=None, stationary_index=None, moving_index=None
    )
    return Example(operands, config, (None, 3), (2,))


def _family(family: str, name: str, leaf: Callable, reference: Callable) -> MacroFamily:
    return MacroFamily(
        family,
        (name,),
        leaf,
        plain=reference,
        outputs=("out",),
        backward=_emit_backward,
        example=_example,
        foreign=_GUARD,
        reemits=2,
        refuses={"explicit sharding": _DIVIDED},
    )


FAMILIES = {
    ROW: _family("row_tiled_mm", ROW, tiled_mm.tiled_mm_fwd, plain.tiled_mm_plain),
    COLUMN: _family(
        "column_tiled_mm", COLUMN, tiled_mm.tiled_mm_fwd, plain.tiled_mm_plain
    ),
    PACKED: _family(
        "packed_cayman_pe_tp", PACKED, tiled_mm.packed_fwd, plain.packed_plain
    ),
}
