"""`neuronjax demo`: a small decoder learns to write like Shakespeare, in a minute."""

from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.text import Text

from neuronjax.tools.console import table_console
from neuronjax.tools.devices import start_devices
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.train.config import TrainConfig

PROMPT = "Shall I compare thee"


def demo(
    out: Annotated[
        Path | None, typer.Option(help="folder of the run [default: runs/demo]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="optimiser steps")] = 200,
) -> None:
    """Trains on Shakespeare's sonnets for a minute, on 8 devices made of this CPU.

    Shows what the decoder writes before and after, the loss curve, and the macros that
    one step runs, forwards and backwards.
    """
    with one_line_errors():
        config = demo_config(_folder(out), steps)
        start_devices(config.devices, "demo")
        _show(config)


def demo_config(out: str, steps: int) -> TrainConfig:
    """The run of the demo: 4 parts of a batch, each on 2 ranks that share the heads."""
    return TrainConfig(
        out=out,
        steps=steps,
        save_every=max(steps // 4, 1),
        data=4,
        tensor=2,
        prompt=PROMPT,
        sample_tokens=240,
    )


def _folder(out: Path | None) -> str:
    """The folder asked for, or a new one: a second demo keeps the first."""
    if out is not None:
        return str(out)
    number, place = 1, Path("runs/demo")
    while place.exists():
        number += 1
        place = Path(f"runs/demo-{number}")
    return str(place)


def _show(config: TrainConfig) -> None:
    from neuronjax.tools.train.curve import require_matplotlib, terminal_curve
    from neuronjax.tools.train.macros import macro_table
    from neuronjax.tools.train_commands import run

    require_matplotlib()
    console = table_console(width=100)
    console.print(_panel("Before: random weights", _before(config)))
    trained = run(config, say=lambda text: console.print(_panel("After", text)))
    losses = [record.loss for record in trained.records]
    console.print("\nLoss, nats a byte (even guesses give 5.55)", highlight=False)
    for line in terminal_curve(losses):
        console.print(line, markup=False, highlight=False)
    console.print(macro_table(config))
    console.print(
        f"\nGo on:  neuronjax train --resume --out {config.out} --steps "
        f"{2 * config.steps}\nYours:  neuronjax train YOUR.txt --out runs/yours",
        markup=False,
        highlight=False,
    )


def _panel(title: str, text: str) -> Panel:
    return Panel(Text(text), title=title, title_align="left")


def _before(config: TrainConfig) -> str:
    from neuronjax.tools.train.blueprint import Blueprint
    from neuronjax.tools.train.sample import sample_of

    blueprint = Blueprint(config, spread=False)
    return sample_of(blueprint.model(blueprint.params()), config)
