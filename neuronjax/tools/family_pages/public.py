"""A public name, found."""

from typing import Any

import neuronjax.emit
import neuronjax.nn


def public(name: str) -> Any:
    """The function or emitter of this name, or the layer `nn.<name>`."""
    if name.startswith("nn."):
        return getattr(neuronjax.nn, name.removeprefix("nn."))
    return getattr(neuronjax, name, None) or getattr(neuronjax.emit, name)
