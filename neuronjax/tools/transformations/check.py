"""`neuronjax.check_transformations`: the table's cells on one NAME."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from neuronjax.primitives import registry
from neuronjax.tools.transformations.report import (
    Cell,
    Progress,
    State,
    TransformationReport,
)
from neuronjax.tools.transformations.table import CELLS, RULES, run_cell

# How many devices a cell needs, where that is more than one.
DEVICES = {"explicit sharding": 2} | {
    f"shard_map over {n}": n for n in (1, 2, 3, 5, 8) if n > 1
}
ALL = (*CELLS, *RULES)


def check_transformations(
    name: str,
    transformations: Sequence[str] | None = None,
    *,
    progress: Progress | None = None,
) -> TransformationReport:
    """Checks a macro under every transformation that this project's own must pass.

    Each cell runs the macro's `example` under one transformation of JAX (`vmap` of
    several kinds, `grad`, `jvp`, second order, `scan`, `remat`, `shard_map` over 1 to 8
    devices, an explicit mesh, export, bfloat16, float64, donation) and compares with
    its `plain` reference under the same one. Without optimizations of XLA this takes
    tens of seconds a NAME; it compiles about a hundred small programs.

    Args:
        name: a NAME, one of `register_kernel` or of the catalog, or the label of a
            variant, such as `"MLP (row fp8)"`.
        transformations: which cells; all unless given.
        progress: called with each `Cell` when it is done.

    Returns:
        A report that is true when no cell is red. Each cell is green, refused with the
        reason that its family declares, red with the error, or not run: those over
        several devices need as many. Set `jax.config.update("jax_num_cpu_devices", 8)`
        before JAX starts. `rich.print` shows it.

    Raises:
        ValueError: no such NAME, or it has no example; no such transformation.

    Example:
        >>> import neuronjax
        >>> report = neuronjax.check_transformations("CumSum", ["jit", "grad"])
        >>> print(report)
        CumSum: 2 green
    """
    chosen = ALL if transformations is None else tuple(transformations)
    unknown = [t for t in chosen if t not in ALL]
    if unknown:
        raise ValueError(
            f"check_transformations: transformations must be of {', '.join(ALL)}, "
            f"got {', '.join(map(repr, unknown))}"
        )
    axis = _cores(name)
    cells = []
    for transformation in chosen:
        cells.append(_checked(name, transformation, 2 if axis else 1))
        if progress is not None:
            progress(cells[-1])
    return TransformationReport(name, tuple(cells))


def _cores(name: str) -> str | None:
    """The mesh axis over which the leaf's cores cooperate."""
    family, dtype, found = registry.family_of(name), jnp.dtype("float32"), []
    jax.eval_shape(lambda: found.append(family.example(name, dtype, 2).axis))
    return found[0]


def _checked(name: str, transformation: str, least: int) -> Cell:
    needs = max(DEVICES.get(transformation, 1), least)
    have = len(jax.devices())
    if needs > have:
        missing = f"needs {needs} devices, there are {have}: set jax_num_cpu_devices"
        return Cell(transformation, State.NOT_RUN, missing)
    start = time.perf_counter()
    try:
        reason, error = run_cell(name, transformation), None
    except Exception as raised:  # whatever it is, it is what the cell tells
        reason, error = None, raised
    seconds = time.perf_counter() - start
    if error is not None:
        return Cell(transformation, State.RED, _told(error), seconds, error)
    state = State.GREEN if reason is None else State.REFUSED
    return Cell(transformation, state, reason or "", seconds)


def _told(error: Exception, longest: int = 300) -> str:
    words = " ".join(str(error).split())
    if len(words) > longest:
        words = words[: longest - 1] + "…"
    return f"{type(error).__name__}: {words}"
