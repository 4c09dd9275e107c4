"""`neuronjax table`: the transformation table of one NAME, of a user's own too."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from neuronjax.tools.console import progress, table_console
from neuronjax.tools.devices import ask_for_devices
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.sources import load

# As many CPU devices as the largest cell of shard_map has.
DEVICES = 8


def table(
    names: Annotated[
        list[str], typer.Argument(help="NAMEs, or variants such as 'MLP (row fp8)'")
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", help="a module or .py file that registers kernels"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="this transformation; may be repeated")
    ] = None,
) -> None:
    """Runs NAMES under every transformation of JAX, against their plain reference."""
    with one_line_errors():
        _start()
        load(source)
        from neuronjax.tools.transformations import check_transformations
        from neuronjax.tools.transformations.check import ALL

        for name in names:
            _require_name(name)
        reports = []
        with progress("Checking", len(names) * len(only or ALL)) as done:
            for name in names:
                step = _step(name, done)
                reports.append(check_transformations(name, only, progress=step))
        for report in reports:
            table_console().print(report)
        if not all(reports):
            raise typer.Exit(1)


def _require_name(name: str) -> None:
    """Refuses what is no NAME, in the command's own words."""
    from neuronjax.primitives import registry

    try:
        registry.family_of(name)
    except ValueError as error:
        raise ValueError(str(error).replace("resolve_kernel_config", "table")) from None


def _start() -> None:
    """Eight devices, and programs that compile quickly: each runs once."""
    import jax

    ask_for_devices(DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)


def _step(name: str, done: Callable[[str], None]) -> Callable[[Any], None]:
    return lambda cell: done(f"{name}: {cell.transformation}")
