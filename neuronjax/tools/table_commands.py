"""`neuronjax table`: the transformation table of one NAME, of a user's own too."""

import contextlib
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from neuronjax.tools.errors import one_line_errors

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
        if source is not None:
            _load(source)
        from neuronjax.primitives import registry
        from neuronjax.tools.transformations import check_transformations
        from neuronjax.tools.transformations.check import ALL

        for name in names:
            registry.family_of(name)
        reports = []
        with _progress(len(names) * len(only or ALL)) as done:
            for name in names:
                step = _step(name, done)
                reports.append(check_transformations(name, only, progress=step))
        # Where output is no terminal nothing says how wide it is.
        console = Console() if Console().is_terminal else Console(width=160)
        for report in reports:
            console.print(report)
        if not all(reports):
            raise typer.Exit(1)


def _start() -> None:
    """Eight devices, and programs that compile quickly: each runs once."""
    import jax

    now = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if now < DEVICES:
        # RuntimeError: a program that calls the command has started jax already.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)


def _load(source: str) -> None:
    """Imports what registers kernels: a file by its path, a module by its name."""
    path = pathlib.Path(source)
    if path.suffix == ".py":
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"--from: there is no file {source}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(pathlib.Path.cwd()))
        if importlib.util.find_spec(source) is None:
            raise ValueError(f"--from: there is no module {source}")
        importlib.import_module(source)


def _step(name: str, done: Callable[[str], None]) -> Callable[[Any], None]:
    return lambda cell: done(f"{name}: {cell.transformation}")


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that tells the cell that was done last."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    stderr = Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    with Progress(
        text, *columns, console=stderr, disable=not stderr.is_terminal
    ) as bar:
        task = bar.add_task("Checking", total=count)

        def done(words: str) -> None:
            bar.update(task, advance=1, description=words)

        yield done
