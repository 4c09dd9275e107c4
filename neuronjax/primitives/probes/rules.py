"""The rules of all three probes: one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from neuronjax.kernels.hw_ubench.plan import PARTITIONS
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size, all_or_none_tiles, told
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import described, is_flag
from neuronjax.primitives.probes import plan
from neuronjax.primitives.probes.facts import (
    COLUMN,
    PACKED,
    ROW,
    example_operands,
    example_tiles,
)
from neuronjax.primitives.tile import MemrefTile

ALL, TILED = (ROW, COLUMN, PACKED), (ROW, COLUMN)
BANK = 512  # float32 values of one PSUM bank, in a partition
_IOS = ("stationary", "moving", "psum", "lhs", "rhs")


def changed(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple of sizes is a shape."""

    def build(function: str) -> dict[str, Any]:
        given = example_operands(function) | changes
        for name in _IOS:
            shape = given.get(name)
            if isinstance(shape, tuple):
                shape = (
                    (*shape[:-1], 2, shape[-1]) if _doubled(function, name) else shape
                )
                given[name] = np.zeros(shape, np.float32)
        return given

    return build


def _doubled(function: str, name: str) -> bool:
    return function == PACKED and name != "psum"


def tiled(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """The same as tiles; a shape is laid out with its first axis on partitions."""

    def build(function: str) -> dict[str, Any]:
        given = {**changed(**changes)(function)}
        for name in _IOS:
            x = given.get(name)
            if isinstance(x, np.ndarray):
                buffer = "psum" if name == "psum" else "sbuf"
                given[name] = MemrefTile.from_tensor(jnp.asarray(x), 0, buffer=buffer)
        return given

    return build


def _symbolic(function: str) -> dict[str, Any]:
    """Operands with as many rows as an export leaves open."""
    (rows,) = export.symbolic_shape("k")
    given = example_operands(function)
    return {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in given.items()
    }


def row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters one row."""
    text = message if kwargs.get("literal") else "{function}: " + message
    contracts.add(Contract(f"probes.{rule}", functions, text, *args, **kwargs))


def _twice(call: SimpleNamespace) -> str:
    """Which operand is absent, or came under both of its names."""
    for name, other in (("stationary", "lhs"), ("moving", "rhs")):
        given = [getattr(call, key) is not None for key in (name, other)]
        if all(given) or not any(given):
            return f"{name} (or {other}), got {'both' if all(given) else 'neither'}"
    return ""


for _emitter in ALL:
    contracts.add(only_hints(_emitter, changed()))
    contracts.add(
        all_or_none_tiles(
            _emitter,
            _IOS,
            lambda function: (
                example_operands(function)
                | dict(moving=example_tiles(function)["moving"])
            ),
        )
    )
row(
    "operands",
    ALL,
    "an operand must come under one name: {twice}",
    told("twice", _twice),
    example=lambda function: (
        example_operands(function) | dict(lhs=example_operands(function)["stationary"])
    ),
    stage=0,
)
row(
    "rank",
    TILED,
    "stationary must have shape [k, m] or [tiles, k, m] and moving [k, n] or [tiles, "
    "k, n], got {left_shape} and {right_shape}",
    lambda c: not c.ranked,
    example=changed(moving=(1, 2, 4)),
)
row(
    "known",
    ALL,
    "sizes of stationary must be known while tracing, the plan depends on them, got "
    "{left_shape}",
    lambda c: c.ranked and not all(isinstance(x, int) for x in (c.tiles, c.k, c.m)),
    example=_symbolic,
)
row(
    "flag",
    ALL,
    "transpose must be True or False, known while tracing, got {shown_transpose}",
    told(
        "shown_transpose",
        lambda c: "" if is_flag(c.transpose) else described(c.transpose),
    ),
    example=changed(transpose="yes"),
)
row(
    "dtype",
    ALL,
    "operands must be bfloat16, float16, float32 or float64, got {odd_dtype}",
    lambda c: c.odd_dtype,
    example=lambda function: {
        k: x.astype(np.int32) for k, x in example_operands(function).items()
    },
)
row(
    "dtypes",
    ALL,
    "stationary and moving must have one dtype, got {dtypes}",
    lambda c: not c.odd_dtype and not c.alike,
    example=lambda function: (
        example_operands(function)
        | dict(moving=example_operands(function)["moving"].astype(np.float16))
    ),
)
row(
    "tile",
    ALL,
    "{odd_tile}",
    lambda c: c.odd_tile,
    example=lambda function: (
        example_tiles(function)
        | dict(
            moving=MemrefTile.from_tensor(
                jnp.asarray(example_operands(function)["moving"]), 0, buffer="psum"
            )
        )
    ),
)
row(
    "both_sizes",
    ALL,
    "the size of a band must come as tile_size or as tile_shape, got both",
    lambda c: c.both_sizes,
    example=changed(tile_size=(128, 128), tile_shape=(128, 128)),
)
row(
    "tile_size",
    ALL,
    "{odd_size}",
    lambda c: c.odd_size,
    example=lambda function: changed(
        tile_size=(48, 128) if function != COLUMN else (128, 48)
    )(function),
)
row(
    "sizes",
    ALL,
    "every size must be at least 1, got {left_shape} and {right_shape}",
    lambda c: any(
        isinstance(size, int) and size < 1 for size in (c.tiles, c.k, c.m, c.n)
    ),
    example=changed(moving=(2, 0)),
    stage=2,
)
row(
    "contracted",
    ALL,
    "moving must have k = {k} rows to contract, those of stationary, got {right_shape}",
    lambda c: c.k != c.k_moving,
    example=changed(moving=(3, 4)),
    stage=2,
)
row(
    "tiles",
    ALL,
    "moving must have {tiles} tiles, as many as stationary, got {right_shape}",
    lambda c: c.tiles != c.tiles_moving,
    example=changed(stationary=(2, 2, 3), moving=(3, 2, 4)),
    stage=2,
)
row(
    "psum",
    ALL,
    "psum must have the result's shape {out_shape} in {acc}, got {psum_shape} in "
    "{psum_dtype}",
    lambda c: (
        c.psum is not None and (c.psum_shape, c.psum_dtype) != (c.out_shape, c.acc)
    ),
    example=changed(psum=(4, 3)),
    stage=2,
)
row(
    "tile_position",
    ALL,
    "{odd_position}",
    lambda c: c.odd_position,
    example=changed(
        stationary=(2, 2, 3), moving=(2, 2, 4), tile_position=((0, 0), (0, 0))
    ),
    stage=2,
)
row(
    "columns",
    (COLUMN,),
    "{odd_columns}",
    told(
        "odd_columns",
        lambda c: plan.odd_columns(c.m, c.band) if c.band[1] < PARTITIONS else "",
    ),
    example=changed(stationary=(2, 40), tile_size=(128, 32)),
    stage=2,
)
row(
    "chip_rows",
    ALL,
    "a pass of the chip contracts k up to 128, got {left_shape}",
    size=Size("k", lambda c: c.k, maximum=PARTITIONS),
    example=tiled(stationary=(256, 3), moving=(256, 4)),
    tag="hw",
    stage=3,
)
row(
    "chip_columns",
    ALL,
    "the array has m up to 128 columns, got {left_shape}",
    size=Size("m", lambda c: c.m, maximum=PARTITIONS),
    example=tiled(stationary=(2, 129)),
    tag="hw",
    stage=3,
)
row(
    "chip_bank",
    ALL,
    "a PSUM bank holds n up to 512 float32 values a partition, got {right_shape}",
    size=Size("n", lambda c: 1 if c.transpose else c.n, maximum=BANK),
    example=tiled(moving=(2, 513)),
    tag="hw",
    stage=3,
)
row(
    "chip_transposed",
    ALL,
    "a transposed result lies on n up to 128 partitions, got {right_shape}",
    lambda c: c.transpose and isinstance(c.n, int) and c.n > PARTITIONS,
    example=tiled(moving=(2, 129), transpose=True),
    tag="hw",
    stage=3,
)
