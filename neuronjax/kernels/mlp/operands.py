"""What the leaves of the feed-forward block are given: operands and the config bag."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.dtypes import is_differentiable

Option = Any  # an array, or None; the config bag says which are there


class Options(NamedTuple):
    """The config bag of the macro `MLP`."""

    activation: str = "SiLU"
    norm: str = "none"
    eps: float = 1e-6
    skip_gate: bool = False
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    fused_add: str = "none"
    store_fused_add: bool = False
    out_dtype: str | None = None
    is_tiled: bool = False
    quantization: str = "NONE"
    prefill: bool = False
    quant_clipping_bound: float = 0.0
    activation_clipping_bound: float = 0.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Options":
        """Reads a config bag; its other entries are hints, which change no value."""
        return cls(**{key: config[key] for key in cls._fields if key in config})

    @property
    def gate_limits(self) -> tuple[float | None, float | None]:
        return self.gate_clamp_lower_limit, self.gate_clamp_upper_limit

    @property
    def up_limits(self) -> tuple[float | None, float | None]:
        return self.up_clamp_lower_limit, self.up_clamp_upper_limit


class Operands(NamedTuple):
    """The operands of the macro `MLP`, in order. An absent option is None."""

    hidden: jax.Array
    gate_w: Option
    up_w: jax.Array
    down_w: jax.Array
    gamma: Option = None
    beta: Option = None
    gate_b: Option = None
    up_b: Option = None
    down_b: Option = None
    addend: Option = None
    residual: Option = None
    gate_up_w_scale: Option = None
    down_w_scale: Option = None
    gate_up_in_scale: Option = None
    down_in_scale: Option = None


SCALES = ("gate_up_w_scale", "down_w_scale", "gate_up_in_scale", "down_in_scale")


def live_operands(ops: Operands) -> tuple[str, ...]:
    """The operands that have a gradient: quantized values and scales are constants."""
    return tuple(
        key
        for key, x in ops._asdict().items()
        if x is not None and key not in SCALES and is_differentiable(x.dtype)
    )


def stored_dtype(ops: Operands, opts: Options) -> jnp.dtype:
    """The dtype of the pre-activations: that of `hidden`, unless that is fp8."""
    dtype = ops.hidden.dtype
    return jnp.dtype(dtype if is_differentiable(dtype) else opts.out_dtype)


def parts(operands: tuple) -> tuple[Operands, tuple, tuple]:
    """Splits what a backward leaf takes: operands, outputs, cotangents."""
    count = len(Operands._fields)
    half = count + (len(operands) - count) // 2
    return Operands(*operands[:count]), operands[count:half], operands[half:]


def rows_fwd(
    forward: Callable, ops: Operands, opts: Options, at: Any
) -> tuple[jax.Array, ...]:
    """Runs a forward on rows without their unit axes, such as that of a batch of one.

    With them XLA on a CPU could not write the gated values over the pre-activations:
    23 MB more for 2048 rows of 2816.
    """
    outs = forward(_without_units(ops), opts, at)
    return tuple(x.reshape(*ops.hidden.shape[:-1], x.shape[-1]) for x in outs)


def rows_bwd(
    backward: Callable, operands: tuple, opts: Options, at: Any
) -> tuple[jax.Array, ...]:
    """The same for a backward: operands, outputs and cotangents."""
    ops, *rest = parts(operands)
    outs, cotangents = (tuple(map(_squeezed, xs)) for xs in rest)
    grads = backward(_without_units(ops), outs, cotangents, opts, at)
    shapes = [getattr(ops, key).shape for key in live_operands(ops)]
    return tuple(x.reshape(shape) for x, shape in zip(grads, shapes, strict=True))


def _without_units(ops: Operands) -> Operands:
    rows = ("hidden", "addend", "residual")
    return ops._replace(**{key: _squeezed(getattr(ops, key)) for key in rows})


def _squeezed(x: Option) -> Option:
    if x is None:
        return None
    units = [i for i, size in enumerate(x.shape[:-1]) if size == 1]
    return lax.squeeze(x, units[: x.ndim - 2])
