"""The macros `OutputProjection` and `OutputProjectionBwd`.

The output carries the checkpoint name `output_projection_out`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from neuronjax.kernels import output_projection as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.output_projection.rules import core_count, facts
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

NAME, BACKWARD = "OutputProjection", "OutputProjectionBwd"
Operand = Array | MemrefTile


@contracts.contracted(facts(None))
def output_projection_kernel(
    attention: Operand,
    weight: Operand,
    bias: Operand | None = None,
    *,
    form: str = "BNDS",
    transpose_out: bool = False,
    lnc: int | None = None,
    output_dtype: DTypeLike | None = None,
    **hints: Any,
) -> Operand:
    """Emits `OutputProjection`, on tensors or on tiles (`is_tiled`).

    Args:
        attention: `[B, N, D, S]` or `[D, B, N, S]`; a tile lies on `D`.
        weight: `[N*D, H]`; a tile is of `[N, D, H]`, on `D`.
        bias: `[1, H]`; a tile lies on `H`.
        form: `"BNDS"` (prefill) or `"DBNS"` (decode).
        transpose_out: decode only: the transposed layout of `output_projection_tkg`.
        lnc: the cores of that layout.
        output_dtype: dtype of the result; that of `attention` unless named.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[B, S, H]`, in decode `[B*S, H]`, or the transposed layout; for tiles a tile
        of it on `H`, in the transposed layout on its 128 rows.
    """
    operands: tuple[Any, ...] = (attention, weight, bias)
    is_tiled = is_all_io_type_memref_tile(operands, "output_projection_kernel")
    config = dict(
        form=form,
        transpose_out=bool(transpose_out),
        cores=core_count(lnc, weight.shape[-1]) if transpose_out else None,
        out_dtype=None if output_dtype is None else jnp.dtype(output_dtype).name,
        is_tiled=is_tiled,
        **hints,
    )
    if not is_tiled:
        return output_projection(*operands, name=NAME, **config)[0]
    tiles = dict(zip(("attention", "weight", "bias"), operands, strict=True))
    require_partitions("output_projection_kernel", **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    axis = 2 if form == "BNDS" else 0 if transpose_out else 1
    out = MemrefTile(output_projection(*data, name=NAME, **config)[0], axis)
    require_fit("output_projection_kernel", **tiles, out=out)
    return out


def _emit_backward(operands, outs, cotangents, *, name, **config):
    has_bias = operands[2] is not None
    grads = output_projection_backward(
        *operands, *cotangents, name=BACKWARD, has_bias=has_bias, **config
    )
    return grads if has_bias else (*grads, None)


def _backward_leaf(*args, name, has_bias, **config):
    grads = kernel.output_projection_bwd(*args, name=name, **config)
    return grads if has_bias else grads[:2]


def _plain_backward(attention, weight, bias, d_out, *, name, has_bias, **config):
    plain = functools.partial(kernel.output_projection_plain, name=NAME, **config)
    grads = jax.vjp(plain, attention, weight, bias)[1]((d_out,))
    return grads if has_bias else grads[:2]


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((batch, 2, 4, 3), (8, 6), (1, 6), (batch, 3, 6))
    operands = [
        jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)
    ]
    config = dict(
        form="BNDS", transpose_out=False, cores=None, out_dtype=None, is_tiled=False
    )
    if name == NAME:
        return Example(tuple(operands[:3]), config, (0, None, None), (0,))
    config["has_bias"] = True
    return Example(tuple(operands), config, (0, None, None, 0), (0, None, None))


output_projection_backward = MacroFamily(
    "output_projection_bwd",
    (BACKWARD,),
    _backward_leaf,
    plain=_plain_backward,
    outputs=lambda *, has_bias, **_: ("d_attention", "d_weight", "d_bias")[
        : 2 + has_bias
    ],
    example=_example,
)
output_projection = MacroFamily(
    "output_projection",
    (NAME,),
    kernel.output_projection_fwd,
    plain=kernel.output_projection_plain,
    outputs=("out",),
    backward=_emit_backward,
    example=_example,
)
