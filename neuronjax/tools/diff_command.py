"""`neuronjax diff`."""

from typing import Annotated, Any

import typer
from rich.markup import escape

from neuronjax.tools.check_commands import ExampleDtype
from neuronjax.tools.console import table_console
from neuronjax.tools.errors import one_line_errors

_SIDE = "a model as run takes it, or a NAME or function"


def diff(
    a: Annotated[str, typer.Argument(help=_SIDE)],
    b: Annotated[str, typer.Argument(help="the other")],
    seq: Annotated[int, typer.Option(min=1, help="tokens of a row, of a model")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="rows, of a model")] = 1,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="compare gradients")
    ] = False,
    dtype: Annotated[ExampleDtype, typer.Option(help="of A")] = ExampleDtype.float32,
    dtype_b: Annotated[
        ExampleDtype | None, typer.Option(help="of B; that of A unless given")
    ] = None,
) -> None:
    """Lays the macros of A and B side by side; exit code 1 where they differ."""
    with one_line_errors():
        from neuronjax.tools.diff import diff as compare
        from neuronjax.tools.diff_tables import tables_of

        options: dict[str, Any] = dict(seq=seq, batch=batch, gradient=gradient)
        first = tables_of(a, dtype=dtype.value, **options)
        second = tables_of(b, dtype=(dtype_b or dtype).value, **options)
        if first.keys() != second.keys():
            raise ValueError(
                f"diff: expected two models or two macros, got {a} and {b}"
            )
        console = table_console(width=200)
        differences = []
        for title in first:
            found = compare(first[title], second[title])
            differences.append(found)
            sides = escape(f" of A = {a} and B = {b}")
            console.print(f"[bold]{title}[/bold]{sides}", found)
        if any(differences):
            raise typer.Exit(1)
