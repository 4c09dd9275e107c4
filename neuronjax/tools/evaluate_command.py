"""`neuronjax eval`: how well a model foretells a text, quantized or not."""

import pathlib
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from neuronjax.tools.console import table_console
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.model_options import Model

_stderr = Console(stderr=True)


def evaluate(
    model: Model,
    text: Annotated[
        pathlib.Path | None,
        typer.Argument(help="a text file; without one, Python's own documentation"),
    ] = None,
    forms: Annotated[
        str, typer.Option("--quant", help="float32, bfloat16, modes, or all; by commas")
    ] = "all",
    window: Annotated[int, typer.Option(min=1, help="tokens a window")] = 512,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="score only this many tokens")
    ] = None,
) -> None:
    """Reports the perplexity of TEXT under MODEL, in float32 and quantized."""
    with one_line_errors():
        from neuronjax.tools import evaluate as evaluation
        from neuronjax.tools.text import standard_library_text

        names = _forms(forms, evaluation.FORMS)
        words = standard_library_text() if text is None else _read(text)
        with evaluation.progress(_stderr) as start:
            rows = evaluation.evaluate(
                model, words, forms=names, window=window, limit=tokens, start=start
            )
        table_console(width=100).print(evaluation.table(rows, window))


def _read(text: pathlib.Path) -> str:
    try:
        return text.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text}: expected UTF-8 text, got {error}") from None


def _forms(given: str, known: Sequence[str]) -> list[str]:
    """The forms to score: float32 is always there, to compare with."""
    names = list(known) if given == "all" else given.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"--quant: expected names from {', '.join(known)}, or all, "
            f"got {', '.join(unknown)}"
        )
    return list(dict.fromkeys(["float32", *names]))
