"""The rules of the emitters `blockwise_mm_kernel` and `blockwise_mm_bwd_kernel`."""

from types import SimpleNamespace
from typing import Any

from neuronjax.kernels.blockwise_mm.backward import WEIGHTS
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.blockwise_mm.arguments import arguments, quantized
from neuronjax.primitives.blockwise_mm.bwd_rules import cores_of
from neuronjax.primitives.blockwise_mm.facts import (
    EMITTERS,
    KERNEL,
    KERNEL_BWD,
    quantization,
)
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.contracts import add, told
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.options import QuantizationType

_BACKWARD = (KERNEL_BWD,)
_KINDS = (QuantizationType.NONE, QuantizationType.ROW, QuantizationType.MX)
_SHARDS = ("hidden", "intermediate", "columns")
# The settings of `moe_cte` that place its work and change no value.
_PLACEMENT = (
    "implementation",
    "skip_weight",
    "n_block_per_iter",
    "block_sharding_strategy",
    "n_static_blocks",
    "n_dynamic_blocks",
)
GRADS = ("hidden", "affinity", *WEIGHTS)

for _emitter in EMITTERS:
    add(only_hints(_emitter, arguments(), _PLACEMENT))


def _unshared(c: SimpleNamespace) -> bool:
    if c.shard is None:
        return c.axis is not None
    shards = _SHARDS[:2] if c.function == KERNEL else _SHARDS
    return c.shard not in shards or c.axis is None


row(
    "kernel_quantization",
    "quantization must be NONE, ROW or MX, got {quantization}",
    lambda c: quantization(c, {}) not in _KINDS,
    functions=EMITTERS,
    example=arguments(quantization="STATIC"),
    stage=-1,
)
row(
    "kernel_num_static",
    "num_static must be an integer of at least 0, got {num_static!r}",
    lambda c: not is_count(c.num_static, 0),
    functions=EMITTERS,
    example=arguments(num_static=-1),
    stage=0,
)
row(
    "kernel_shard",
    "shard must be 'hidden' or 'intermediate', in the backward also 'columns', with an "
    "axis, or None without one, got {shard!r} and {axis!r}",
    _unshared,
    functions=EMITTERS,
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
    functions=EMITTERS,
    example=arguments(gate_up_scale=(2, 1, 12)),
)


def _odd_columns(c: SimpleNamespace) -> bool:
    cores = cores_of(c.axis) if c.shard == "columns" else None
    return c.H_out != c.H * cores if cores else c.H_out % c.H != 0


row(
    "kernel_columns",
    "with shard = 'columns' hidden and gate_up_w have the columns of one core, and "
    "down_w those of all: got {H} and {H_out}",
    lambda c: c.shard == "columns" and c.H and _odd_columns(c),
    functions=_BACKWARD,
    example=arguments(
        shard="columns", axis="lnc", hidden=(4, 5), gate_up_w=(2, 5, 2, 6)
    ),
)
row(
    "kernel_columns_quantized",
    "shard = 'columns' is for weights that are not quantized",
    lambda c: c.shard == "columns" and (c.is_row or c.is_mx),
    functions=_BACKWARD,
    example=quantized(shard="columns", axis="lnc"),
)


def _odd_stored(c: SimpleNamespace) -> str:
    """What is stored for the backward and missing, or stands idle."""
    if c.checkpoint == "recompute":
        given = [key for key in ("gate_up", "down") if c.operands[key] is not None]
        return f"nothing is stored: {' and '.join(given)} must be None" if given else ""
    needed = ("gate_up",) if c.on_I else ("gate_up", "down")
    missing = [key for key in needed if c.operands[key] is None]
    return f"{' and '.join(missing)} must be given" if missing else ""


row(
    "kernel_stored",
    "with checkpoint = {checkpoint!r} {odd_stored}",
    told("odd_stored", _odd_stored),
    functions=_BACKWARD,
    example=arguments(checkpoint="recompute"),
)
row(
    "kernel_down",
    "affinities that multiply what the down weight meets leave no down: it and d_down "
    "must be None",
    lambda c: c.on_I and (c.down is not None or c.d_down is not None),
    functions=_BACKWARD,
    example=arguments(on_intermediate=True),
)


def _odd_grads(c: SimpleNamespace) -> str:
    """What `grads` names and has no gradient, or names twice; or that it is no list."""
    if c.grads is None:
        return ""
    if not isinstance(c.grads, tuple | list) or len(set(c.grads)) < len(c.grads):
        return repr(c.grads)
    return ", ".join(repr(key) for key in c.grads if not _has_gradient(key, c))


def _has_gradient(key: Any, c: SimpleNamespace) -> bool:
    x = c.operands.get(key)
    return key in GRADS and (x is None or is_differentiable(x.dtype))


row(
    "kernel_grads",
    f"grads must be None or name floating operands, each once, of {', '.join(GRADS)}, "
    "got {odd_grads}",
    told("odd_grads", _odd_grads),
    functions=_BACKWARD,
    example=arguments(grads=("hidden", "token_id")),
)
