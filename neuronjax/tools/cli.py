"""The `neuronjax` command: its parts, in the order and the panels of `--help`."""

import sys
from importlib import metadata
from typing import Annotated

import typer

from neuronjax.tools.check_commands import gradcheck, verify
from neuronjax.tools.command_group import OneLineGroup
from neuronjax.tools.demo_commands import demo
from neuronjax.tools.diff_command import diff
from neuronjax.tools.draw_commands import draw
from neuronjax.tools.evaluate_command import evaluate
from neuronjax.tools.export.command import export
from neuronjax.tools.run_command import run
from neuronjax.tools.table_commands import table
from neuronjax.tools.trace_command import trace
from neuronjax.tools.train_commands import train

app = typer.Typer(
    name="neuronjax",
    cls=OneLineGroup,
    help="Language models made of named macro kernels: train, run, look, check.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        python = ".".join(map(str, sys.version_info[:3]))
        versions = (f"{name} {metadata.version(name)}" for name in ("neuronjax", "jax"))
        typer.echo(f"{', '.join(versions)}, Python {python}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="print the versions and exit",
        ),
    ] = False,
) -> None:
    """What stands before a command's name."""


_PANELS = {
    "Train and run": (demo, train, run, evaluate),
    "Look": (trace, diff, export),
    "Check": (verify, gradcheck, table),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _name = "eval" if _command is evaluate else None
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(draw, name="draw", rich_help_panel="Look")
