"""Where commands print: tables on standard output, a bar on standard error."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console


def table_console(width: int = 160) -> Console:
    """Standard output; `width` where it is no terminal, as nothing says it there."""
    return Console() if Console().is_terminal else Console(width=width)


@contextlib.contextmanager
def progress(
    words: str, count: int, beside: Console | None = None
) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; gives what is called with the label of each part done.

    Args:
        words: what goes on.
        count: of parts.
        beside: what prints meanwhile. If that is a terminal, the bar stands there,
            below what is printed.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    shown = Console(stderr=True)
    if beside is not None and beside.is_terminal:
        shown = beside
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=shown,
        disable=not shown.is_terminal,
    )
    with bar:
        task = bar.add_task(words, total=count)

        def done(label: str) -> None:
            bar.update(task, advance=1, description=f"{words}: {label}")

        yield done
