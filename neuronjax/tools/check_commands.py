"""`neuronjax verify` and `neuronjax gradcheck`."""

import enum
from typing import Annotated

import typer

from neuronjax.tools.console import progress, table_console
from neuronjax.tools.devices import ask_for_devices
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.sources import load

# Over how many CPU devices the cores of a collective macro cooperate.
DEVICES = 2
Source = Annotated[
    str | None,
    typer.Option("--from", help="a module or .py file that registers kernels"),
]


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
    source: Source = None,
) -> None:
    """Compares the macros of OP with float64: worst element, tile, ulps."""
    with one_line_errors():
        ask_for_devices(DEVICES)
        load(source)
        from neuronjax.tools.verify.functions import labels_of
        from neuronjax.tools.verify.verification import verify_example

        labels, passed = labels_of(op), []
        console = table_console()
        with progress("Comparing", len(labels), console) as done:
            for label in labels:
                report = verify_example(label, dtype=dtype.value, size=size, seed=seed)
                passed.append(bool(report))
                console.print(report)
                done(label)
        if not all(passed):
            raise typer.Exit(1)


def gradcheck(
    names: Annotated[
        list[str] | None, typer.Argument(help="NAMEs or functions; all by default")
    ] = None,
    source: Source = None,
) -> None:
    """Checks every macro's derivatives against float64 finite differences."""
    with one_line_errors():
        ask_for_devices(DEVICES)
        load(source)
        from neuronjax.tools import gradcheck as check
        from neuronjax.tools.gradcheck_report import HEAD, Gradient
        from neuronjax.tools.verify.functions import every_label, labels_of

        asked = "gradcheck: NAMES"
        given = [label for name in names or [] for label in labels_of(name, asked)]
        labels = list(dict.fromkeys(given)) or every_label()
        console = table_console()
        console.print(HEAD, markup=False, highlight=False)
        with progress("Differentiating", len(labels), console) as done:

            def told(row: Gradient) -> None:
                style = None if row else "bold red"
                console.print(row.line, style=style, markup=False, highlight=False)
                done(row.name)

            report = check.gradcheck(*labels, done=told)
        console.print(report.verdict, style="green" if report else "bold red")
        if not report:
            raise typer.Exit(1)
