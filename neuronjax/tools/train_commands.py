"""`neuronjax train`: a decoder of macros on a text, over a mesh of devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from neuronjax.tools.devices import start_devices
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.train.config import TrainConfig, read_config
from neuronjax.tools.train.flags import with_settings

_stderr = Console(stderr=True, width=None if Console().is_terminal else 200)


@with_settings("text")
def train(
    text: Annotated[
        str | None,
        typer.Argument(help="a text file; without one, Shakespeare's sonnets"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="a yaml file of settings; flags win over it")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint in --out")
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Trains a decoder of macros on TEXT, and lets it speak.

    Its checkpoints, a log and the loss curve are in the folder --out. A run that was
    stopped, or killed, goes on with --resume: to the bit, or on other devices.
    """
    with one_line_errors():
        given = dict(settings) if text is None else settings | dict(text=text)
        run(_config(config, given, resume), resume=resume)


def _config(file: Path | None, given: dict[str, Any], resume: bool) -> TrainConfig:
    """Flags, then the file, then what the run began with, then the defaults."""
    values = ({} if file is None else read_config(file)) | given
    if resume:
        from neuronjax.tools.train.run import saved_config

        # The folder that is read is the one that is written, wherever it once was.
        out = values.get("out", TrainConfig().out)
        values = saved_config(out) | values | dict(out=out)
    return TrainConfig(**values)


def run(
    config: TrainConfig,
    *,
    resume: bool = False,
    say: Callable[[str], None] = typer.echo,
) -> Any:
    """Trains with a progress bar, writes the curve, and says a sample."""
    start_devices(config.devices, "data * tensor * expert * lnc")
    from neuronjax.tools.train.curve import require_matplotlib, save_curve
    from neuronjax.tools.train.display import watching
    from neuronjax.tools.train.loop import require_ready
    from neuronjax.tools.train.loop import train as train_model
    from neuronjax.tools.train.run import CURVE, finished, load_run
    from neuronjax.tools.train.sample import sample_of

    require_matplotlib()
    require_ready(config, resume=resume)
    began = max(finished(config.out), default=0) if resume else 0
    words = f" from step {began}" if began else ""
    _stderr.print(f"Training in {config.out}{words}: {_plan(config)}", highlight=False)
    try:
        with watching(_stderr, config, began) as watch:
            trained = train_model(config, resume=resume, watch=watch)
    except KeyboardInterrupt:
        _stderr.print(f"Stopped. To go on: neuronjax train --resume --out {config.out}")
        raise typer.Exit(130) from None
    if trained.records:
        save_curve(trained.records, Path(config.out) / CURVE)
        _stderr.print(_summary(trained), highlight=False)
    if config.sample_tokens:
        model, _ = load_run(config.out)
        say(sample_of(model, config))
    return trained


def _plan(config: TrainConfig) -> str:
    """Steps, model and mesh in a line."""
    kind = f"{config.experts} experts a layer" if config.experts else "dense"
    sizes = config.mesh_sizes | (dict(lnc=config.lnc) if config.lnc > 1 else {})
    mesh = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return (
        f"{config.layers} layers of {config.d_model}, {kind}; {config.steps} steps of "
        f"{config.batch * config.seq} tokens; {mesh or 'one device'}"
    )


def _summary(trained: Any) -> Text:
    last = trained.records[-1]
    scored = last.validation
    kept = "" if scored is None else f", {scored:.3f} on the text kept aside"
    return Text(
        f"step {last.step}: loss {last.loss:.3f} nats a byte{kept}; "
        f"{trained.config.out} has the checkpoints, log.jsonl and loss.png"
    )
