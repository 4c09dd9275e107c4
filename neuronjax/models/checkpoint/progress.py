"""A progress bar over the tensors of a checkpoint, on a terminal's standard error."""

from collections.abc import Iterable, Iterator, Sized
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item", covariant=True)


class SizedIterable(Sized, Iterable[Item], Protocol[Item]):
    """What has a length and can be walked."""


def progress(items: SizedIterable[Item], description: str) -> Iterator[Item]:
    """Walks `items` under a bar that vanishes at the end; silent without a terminal."""
    console = Console(stderr=True)
    yield from track(
        items,
        description=description,
        total=len(items),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
