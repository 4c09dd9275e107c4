"""Cells over several devices."""

from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding

from neuronjax.tools.transformations.case import MacroCase, mesh_of, spec_of
from neuronjax.tools.transformations.compare import GRADIENT, require, require_close


def _over(case: MacroCase, devices: int) -> Callable:
    """The macro under shard_map: outputs that no axis splits are summed."""

    def local(*flat):
        outs = case.macro(*flat)
        return tuple(
            lax.psum(out, "data") if axis is None else out
            for out, axis in zip(outs, case.out_split, strict=True)
        )

    return jax.shard_map(
        local,
        mesh=mesh_of(devices),
        in_specs=tuple(map(spec_of, case.split)),
        out_specs=tuple(map(spec_of, case.out_split)),
    )


def manual(devices: int) -> Callable[[MacroCase], None]:
    """The cell of `shard_map` over so many devices."""

    def check(case: MacroCase) -> None:
        case = MacroCase(case.label, batch=2 * devices, ranks=devices)
        call = _over(case, devices) if case.axis is None else case.macro
        outs, got = case.both(call, *case.flat)
        require_close(outs, case.wanted[0])
        require_close(got, case.wanted[1], GRADIENT)

    return check


def explicit(case: MacroCase) -> None:
    """An explicit mesh divides the operands: the outputs are typed alike."""
    mesh = mesh_of(2, AxisType.Explicit)
    with jax.set_mesh(mesh):
        if case.axis is not None:
            case = MacroCase(case.label, kind=AxisType.Explicit)
        flat = [
            jax.device_put(x, NamedSharding(mesh, spec_of(axis)))
            for x, axis in zip(case.flat, case.split, strict=True)
        ]
        outs, got = case.both(case.macro, *flat)
    for i, (out, axis) in enumerate(zip(outs, case.out_split, strict=True)):
        if axis is not None:
            spec = jax.typeof(out).sharding.spec
            require(
                spec[axis] == "data",
                f"output {i}: axis {axis} is not divided, its type says {spec}",
            )
    require_close(jax.device_get(outs), jax.device_get(case.wanted[0]))
    require_close(jax.device_get(got), jax.device_get(case.wanted[1]), GRADIENT)
