"""The macros `OutputProjection` and `OutputProjectionBwd`.

The output carries the checkpoint name `output_projection_out`.

A quantized call keeps the NAME: its scales are appended operands, the config says
`quantization` and `is_fp8_kernel`. Its weight and scales are constants; fp8 operands
take no part in differentiation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from neuronjax.kernels import output_projection as kernel
from neuronjax.kernels import output_projection_quantized as quantized
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.mx import output_projection as blocks
from neuronjax.kernels.mx.formats import E4M3FN
from neuronjax.kernels.mx.layout import CONTIGUOUS, pack_weight
from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.known import require_divisors
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import QuantizationType, member
from neuronjax.primitives.output_projection import (
    mx_rules,  # noqa: F401  enters the rows
    quantized_rules,  # noqa: F401  enters the rows
)
from neuronjax.primitives.output_projection.rules import core_count, facts
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

NAME, BACKWARD = "OutputProjection", "OutputProjectionBwd"
QUANTIZED = "OutputProjection (static fp8)"
Operand = Array | MemrefTile
BLOCK_SCALED = "OutputProjection (block-scaled fp8)"


@contracts.contracted(facts(None))
def output_projection_kernel(
    attention: Operand,
    weight: Operand,
    bias: Operand | None = None,
    weight_scale: Operand | None = None,
    input_scale: Operand | None = None,
    *,
    quantization_type: QuantizationType | str = "NONE",
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
        weight_scale: as in the public functions; a tile lies on its columns.
        input_scale: as in the public functions; a tile lies on its column.
        quantization_type: `NONE`, `STATIC`, `ROW`, or for `"BNDS"` `STATIC_MX` and
            `MX`, which takes no tiles.
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
    require_divisors("output_projection_kernel", input_scale=input_scale)
    config = dict(
        form=form,
        transpose_out=bool(transpose_out),
        cores=core_count(lnc, weight.shape[-1]) if transpose_out else None,
        out_dtype=None if output_dtype is None else jnp.dtype(output_dtype).name,
        is_tiled=is_tiled,
        **hints,
    )
    kind = member(QuantizationType, quantization_type)
    if kind is not QuantizationType.NONE:
        operands += (weight_scale, input_scale)
        config |= dict(quantization=kind.name, is_fp8_kernel=is_fp8(weight.dtype))
    if kind is QuantizationType.MX:
        config |= _block_config(attention, weight, output_dtype)
    if not is_tiled:
        return output_projection(*operands, name=NAME, **config)[0]
    names = ("attention", "weight", "bias", "weight_scale", "input_scale")
    tiles = dict(zip(names, operands, strict=False))
    require_partitions("output_projection_kernel", **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    axis = 2 if form == "BNDS" else 0 if transpose_out else 1
    out = MemrefTile(output_projection(*data, name=NAME, **config)[0], axis)
    require_fit("output_projection_kernel", **tiles, out=out)
    return out


def _block_config(attention: Any, weight: Any, out_dtype: Any) -> dict[str, Any]:
    """What a block-scaled call has in its config beside the rest, or otherwise."""
    kind = weight_format(weight)
    assert kind is not None
    return dict(
        is_fp8_kernel=kind.bits == 8,
        weight_format=kind.name,
        is_packed=not is_differentiable(attention.dtype),
        out_dtype=jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype).name,
    )


def _leaf(*operands, **config):
    if config.get("quantization") == "MX":
        return blocks.mx_output_projection_fwd(*operands, **config)
    if "quantization" in config:
        return quantized.quantized_output_projection_fwd(*operands, **config)
    return kernel.output_projection_fwd(*operands, **config)


def _plain(*operands, **config):
    if config.get("quantization") == "MX":
        return blocks.mx_output_projection_plain(*operands, **config)
    if "quantization" in config:
        return quantized.quantized_output_projection_plain(*operands, **config)
    return kernel.output_projection_plain(*operands, **config)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    has_bias = operands[2] is not None
    grads = output_projection_backward(
        *operands, *cotangents, name=BACKWARD, has_bias=has_bias, **config
    )
    grads = (None, *grads) if config.get("is_packed") else grads
    grads = grads if has_bias else (*grads, None)
    if "quantization" not in config:
        return grads
    constants = [_no_gradient(x) for x in operands]
    return (grads[0], constants[1], grads[1], *constants[3:])


def _no_gradient(x):
    """Zeros for a constant; nothing for what is absent or fp8."""
    if x is None or not is_differentiable(x.dtype):
        return None
    return jnp.zeros_like(x)


def _backward_leaf(*args, has_bias, **config):
    if config.get("quantization") == "MX":
        found = blocks.mx_output_projection_bwd(*args, **config)
        return tuple(grad for grad in found if grad is not None)
    if "quantization" in config:
        grads = quantized.quantized_output_projection_bwd(*args, **config)
        return grads if has_bias else grads[:1]
    grads = kernel.output_projection_bwd(*args, **config)
    return grads if has_bias else grads[:2]


def _plain_backward(*args, name, has_bias, **config):
    *operands, d_out = args
    where = [0] if "quantization" in config else [0, 1]
    where = [] if config.get("is_packed") else where
    where += [2] if has_bias else []

    def run(*moved):
        new = dict(zip(where, moved, strict=True))
        given = [new.get(i, x) for i, x in enumerate(operands)]
        return _plain(*given, name=NAME, **config)

    return jax.vjp(run, *[operands[i] for i in where])[1]((d_out,))


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((batch, 2, 4, 3), (8, 6), (1, 6), (batch, 3, 6))
    operands = [
        jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)
    ]
    config: dict[str, Any] = dict(
        form="BNDS", transpose_out=False, cores=None, out_dtype=None, is_tiled=False
    )
    if name == BLOCK_SCALED:
        return _block_scaled_example(dtype, batch, config)
    if name == QUANTIZED:
        attention, weight, bias = operands[:3]
        scales = [jnp.full((1, 1), value, jnp.float32) for value in (0.5, 0.125)]
        config |= dict(quantization="STATIC", is_fp8_kernel=True)
        weight = weight.astype(jnp.float8_e4m3)
        return Example(
            (attention, weight, bias, *scales), config, (0, *[None] * 4), (0,)
        )
    if name == NAME:
        return Example(tuple(operands[:3]), config, (0, None, None), (0,))
    config["has_bias"] = True
    return Example(tuple(operands), config, (0, None, None, 0), (0, None, None))


def _block_scaled_example(dtype: Any, batch: int, config: dict[str, Any]) -> Example:
    keys = jax.random.split(jax.random.key(1), 3)
    attention = jax.random.normal(keys[0], (batch, 2, 16, 3), dtype)
    weight = jax.random.normal(keys[1], (32, 6))
    codes, scale = (x[:, 0] for x in pack_weight(weight, CONTIGUOUS, E4M3FN))
    bias = jax.random.normal(keys[2], (1, 6), dtype)
    config |= dict(quantization="MX", is_fp8_kernel=True, is_packed=False)
    config |= dict(weight_format=E4M3FN.name, out_dtype=jnp.dtype(dtype).name)
    operands = (attention, codes, bias, scale, None)
    return Example(operands, config, (0, None, None, None), (0,))


def _gradient_names(*, has_bias, is_packed=False, **config):
    attention = () if is_packed else ("d_attention",)
    weight = () if "quantization" in config else ("d_weight",)
    return (*attention, *weight, *(("d_bias",) if has_bias else ()))


output_projection_backward = MacroFamily(
    "output_projection_bwd",
    (BACKWARD,),
    _backward_leaf,
    plain=_plain_backward,
    outputs=_gradient_names,
    example=_example,
)
output_projection = MacroFamily(
    "output_projection",
    (NAME,),
    _leaf,
    plain=_plain,
    outputs=("out",),
    backward=_emit_backward,
    example=_example,
    variants=(QUANTIZED, BLOCK_SCALED),
)
