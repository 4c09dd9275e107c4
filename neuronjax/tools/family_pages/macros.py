"""The macros of a page: what emits them, what they are made of, where they run."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from neuronjax.primitives import registry
from neuronjax.primitives.table import TRANSFORMATIONS
from neuronjax.tools.family_pages.families import FamilyPage
from neuronjax.tools.family_pages.table import code, table


@functools.cache
def example_config(label: str) -> Mapping[str, Any]:
    """The config of an example, whose operands are not computed."""
    found = []

    def trace() -> None:
        example = registry.family_of(label).example(label, "float32", 2)
        found.append(example.config)

    jax.eval_shape(trace)
    return found[0]


def output_names(label: str) -> tuple[str, ...]:
    """The checkpoint names of the outputs of an example."""
    return registry.family_of(label).output_names(example_config(label))


def labels(names: Iterable[str]) -> list[str]:
    """The examples of macros: each NAME, then its variants."""
    known = registry.examples()
    return [x for name in names for x in known if x.split(" (")[0] == name]


def macro_sections(page: FamilyPage) -> list[str]:
    """The tables of a page's macros."""
    names = (*page.names, *page.gradients)
    if not names:
        return []
    head = ("NAME", "leaf", "emitter", "takes", "lowering twin")
    parts = ["## Macros", table(head, [_entry(name) for name in names])]
    if page.gradients:
        parts.append(f"Differentiation emits {code(page.gradients)}.")
    head = ("macro", "checkpoint names", "config")
    parts.append(table(head, [_made_of(label) for label in labels(names)]))
    head = ("macro", "transformations", "refused")
    rows = table(head, [_row(label) for label in labels(names)])
    told = "The columns are in [Transformations](../transformations.md)."
    return [*parts, "## Transformations", told, rows]


def _entry(name: str) -> tuple[str, ...]:
    entry = registry.CATALOG[name]
    emitter = f"`{entry.emitter}`" if entry.emitter else "differentiation"
    takes = {True: "tiles", False: "tensors", None: "tensors or tiles"}[entry.tiled]
    return f"`{name}`", f"`{entry.leaf}`", emitter, takes, entry.twin


def _made_of(label: str) -> tuple[str, ...]:
    return f"`{label}`", code(output_names(label)), code(sorted(example_config(label)))


def _row(label: str) -> tuple[str, ...]:
    refuses = registry.family_of(label).refuses
    refused = [name for name in TRANSFORMATIONS if name in refuses]
    by_reason: dict[str, list[str]] = {}
    for name in refused:
        by_reason.setdefault(refuses[name], []).append(name)
    told = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    count = f"{len(TRANSFORMATIONS) - len(refused)} of {len(TRANSFORMATIONS)}"
    return f"`{label}`", count, "; ".join(told)
