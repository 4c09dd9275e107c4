"""Cells of StableHLO: written, read back, run."""

import jax
from jax import export

from neuronjax.context import lowering
from neuronjax.tools.transformations.case import MacroCase
from neuronjax.tools.transformations.compare import GRADIENT, require, require_close


def _module(case: MacroCase, **kwargs) -> str:
    """The module's text; outputs and gradients of the reloaded program are right."""

    def both(*flat):
        return case.both(case.macro, *flat)

    exported = export.export(jax.jit(both), **kwargs)(*case.flat)
    again = export.deserialize(exported.serialize())
    outs, got = again.call(*case.flat)
    require_close(outs, case.wanted[0])
    require_close(got, case.wanted[1], GRADIENT)
    return again.mlir_module()


def _require_name(name: str, text: str) -> None:
    require(name in text, f"the exported module does not hold {name}")


def inline(case: MacroCase) -> None:
    """For three platforms, as a function that carries the NAME."""
    _require_name(case.name, _module(case, platforms=["cpu", "tpu", "cuda"]))


def composite(case: MacroCase) -> None:
    """As the composite `neuron.<NAME>`."""
    with lowering("composite"):
        _require_name(f"neuron.{case.name}", _module(case))


def symbolic(case: MacroCase) -> None:
    """One module for any batch."""
    (batch,) = export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct(
            # The case has batch 2: grouped heads split in multiples of it.
            tuple(n // 2 * batch if i == axis else n for i, n in enumerate(x.shape)),
            x.dtype,
        )
        for x, axis in zip(case.flat, case.grows, strict=True)
    ]
    saved = export.export(jax.jit(case.macro))(*shapes)
    call = export.deserialize(saved.serialize()).call
    for size in (2, 3):
        again = MacroCase(case.label, batch=size)
        require_close(tuple(call(*again.flat)), again.reference(*again.flat))
