"""The rules of the emitter `blockwise_mm_kernel` alone."""

from types import SimpleNamespace

from neuronjax.primitives.blockwise_mm.arguments import arguments
from neuronjax.primitives.blockwise_mm.facts import KERNEL, is_count, quantization
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.options import QuantizationType

_ONLY = (KERNEL,)
_KINDS = (QuantizationType.NONE, QuantizationType.ROW, QuantizationType.MX)


def _unshared(c: SimpleNamespace) -> bool:
    if c.shard is None:
        return c.axis is not None
    return c.shard not in ("hidden", "intermediate") or c.axis is None


row(
    "kernel_quantization",
    "quantization must be NONE, ROW or MX, got {quantization}",
    lambda c: quantization(c, {}) not in _KINDS,
    functions=_ONLY,
    example=arguments(quantization="STATIC"),
    stage=-1,
)
row(
    "kernel_num_static",
    "num_static must be an integer of at least 0, got {num_static!r}",
    lambda c: not is_count(c.num_static, 0),
    functions=_ONLY,
    example=arguments(num_static=-1),
    stage=0,
)
row(
    "kernel_shard",
    "shard must be 'hidden' or 'intermediate' with an axis, or None without one, got "
    "{shard!r} and {axis!r}",
    _unshared,
    functions=_ONLY,
    example=arguments(shard="rows", axis="lnc"),
    stage=0,
)
row(
    "kernel_scales",
    "scales are for quantized weights: quantization ROW or MX, got NONE",
    lambda c: (
        not (c.is_row or c.is_mx)
        and any(x is not None for x in (c.gate_up_scale, c.down_scale))
    ),
    functions=_ONLY,
    example=arguments(gate_up_scale=(2, 1, 12)),
)
