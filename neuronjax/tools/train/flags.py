"""The settings of a run as flags of a command, made from the dataclass."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.setting import kinds_of


def with_settings(*leave_out: str) -> Callable[[Callable], Callable]:
    """Gives a command one flag for each setting but those named.

    The command is called with a dict `settings` of the flags that were given, in the
    place of its parameter of that name.
    """

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "settings"]
        flags = [flag for flag in _flags() if flag.name not in leave_out]

        def call(**given: Any) -> None:
            names = {p.name for p in own}
            settings = {
                name: value
                for name, value in given.items()
                if name not in names and value is not None
            }
            command(**{name: given[name] for name in names}, settings=settings)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        parameters = own + flags
        # typer reads the parameters of a command from here.
        setattr(call, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def _flags() -> list[inspect.Parameter]:
    kinds = kinds_of(TrainConfig)
    flags = []
    for field in dataclasses.fields(TrainConfig):
        kind, _ = kinds[field.name]
        default = field.default
        shown = "" if default is None else f" ({_shown(default)})"
        option = typer.Option(help=field.metadata["about"] + shown, show_default=False)
        flags.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )
    return flags


def _shown(default: Any) -> str:
    return repr(default) if default == "\n" else str(default)


def settings_rows() -> list[str]:
    """The settings as rows of a Markdown table: name, default, meaning."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(TrainConfig):
        shown = "none" if field.default is None else f"`{_shown(field.default)}`"
        rows.append(f"| `{field.name}` | {shown} | {field.metadata['about']} |")
    return rows
