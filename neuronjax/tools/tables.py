"""The generated pages: contracts, transformations, and one for each family."""

import functools
import pathlib
from collections.abc import Callable

import neuronjax.emit  # noqa: F401  registers every family
from neuronjax.primitives import registry
from neuronjax.primitives.contracts import CONTRACTS, FOREIGN_NAME
from neuronjax.primitives.table import TRANSFORMATIONS as TRANSFORMATIONS
from neuronjax.tools.family_pages import FAMILY_PAGES, family_page, index_page
from neuronjax.tools.family_pages.macros import output_names
from neuronjax.tools.family_pages.page import GENERATED
from neuronjax.tools.family_pages.refusals import kind, prose
from neuronjax.tools.family_pages.table import code, table


def transformations_page() -> str:
    """The table macro x transformation, from what the families declare."""
    names = registry.examples()
    reasons: list[str] = []
    rows = [(f"`{name}`", *_cells(name, reasons)) for name in names]
    parts = [
        "# Transformations",
        f"{GENERATED} `tests/test_transformations.py` runs each cell: the macro "
        "against its plain reference under that transformation.",
        table(("macro", *TRANSFORMATIONS), rows),
        "\n".join(f"{i + 1}. {reason}" for i, reason in enumerate(reasons)),
        "## Checkpoint names",
        table(("macro", "names"), [(f"`{n}`", code(output_names(n))) for n in names]),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(name: str, reasons: list[str]) -> list[str]:
    """One row; a reason that it has first is entered into `reasons`."""
    cells = []
    for transformation in TRANSFORMATIONS:
        reason = registry.family_of(name).refuses.get(transformation)
        if reason and reason not in reasons:
            reasons.append(reason)
        cells.append(f"refused ({reasons.index(reason) + 1})" if reason else "yes")
    return cells


def contracts_page() -> str:
    """The table of every refusal."""
    rows = [
        (row.id, code(row.functions), kind(row), prose(row.message))
        for row in CONTRACTS.values()
    ]
    names = [
        (
            entry.name,
            entry.leaf,
            f"`{entry.emitter}`" if entry.emitter else "differentiation",
        )
        for entry in registry.CATALOG.values()
    ]
    parts = [
        "# Contracts",
        f"{GENERATED} Errors and refusal tests come from the same table. `math` is "
        "refused always. `hw` is a limit of the chip: `neuronjax.can` reports it, and "
        "only tiles are refused for it.",
        f"A NAME that is not the family's: {_foreign()}.",
        table(("id", "functions", "kind", "message"), rows),
        "## NAMEs of the catalog",
        table(("NAME", "leaf", "emitter"), [(f"`{n}`", x, e) for n, x, e in names]),
    ]
    return "\n\n".join(parts) + "\n"


def _foreign() -> str:
    """The words in which families refuse a foreign NAME."""
    words = [FOREIGN_NAME, *(f.foreign for f in registry.FAMILIES.values())]
    return ", or ".join(f"`{each}`" for each in dict.fromkeys(words))


PAGES: dict[str, Callable[[], str]] = {
    "transformations.md": transformations_page,
    "contracts.md": contracts_page,
    "families/index.md": index_page,
    **{
        f"families/{page.slug}.md": functools.partial(family_page, page)
        for page in FAMILY_PAGES
    },
}


def main(folder: pathlib.Path = pathlib.Path("docs")) -> None:
    """Writes the generated pages, and removes those of families that are gone."""
    (folder / "families").mkdir(exist_ok=True)
    for path in (folder / "families").glob("*.md"):
        if f"families/{path.name}" not in PAGES:
            path.unlink()
    for page, text in PAGES.items():
        (folder / page).write_text(text())


if __name__ == "__main__":
    main()
