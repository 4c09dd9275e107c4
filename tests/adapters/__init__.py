"""How a case becomes a call: one adapter a public function.

`adapter(inputs, options)` gets the case's arrays by argument name and its options, and
returns the outputs by the case's names. It is general in shapes and options; an option
that only places buffers is dropped here. Gradients are taken by the test.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

ADAPTERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {}

# What "equal" means where it is not element by element: `compare(name, got, wanted,
# case)` gets all outputs by name.
COMPARISONS: dict[str, Callable[[str, dict, dict, dict], None]] = {}


def adapter(function: str):
    """Enters the adapter of a public function."""

    def enter(call):
        ADAPTERS[function] = call
        return call

    return enter


def comparison(function: str):
    """Enters how the outputs of a public function are compared."""

    def enter(compare):
        COMPARISONS[function] = compare
        return compare

    return enter


def within(name, got, wanted, case):
    """Every element within the case's tolerance, in its metric."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    rtol, atol = case["tolerance"]["rtol"], case["tolerance"]["atol"]
    scale = np.where(np.isfinite(wanted), np.abs(wanted), 0)
    if "max-normalised" in (case.get("metric") or ""):
        scale = scale.max(initial=0)
    same = got == wanted  # infinities among them
    difference = np.abs(np.where(same, 0, got) - np.where(same, 0, wanted))
    assert (difference <= atol + rtol * scale).all(), (
        f"{name}: worst error {difference.max()}"
    )


def take(options: dict[str, Any], **renamed: str) -> dict[str, Any]:
    """The options named, under the names that the public function gives them."""
    return {ours: options[key] for ours, key in renamed.items() if key in options}
