"""What is not built yet, by function and option, with the reason.

`tests/test_cases.py` skips the cases that a row covers, with that reason; anything else
unknown fails.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class NotBuilt:
    """A function, or one of its options or inputs, that is not built yet."""

    function: str
    reason: str
    when: Callable[[dict[str, Any], dict[str, Any]], bool] = lambda options, inputs: (
        True
    )

    def covers(self, case: dict[str, Any]) -> bool:
        """Whether a case needs what is not built."""
        return case["function"] == self.function and self.when(
            given(case["options"]), given(case["inputs"])
        )


def given(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that are there: a null is an absent option."""
    return {key: value for key, value in entries.items() if value is not None}


def option(name: str, *off: Any) -> Callable[[dict, dict], bool]:
    """The option is given, with another value than those in `off`."""
    return lambda options, inputs: options.get(name, off[0]) not in off


def operand(name: str) -> Callable[[dict, dict], bool]:
    """The input is given."""
    return lambda options, inputs: name in inputs


def _whole(reason: str, *functions: str) -> list[NotBuilt]:
    return [NotBuilt(function, reason) for function in functions]


TABLE: list[NotBuilt] = []
