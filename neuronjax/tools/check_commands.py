"""`neuronjax verify` and `neuronjax gradcheck`."""

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console

from neuronjax.tools.errors import one_line_errors

# Over how many CPU devices the cores of a collective macro cooperate.
DEVICES = 2
_stderr = Console(stderr=True)


class ExampleDtype(enum.StrEnum):
    """Dtypes of an example's operands."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def verify(
    op: Annotated[str, typer.Argument(help="a NAME, or a function such as rms_norm")],
    dtype: Annotated[
        ExampleDtype, typer.Option(help="of the operands")
    ] = ExampleDtype.float32,
    size: Annotated[int, typer.Option(min=1, help="of the example's batch axis")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="0 keeps the example's numbers")] = 0,
) -> None:
    """Compares the macros of OP with float64: worst element, tile, ulps."""
    with one_line_errors():
        _start_devices()
        from neuronjax.tools.verify.functions import labels_of
        from neuronjax.tools.verify.verification import verify_example

        labels, reports = labels_of(op), []
        with _progress("Comparing", len(labels)) as done:
            for label in labels:
                reports.append(
                    verify_example(label, dtype=dtype.value, size=size, seed=seed)
                )
                done(label)
        for report in reports:
            _console().print(report)
        if not all(reports):
            raise typer.Exit(1)


def gradcheck(
    names: Annotated[
        list[str] | None, typer.Argument(help="NAMEs or functions; all by default")
    ] = None,
) -> None:
    """Checks every macro's derivatives against float64 finite differences."""
    with one_line_errors():
        _start_devices()
        from neuronjax.primitives import registry
        from neuronjax.tools import gradcheck as check
        from neuronjax.tools.verify.functions import labels_of

        given = [label for name in names or [] for label in labels_of(name)]
        labels = list(dict.fromkeys(given)) or registry.examples()
        with _progress("Differentiating", len(labels)) as done:
            report = check.gradcheck(*labels, done=done)
        _console().print(report)
        if not report:
            raise typer.Exit(1)


def _start_devices() -> None:
    import jax

    now = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if now < DEVICES:
        # RuntimeError: a program that calls the command has started jax already.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", DEVICES)


def _console() -> Console:
    # Where output is no terminal nothing says how wide it is.
    return Console() if Console().is_terminal else Console(width=160)


@contextlib.contextmanager
def _progress(words: str, count: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that tells the macro that was done last."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=_stderr,
        disable=not _stderr.is_terminal,
    )
    with bar:
        task = bar.add_task(words, total=count)

        def done(label: str) -> None:
            bar.update(task, advance=1, description=f"{words}: {label}")

        yield done
