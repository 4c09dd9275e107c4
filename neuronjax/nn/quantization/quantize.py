"""`quantize`: a model with its projections quantized."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from neuronjax.nn.quantization.calibrate import calibrate
from neuronjax.nn.quantization.fp8 import ROW, STATIC
from neuronjax.nn.quantization.layers import QuantizedAttention, QuantizedMLP
from neuronjax.nn.quantization.mx import MXFP4, MXFP8
from neuronjax.nn.quantization.replace import replace_layers
from neuronjax.nn.quantization.scheme import MODES, Scheme

Model = TypeVar("Model", bound=nnx.Module)
_SCHEMES = {scheme.mode: scheme for scheme in (ROW, STATIC, MXFP8, MXFP4)}


def quantize(
    model: Model,
    mode: str,
    *,
    calibration: Iterable[Any] | None = None,
    call: Callable[[Any, Any], Any] | None = None,
) -> Model:
    r"""Returns `model` with the projections of its layers quantized.

    $$W \approx s\, Q, \qquad s = \max |W| / 240 \text{ (fp8)}$$

    Every `nn.MLP` and `nn.Attention` in the model is replaced by its twin on quantized
    weights, which runs the same macros in their quantized form. Embeddings, heads and
    norms stay as they are.

    - `row-fp8`: a scale for each column of a weight. Beyond 96 rows (prefill) what
      enters the down projection is rounded to fp8 by rows.
    - `static-fp8`: a scale for each weight (Q, K and V apart) and, from calibration,
      for each input. What enters QKV and the output projection is rounded to fp8, in
      prefill also what enters the down projection.
    - `mxfp8`, `mxfp4`: a power of two for 32 values, in e4m3fn or e2m1. What enters
      each projection is rounded to mxfp8.

    Args:
        model: any NNX module that holds such layers; it is not changed.
        mode: one of the above.
        calibration: inputs to run the model on, for `static-fp8` alone: the scale of
            an activation is its largest magnitude on them, over 240.
        call: how to run it, `call(model, input)`; by default `model(input)`.

    Returns:
        A copy that shares what is not quantized with `model`. Its quantized weights
        are no `nnx.Param`: `nnx.grad` and optimizers leave them alone. Gradients pass
        straight through rounding and are zero beyond a clip.

    Raises:
        ValueError: `mode` is unknown, a weight is not finite, there is nothing to
            quantize or a layer is of a subclass, `calibration` is missing or not asked
            for, leaves a layer out or is not finite, or layers are stacked where each
            needs scales of its own (`Llama.unstacked` first).

    Source:
        Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, section 3; Rouhani
        et al. 2023, https://arxiv.org/abs/2310.10537, section 3.

    Example:
        >>> from flax import nnx
        >>> from neuronjax import nn, quantize
        >>> layer = nn.MLP(128, 256, rngs=nnx.Rngs(0))
        >>> new = quantize(layer, "row-fp8")
        >>> new.codes["up"].dtype, new.codes["up_scale"].shape
        (dtype(float8_e4m3), (256,))
    """
    scheme = _scheme(mode)
    if call is not None and not scheme.calibrated:
        raise ValueError(f"quantize: call is for calibration, which mode {mode} lacks")
    if scheme.calibrated != (calibration is not None):
        need = "needs" if scheme.calibrated else "takes no"
        given = "none" if calibration is None else "some"
        raise ValueError(f"quantize: mode {mode} {need} calibration, got {given}")
    if calibration is not None and not isinstance(calibration, Iterable):
        raise ValueError(
            f"quantize: calibration must be an iterable of inputs, got {calibration!r}"
        )
    found = 0
    seen = {}
    if calibration is not None:
        _require_unstacked(model, mode)
        seen = calibrate(model, calibration, call or (lambda model, x: model(x)))

    def replacement(kind):
        def make(layer, path):
            nonlocal found
            found += 1
            _require_finite(layer, path)
            return kind(layer, scheme, seen.get(path))

        return make

    new = replace_layers(
        model, replacement(QuantizedMLP), replacement(QuantizedAttention)
    )
    if not found:
        raise ValueError(
            f"quantize: expected a model with nn.MLP or nn.Attention layers, got "
            f"{type(model).__name__} without any"
        )
    return new  # pyright: ignore[reportReturnType]


def stored_bytes(model: nnx.Module) -> int:
    """How many bytes the arrays of a model take."""
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))


def _scheme(mode: str) -> Scheme:
    if not isinstance(mode, str) or mode not in _SCHEMES:
        raise ValueError(
            f"quantize: mode must be one of {', '.join(MODES)}, got {mode}"
        )
    return _SCHEMES[mode]


def _require_finite(layer: nnx.Module, path: tuple[Any, ...]) -> None:
    for weight in jax.tree.leaves(nnx.state(layer, nnx.Param)):
        if not isinstance(weight, Tracer) and not jnp.isfinite(weight).all():
            place = ".".join(map(str, path)) or "model"
            raise ValueError(
                f"quantize: expected finite weights, got NaN or infinity in {place}"
            )


def _require_unstacked(model: nnx.Module, mode: str) -> None:
    modules = [module for _, module in nnx.iter_modules(model)]
    if any(getattr(module, "scan_layers", False) for module in modules):
        raise ValueError(
            f"quantize: mode {mode} measures every layer: expected a list of layers "
            f"(`model.unstacked()`), got stacked ones"
        )
