"""How a case becomes a call: one adapter a public function.

`adapter(inputs, options)` gets the case's arrays by argument name and its options, and
returns the outputs by the case's names. It is general in shapes and options; an option
that only places buffers is dropped here. Gradients are taken by the test.
"""

from collections.abc import Callable
from typing import Any

ADAPTERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {}


def adapter(function: str):
    """Enters the adapter of a public function."""

    def enter(call):
        ADAPTERS[function] = call
        return call

    return enter


def take(options: dict[str, Any], **renamed: str) -> dict[str, Any]:
    """The options named, under the names that the public function gives them."""
    return {ours: options[key] for ours, key in renamed.items() if key in options}
