"""A table in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table; empty without rows. A column that is empty in all rows is left out."""
    cells = [[cell(text) for text in row] for row in rows]
    if not cells:
        return ""
    kept = [i for i in range(len(head)) if any(row[i] for row in cells)]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in lines)


def cell(text: str) -> str:
    """The text in one line; its bars do not end the cell."""
    return " ".join(text.split()).replace("\\|", "|").replace("|", "\\|")


def code(names: Iterable[str]) -> str:
    """Names as code, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)
