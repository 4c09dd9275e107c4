"""Placement hints of the emitters: they travel in the config bag, no value changes.

A name that is no hint is refused: a misspelled option would change nothing unseen, and
one of the config bag's own would change a value.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from neuronjax.primitives.contracts import Contract, told

HINTS = ("num_stages", "num_tiles", "fuse_batches")
# The hints of each emitter, `HINTS` among them.
_BY_EMITTER: dict[str, tuple[str, ...]] = {}


def only_hints(
    emitter: str,
    example: Callable[[str], Mapping[str, Any]],
    more: tuple[str, ...] = (),
) -> Contract:
    """The row that refuses keywords of `emitter` that are no hint.

    Args:
        emitter: its name; it takes hints as `**hints`.
        example: its arguments that keep the rules, by its name.
        more: hints of its own, beside `HINTS`.
    """
    names = _BY_EMITTER[emitter] = (*HINTS, *more)

    def odd(call: SimpleNamespace) -> str:
        return ", ".join(repr(name) for name in call.hints if name not in names)

    return Contract(
        f"{emitter}.hints",
        (emitter,),
        "{function}: {odd_hints} is neither an option nor a hint: hints are "
        + ", ".join(names),
        told("odd_hints", odd),
        example=lambda function: {**example(function), "activaton": "SiLU"},
        stage=-1,
    )


def hints_of(emitter: str) -> tuple[str, ...]:
    """The hints that an emitter takes; those of all where no emitter is named."""
    if emitter:
        return _BY_EMITTER.get(emitter, ())
    every = (name for names in _BY_EMITTER.values() for name in names)
    return tuple(dict.fromkeys(every))
