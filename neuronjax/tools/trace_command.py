"""`neuronjax trace`: the macros of a model, in the terminal or as a page."""

import pathlib
from typing import Annotated

import typer

from neuronjax.tools.console import table_console
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.model_options import Dtype, DtypeOption, Model


def trace(
    model: Model,
    seq: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="rows")] = 1,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="list those of the loss's gradient")
    ] = False,
    dtype: DtypeOption = Dtype.float32,
    html: Annotated[
        pathlib.Path | None,
        typer.Option(help="write a page with table, graph and roofline"),
    ] = None,
    target: Annotated[
        str, typer.Option(help="whose roofline: gen2, gen3 or gen4")
    ] = "gen3",
) -> None:
    """Lists the macros of MODEL: of prefill and of one decode step."""
    with one_line_errors():
        from neuronjax.models.checkpoint import read_config
        from neuronjax.models.hub import locate
        from neuronjax.tools.trace_llama import trace_llama

        config = read_config(locate(model))
        tables = trace_llama(
            config, batch=batch, seq=seq, dtype=dtype.value, gradient=gradient
        )
        # A table that is folded to 80 columns cannot be searched.
        console = table_console(width=200)
        for title, table in tables.items():
            console.print(f"[bold]{title}[/bold]", table)
        if html is not None:
            from neuronjax.tools.html import report

            words = f"Macros of {model}, {dtype.value}"
            html.write_text(report(tables, title=words, target=target), "utf-8")
