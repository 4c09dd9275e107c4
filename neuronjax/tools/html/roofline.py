"""How fast a chip could run each macro at best: the roofline model.

Williams, Waterman and Patterson 2009, Roofline: an insightful visual performance model
for multicore architectures, https://doi.org/10.1145/1498765.1498785.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from neuronjax.context import TARGETS, settings
from neuronjax.tools.trace import MacroRow

# The bits of an element for which a chip has a peak.
WIDTHS = {32: "32 bit", 16: "16 bit", 8: "8 bit"}


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a chip.

    Attributes:
        name: such as `"one of the 8 cores of a Trainium2"`.
        flops: its peak for dense products, FLOP/s, by bits of an element.
        bandwidth: its share of the chip's memory bandwidth, bytes/s.
    """

    name: str
    flops: Mapping[int, float]
    bandwidth: float


def _core(chip: str, cores: int, tera: tuple[float, float, float], bandwidth: float):
    peaks = zip(WIDTHS, tera, strict=True)
    return Core(
        f"one of the {cores} cores of a {chip}",
        {width: peak * 1e12 / cores for width, peak in peaks},
        bandwidth * 1e12 / cores,
    )


# Per chip: FP32, BF16 and FP8 (a Trainium3: MXFP8) TFLOP/s without sparsity, and TB/s.
# https://awsdocs-neuron.readthedocs-hosted.com, Neuron 2.29, about-neuron/arch/
# neuron-hardware/{trainium,trainium2,trainium3}.rst. The first writes its bandwidth in
# GiB/s.
CORES = {
    "gen2": _core("Trainium", 2, (47.5, 190, 190), 820 * 2**30 / 1e12),
    "gen3": _core("Trainium2", 8, (181, 667, 1299), 2.9),
    "gen4": _core("Trainium3", 8, (183, 671, 2517), 4.9),
}


def core_of(target: str | None) -> Core:
    """The core of a target, or of that in force.

    Raises:
        ValueError: there is no such target.
    """
    target = settings().target if target is None else target
    if target not in CORES:
        raise ValueError(f"report: target must be one of {TARGETS}, got {target!r}")
    return CORES[target]


@dataclasses.dataclass(frozen=True)
class Bound:
    """What holds a macro back.

    Attributes:
        width: the bits of an element, which choose the peak.
        intensity: FLOP for each byte of operands and outputs.
        rate: FLOP/s that the core can reach at this intensity.
        seconds: of one macro, at best: `max(flops / peak, bytes / bandwidth)`.
        by: `"compute"` or `"memory"`.
    """

    width: int
    intensity: float
    rate: float
    seconds: float
    by: str


def bound_of(row: MacroRow, core: Core) -> Bound:
    """What holds the macros of a row back on `core`.

    Each operand and each output passes the core's memory once, and the products run at
    the peak of the dtype that most bytes of the operands have; a macro that keeps tiles
    on the chip moves less, one that reads operands again moves more.
    """
    width = _width(row.dtype)
    peak = core.flops[width]
    intensity = row.flops / row.bytes if row.bytes else 0.0
    compute, memory = row.flops / peak, row.bytes / core.bandwidth
    by = "compute" if compute > memory else "memory"
    rate = min(peak, intensity * core.bandwidth)
    return Bound(width, intensity, rate, max(compute, memory), by)


def _width(dtype: str) -> int:
    try:
        bits = jnp.dtype(dtype).itemsize * 8
    except TypeError:  # a key or another extended dtype
        return 32
    return min(WIDTHS, key=lambda width: abs(width - min(max(bits, 8), 32)))
