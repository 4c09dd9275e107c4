"""`neuronjax verify` and `neuronjax gradcheck`."""

import enum
from typing import Annotated

import typer

from neuronjax.tools.console import progress, table_console
from neuronjax.tools.devices import ask_for_devices
from neuronjax.tools.errors import one_line_errors

# Over how many CPU devices the cores of a collective macro cooperate.
DEVICES = 2


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
        ask_for_devices(DEVICES)
        from neuronjax.tools.verify.functions import labels_of
        from neuronjax.tools.verify.verification import verify_example

        labels, reports = labels_of(op), []
        with progress("Comparing", len(labels)) as done:
            for label in labels:
                reports.append(
                    verify_example(label, dtype=dtype.value, size=size, seed=seed)
                )
                done(label)
        for report in reports:
            table_console().print(report)
        if not all(reports):
            raise typer.Exit(1)


def gradcheck(
    names: Annotated[
        list[str] | None, typer.Argument(help="NAMEs or functions; all by default")
    ] = None,
) -> None:
    """Checks every macro's derivatives against float64 finite differences."""
    with one_line_errors():
        ask_for_devices(DEVICES)
        from neuronjax.primitives import registry
        from neuronjax.tools import gradcheck as check
        from neuronjax.tools.verify.functions import labels_of

        given = [label for name in names or [] for label in labels_of(name)]
        labels = list(dict.fromkeys(given)) or registry.examples()
        with progress("Differentiating", len(labels)) as done:
            report = check.gradcheck(*labels, done=done)
        table_console().print(report)
        if not report:
            raise typer.Exit(1)
