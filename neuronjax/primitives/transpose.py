"""The transpose of the last two axes: the function, and the macro `Transpose`.

The output carries the checkpoint name `matrix_transpose_out`. The gradient is the same
macro, of the cotangent.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from neuronjax.kernels import transpose as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.tile import (
    PARTITIONS,
    MemrefTile,
    require_fit,
    require_partitions,
)

NAME = "Transpose"
TILED = "Transpose (tiles)"
PUBLIC, EMITTER = "transpose", "transpose_kernel"
_BOTH = (PUBLIC, EMITTER)


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    shape = tuple(getattr(call.x, "shape", ()))
    tiled = isinstance(call.x, MemrefTile)
    ranked = len(shape) >= 2
    on_matrix = not tiled or call.x.axis in (len(shape) - 1, len(shape) - 2)
    free = 1
    if tiled and ranked and on_matrix:
        free = shape[2 * len(shape) - 3 - call.x.axis]
    return dict(
        shape=shape,
        tiled=tiled,
        ranked=ranked,
        on_matrix=on_matrix,
        axis=call.x.axis if tiled else None,
        free=free,
        array=tiled or hasattr(call.x, "dtype"),
        kind=type(call.x).__name__,
    )


@contracts.contracted(_facts)
def transpose(
    x: Shaped[Array, "*batch rows columns"] | MemrefTile,
) -> Shaped[Array, "*batch columns rows"] | MemrefTile:
    r"""Exchanges the last two axes of a tensor or of a tile.

    $$y_{\ldots ji} = x_{\ldots ij}$$

    Args:
        x: `[*batch, a, b]`, any dtype; or a tile of such a tensor that has one of the
            two last axes on its partitions.

    Returns:
        `[*batch, b, a]` in the dtype of `x`. Of a tile, a tile in SBUF: what lay on the
        partitions is free now, and the free one of the two axes lies there, so that
        `axis` of both tiles is the same. The gradient is the same macro. The checkpoint
        name is `matrix_transpose_out`.

    Raises:
        ValueError: `x` has fewer than two axes; a tile has another axis on its
            partitions, or an axis that does not fill them.

    Source:
        The definition of the NAME `Transpose`, a move of 128 x 128 elements through the
        matrix unit. XLA's own transpose moves whole tensors here.

    Example:
        >>> import jax.numpy as jnp
        >>> transpose(jnp.array([[1, 2, 3], [4, 5, 6]])).tolist()
        [[1, 4], [2, 5], [3, 6]]
        >>> tile = MemrefTile.from_tensor(jnp.zeros((256, 3)), axis=0)
        >>> transpose(tile).data.shape
        (3, 1, 256)
    """
    return transpose_kernel(x)


@contracts.contracted(_facts)
def transpose_kernel(
    x: Shaped[Array, "*batch rows columns"] | MemrefTile, **hints: Any
) -> Shaped[Array, "*batch columns rows"] | MemrefTile:
    """Emits `Transpose`, on a tensor or on a tile (`is_tiled`).

    Args:
        x: as in `transpose`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        As `transpose`.
    """
    if not isinstance(x, MemrefTile):
        config = dict(is_tiled=False, chunks=None, row_axis=True, **hints)
        return transpose_family(x, name=NAME, **config)[0]
    require_partitions(EMITTER, x=x)
    row_axis = x.axis == len(x.shape) - 2
    config = dict(is_tiled=True, chunks=None, row_axis=row_axis, **hints)
    out = MemrefTile(transpose_family(x.data, name=NAME, **config)[0], x.axis)
    require_fit(EMITTER, x=x, out=out)
    return out


def _emit_backward(operands, outs, cotangents, *, name, **config):
    (x,), config = operands, dict(config)
    config["chunks"] = x.shape[1] if config["is_tiled"] else None
    return transpose_family(*cotangents, name=name, **config)


def _example(name: str, dtype: Any, batch: int) -> Example:
    """A tile of `[3, batch, 4]` has its rows, the last axis but one, on partitions."""
    if name == NAME:
        config = dict(is_tiled=False, chunks=None, row_axis=True)
        x = jax.random.normal(jax.random.key(7), (batch, 3, 4), dtype)
        return Example((x,), config, (0,), (0,))
    config = dict(is_tiled=True, chunks=2, row_axis=True)
    data = jax.random.normal(jax.random.key(8), (3, 2, batch, 4), dtype)
    return Example((data,), config, (2,), (2,))


# JAX has a primitive of the name `transpose`.
transpose_family = MacroFamily(
    "matrix_transpose",
    (NAME,),
    kernel.transpose_fwd,
    plain=kernel.transpose_plain,
    outputs=("out",),
    backward=_emit_backward,
    example=_example,
    variants=(TILED,),
    reemits=1,
)


def _arguments(shape: tuple[int, ...] = (2, 3)) -> Callable[[str], dict[str, Any]]:
    return lambda function: dict(x=np.zeros(shape, np.float32))


def _tile(shape: tuple[int, ...], axis: int) -> Callable[[str], dict[str, Any]]:
    return lambda function: dict(x=MemrefTile.from_tensor(jnp.zeros(shape), axis))


def _row(rule: str, message: str, *args: Any, **kwargs: Any) -> None:
    text = "{function}: " + message
    contracts.add(Contract(f"transpose.{rule}", _BOTH, text, *args, **kwargs))


contracts.add(only_hints(EMITTER, _arguments()))
_row(
    "array",
    "x must be an array or a tile, got {kind}",
    lambda c: not c.array,
    example=lambda function: dict(x="matrix"),
)
_row(
    "rank",
    "x must have at least two axes, got shape {shape}",
    lambda c: c.array and not c.ranked,
    example=_arguments((3,)),
)
_row(
    "partitions",
    "a tile of x must have one of its last two axes on the partitions, got axis "
    "{axis} of shape {shape}",
    lambda c: c.ranked and not c.on_matrix,
    example=_tile((2, 3, 4), 0),
)
_row(
    "tile_free",
    "the axis of x that goes to the partitions must have at most 128 or a multiple, "
    "got shape {shape}",
    size=Size(
        "free",
        lambda c: c.free if c.free > PARTITIONS else PARTITIONS,
        multiple=PARTITIONS,
    ),
    example=_tile((3, 160), 0),
    tag="hw",
)
