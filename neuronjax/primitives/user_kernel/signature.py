"""How the arguments of a user's function split into operands and settings."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
# Settings that the macro itself has.
RESERVED = ("name", "kernel_name", "gradients", "vmap_axes")


@dataclasses.dataclass(frozen=True)
class Signature:
    """The signature of a user's function.

    Attributes:
        python: as `inspect` gives it.
        operands: the parameters before `*`.
        more: the name of `*operands`, where it has such.
        settings: the parameters after `*`, with their defaults; one that must be given
            has `inspect.Parameter.empty`.
    """

    python: inspect.Signature
    operands: tuple[str, ...]
    more: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable) -> "Signature":
        """Reads the signature of `function`."""
        python = inspect.signature(function)
        kinds = python.parameters.values()
        return cls(
            python,
            tuple(p.name for p in kinds if p.kind in POSITIONAL),
            next((p.name for p in kinds if p.kind is p.VAR_POSITIONAL), ""),
            {p.name: p.default for p in kinds if p.kind is p.KEYWORD_ONLY},
        )

    def faults(self) -> str:
        """Why a macro cannot have this signature; empty if it can."""
        for p in self.python.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                return f"**{p.name} would hide a misspelled setting: name each one"
            if p.kind in POSITIONAL and not (p.default is p.empty or p.default is None):
                return (
                    f"{p.name} = {p.default!r} stands before `*`, where operands are: "
                    "settings stand after it"
                )
            if p.kind is p.KEYWORD_ONLY and p.name in RESERVED:
                return f"no setting may be called {p.name}, which the macro has itself"
        return ""

    def split(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict]:
        """The operands and the settings of a call, with all defaults."""
        bound = self.python.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def of_leaf(self) -> inspect.Signature:
        """The signature of the leaf, which is told its NAME and takes operands in
        order."""
        name = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY)
        own = self.python.parameters.values()
        own = [p.replace(name="name_") if p.name == "name" else p for p in own]
        return self.python.replace(parameters=[*own, name])

    def defaults(self) -> dict[str, Any]:
        """The settings that have a default."""
        empty = inspect.Parameter.empty
        return {k: v for k, v in self.settings.items() if v is not empty}

    def names(self, operands: tuple) -> list[str]:
        """What each array of `operands` is called, in order: `params_w` in a pytree."""
        words = list(self.operands)
        words += [f"{self.more}_{i}" for i in range(len(operands) - len(words))]
        found = []
        for word, operand in zip(words, operands, strict=False):
            for path, _ in jax.tree_util.tree_leaves_with_path(operand):
                parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
                found.append("_".join([word, *parts]))
        return found


def require_arrays(name: str, signature: Signature, operands: tuple) -> None:
    """Refuses operands that hold anything but arrays and numbers.

    Raises:
        ValueError: it names the first such operand.
    """
    leaves = jax.tree.leaves(operands)
    for word, x in zip(signature.names(operands), leaves, strict=True):
        numbers = bool | int | float | complex | np.generic | np.ndarray | jax.Array
        if not isinstance(x, numbers) and not hasattr(x, "__jax_array__"):
            raise ValueError(
                f"{name}: operand {word} must be an array or a pytree of arrays, got "
                f"{type(x).__name__}; settings stand after `*` in the function"
            )
