"""Switches: arguments whose default is True or False take nothing else.

Anything else has a truth value too: a layout given by its name would be taken for True.
"""

from types import SimpleNamespace
from typing import Any

from neuronjax.primitives.contracts import FUNCTIONS, Contract, rows_of, told
from neuronjax.primitives.kinds import described, is_flag


def only_flags(*functions: str) -> list[Contract]:
    """The row of each function that refuses a switch that is not True or False.

    Its example breaks the first switch of what the function's last row has.
    """
    return [
        Contract(
            f"{function}.flags",
            (function,),
            "{function}: switches must be True or False, known while tracing, got "
            "{odd_flags}",
            told("odd_flags", _odd),
            example=_example,
            stage=-1,
        )
        for function in functions
    ]


def _switches(function: str) -> list[str]:
    parameters = FUNCTIONS[function].signature.parameters.values()
    return [one.name for one in parameters if isinstance(one.default, bool)]


def _odd(call: SimpleNamespace) -> str:
    """Every switch that is not True or False, described."""
    given = {name: getattr(call, name) for name in _switches(call.function)}
    odd = {name: value for name, value in given.items() if not is_flag(value)}
    return " and ".join(f"{name} = {described(value)}" for name, value in odd.items())


def _example(function: str) -> dict[str, Any]:
    example = rows_of(function)[-1].example
    assert example is not None
    return {**example(function), _switches(function)[0]: "no"}
