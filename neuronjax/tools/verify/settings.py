"""The settings that the macro of a NAME reads, and the hints that it carries."""

import difflib
import functools
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax import emit
from neuronjax.primitives import registry
from neuronjax.primitives.hints import hints_of
from neuronjax.primitives.macro import MacroFamily
from neuronjax.tools.verify.sides import name_of


def require_known(label: str, config: dict[str, Any]) -> None:
    """Refuses a setting that a NAME of the catalog neither reads nor carries as a hint.

    Of a kernel that a user registered the function itself refuses.

    Raises:
        ValueError: there is one; the message lists near matches.
    """
    name = registry.ALIASES.get(name_of(label), name_of(label))
    if name not in registry.CATALOG or not config:
        return
    hints = hints_of(registry.CATALOG[name].emitter)
    known = sorted({*known_settings(name), *hints})
    for key in config:
        if key not in known:
            near = ", ".join(difflib.get_close_matches(key, known, n=3, cutoff=0.5))
            told = f"near matches: {near}" if near else f"hints: {', '.join(hints)}"
            raise ValueError(
                f"verify: {name} has neither a setting nor a hint {key!r}; {told}"
            )


@functools.cache
def known_settings(name: str) -> frozenset[str]:
    """What the leaf, the plain form, the emitter and the examples of NAME call so."""
    family, emitter = registry.family_of(name), registry.CATALOG[name].emitter
    functions = [family.leaf, family.plain]
    known = set().union(*map(_options_of, functions))
    functions += [getattr(emit, emitter)] if emitter else []
    for fun in functions:
        parameters = inspect.signature(fun).parameters.values()
        known |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for form in (name, *family.variants):
        jax.eval_shape(functools.partial(_keys, family, form, known))
    return frozenset(known)


def _options_of(leaf: Any) -> tuple[str, ...]:
    """The fields of the `Options` through which the leaf's module reads a bag."""
    module = sys.modules[inspect.unwrap(leaf).__module__]
    return getattr(getattr(module, "Options", None), "_fields", ())


def _keys(family: MacroFamily, label: str, known: set[str]) -> None:
    known.update(family.example(label, jnp.dtype("float32"), 2).config)
