"""What a run shows while it trains: a bar in a terminal, else a line now and then."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.log import Record

# Lines of a run whose output is no terminal.
_LINES = 10


@contextlib.contextmanager
def watching(
    console: Console, config: TrainConfig, began: int = 0
) -> Iterator[Callable[[Record], None]]:
    """Shows loss, tokens a second and the time left; gives what `train` calls."""
    if console.is_terminal:
        with _bar(console) as bar:
            yield _on_bar(bar, config, began)
    else:
        every = max((config.steps - began) // _LINES, 1)

        def line(record: Record) -> None:
            if record.step % every == 0 or record.step == config.steps:
                console.print(_words(record, config.steps), highlight=False)

        yield line


def _bar(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _on_bar(bar: Progress, config: TrainConfig, began: int) -> Callable[[Record], None]:
    task = bar.add_task("", total=config.steps, completed=began, words="compiling")

    def show(record: Record) -> None:
        words = f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s"
        bar.update(task, completed=record.step, words=words)

    return show


def _words(record: Record, steps: int) -> str:
    scored = record.validation
    kept = "" if scored is None else f", {scored:.3f} on text kept aside"
    return (
        f"step {record.step}/{steps}: loss {record.loss:.3f}{kept}, "
        f"{record.tokens_per_s:,.0f} tokens/s"
    )
