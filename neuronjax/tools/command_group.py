"""Commands whose usage errors are one line, as every other mistake is."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup


class OneLineGroup(TyperGroup):
    """A group of commands: a wrong name, option or value is one line and exit code 2.

    The line names the command, what is wrong, and what comes near; Typer's own frame
    takes six lines for it.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except typer.Abort:
            code = 1
        except Exception as error:
            code = _told(error)
        # A command returns None; the code of an Exit inside one comes back as a number.
        sys.exit(code if isinstance(code, int) else 0)


def _told(error: Exception) -> int:
    """Says what was wrong with the arguments; raises what is no such error.

    Typer brings a click of its own or takes the installed one, so that the class of its
    errors is known by what they have.
    """
    words_of = getattr(error, "format_message", None)
    if words_of is None:
        raise error
    context, words = getattr(error, "ctx", None), words_of()
    if type(error).__name__ == "NoArgsIsHelpError":
        # Typer printed the help when it made the error, or left it in the words.
        typer.echo(words, nl=bool(words))
        return 2
    name = "neuronjax" if context is None else context.command_path
    words = " ".join(words.split()).removesuffix(".")
    typer.echo(f"{name}: {words[:1].lower()}{words[1:]} ({name} --help)", err=True)
    return 2
