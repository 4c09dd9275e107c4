"""The macros `RMSNormQuant` and `TiledNativeKernelRMSNormQuant`.

Outputs carry the checkpoint names `rmsnorm_quant_packed`, `rmsnorm_quant_codes` and
`rmsnorm_quant_scale`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from neuronjax.kernels import rmsnorm_quant as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import NormType
from neuronjax.primitives.rmsnorm_quant.rules import emitter_facts, norm_word
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

UNTILED, TILED = "RMSNormQuant", "TiledNativeKernelRMSNormQuant"
Operand = Array | MemrefTile


@contracts.contracted(emitter_facts)
def rmsnorm_quant_kernel(
    hidden_in: Operand,
    weight: Operand | None = None,
    dst_scale: Operand | None = None,
    *,
    norm: NormType | str = "rms",
    eps: float = 1e-6,
    lower_bound: float = 0.0,
    dst_dtype: DTypeLike = "float32",
    packed: bool = False,
    **hints: Any,
) -> tuple[Operand, ...]:
    """Emits `RMSNormQuant`, or for tiles `TiledNativeKernelRMSNormQuant`.

    Args:
        hidden_in: `[..., H]`; a tile lies on `H`.
        weight: the gain, `[H]` or `[1, H]`; a tile lies on `H`. None without norm.
        dst_scale: a static scale, `[128, 1]`, one value; a tile lies on the 128. None
            for a scale of each row.
        norm: `"rms"` or `"none"`, or a `NormType`.
        eps: added to the mean square.
        lower_bound: magnitudes are clipped to it; active above 1e-6, for rows only.
        dst_dtype: of the arithmetic of the rows' scales: they are rounded to it.
        packed: return codes and scale bytes as one array; not for tiles.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `(codes [..., H], scale [..., 1])`; `(packed [..., H + 4],)`; with `dst_scale`
        `(codes,)`. For tiles a tile of the codes on `H`, and one of the scales on their
        unit axis.
    """
    operands: tuple[Any, ...] = (hidden_in, weight, dst_scale)
    is_tiled = is_all_io_type_memref_tile(operands, "rmsnorm_quant_kernel")
    config = dict(
        norm=norm_word(norm),
        eps=float(eps),
        lower_bound=float(lower_bound),
        scale_dtype=jnp.dtype(dst_dtype).name,
        packed=bool(packed),
        is_static=dst_scale is not None,
        is_tiled=is_tiled,
        **hints,
    )
    if not is_tiled:
        return rmsnorm_quant_family(*operands, name=UNTILED, **config)
    tiles = dict(zip(("hidden_in", "weight", "dst_scale"), operands, strict=True))
    require_partitions("rmsnorm_quant_kernel", **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    outs = rmsnorm_quant_family(*data, name=TILED, **config)
    laid = tuple(MemrefTile(out, len(hidden_in.shape) - 1) for out in outs)
    named = dict(zip(("codes", "scale"), laid, strict=False))
    require_fit("rmsnorm_quant_kernel", **tiles, **named)
    return laid


def _outputs(*, packed, is_static, **_):
    return ("packed",) if packed else ("codes",) if is_static else ("codes", "scale")


def _leaf(*operands, is_static, **config):
    return kernel.rmsnorm_quant_fwd(*operands, **config)


def _plain(*operands, is_static, **config):
    return kernel.rmsnorm_quant_plain(*operands, **config)


def _example(name: str, dtype: Any, batch: int) -> Example:
    is_tiled = name == TILED
    keys = jax.random.split(jax.random.key(5))
    x = jax.random.normal(keys[0], (batch, 3, 8), dtype)
    gain = jax.random.normal(keys[1], (8,), dtype)
    if is_tiled:
        x, gain = jnp.moveaxis(x, 2, 0).reshape(4, 2, batch, 3), gain.reshape(4, 2)
    config = dict(norm="rms", eps=1e-3, lower_bound=1.25, scale_dtype="float32")
    config |= dict(packed=False, is_static=False, is_tiled=is_tiled)
    axis = 2 if is_tiled else 0
    return Example((x, gain, None), config, (axis, None), (axis, axis))


rmsnorm_quant_family = MacroFamily(
    "rmsnorm_quant",
    (UNTILED, TILED),
    _leaf,
    plain=_plain,
    outputs=_outputs,
    example=_example,
    no_derivative=(
        "its fp8 codes carry no derivative; differentiate neuronjax.rms_norm instead"
    ),
)
