"""A mistake at the command line."""

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake is one line and exit code 2, not a traceback."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        words = " ".join(_words(error).split()) or type(error).__name__
        if isinstance(error, ImportError) and "pip install" not in words:
            words += ": pip install 'neuronjax[models]'"
        typer.echo(f"neuronjax: {words}", err=True)
        raise typer.Exit(2) from None


def _words(error: Exception) -> str:
    """What went wrong, without the number that Python gives to it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
