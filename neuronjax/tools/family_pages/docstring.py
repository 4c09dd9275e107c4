"""A docstring in parts, and its prose as Markdown."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

_HEADING = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Source|Example):$", re.M
)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+): ")
_URL = re.compile(r"https?://[^\s,;()<>]*[^\s,;()<>.]")


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring, read.

    Attributes:
        summary: its first paragraph.
        body: what follows up to the first section.
        sections: the text of each section, without its indent.
    """

    summary: str
    body: str
    sections: Mapping[str, str]

    def entries(self, section: str) -> dict[str, str]:
        """The entries `name: text` of a section, each in one line."""
        found: dict[str, str] = {}
        name = ""
        for line in self.sections.get(section, "").splitlines():
            start = _ARGUMENT.match(line)
            if start:
                name = start[1]
                found[name] = line[start.end() :].strip()
            elif line.strip():
                found[name] += " " + line.strip()
        return found


def read(documented: Any) -> Docstring:
    """Reads the docstring of a function or class."""
    text = inspect.getdoc(documented) or ""
    head, *rest = _HEADING.split(text)
    summary, _, body = head.strip().partition("\n\n")
    titles, texts = rest[::2], rest[1::2]
    sections = {t: inspect.cleandoc(x) for t, x in zip(titles, texts, strict=True)}
    return Docstring(" ".join(summary.split()), body.strip(), sections)


def markdown(text: str) -> str:
    """Prose of a docstring: formulas as fences that every renderer knows."""
    text = re.sub(r"\$\$(.+?)\$\$", _fence, text, flags=re.S)
    return linked(re.sub(r"\n\s*\n\s*", "\n\n", text)).strip()


def _fence(match: re.Match) -> str:
    lines = "\n".join(line.strip() for line in match[1].strip().splitlines())
    return f"\n\n```math\n{lines}\n```\n\n"


def linked(text: str) -> str:
    """The text with its addresses as links."""
    return _URL.sub(lambda found: f"<{found[0]}>", text)


def example(text: str) -> str:
    """The section of examples: what an interpreter is told, and prose between.

    They keep their lines: formatters rewrite a fence of the name `pycon`.
    """
    parts = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        f"```python-console\n{part}\n```" if part.startswith(">>>") else part
        for part in parts
    )


def bullets(entries: Mapping[str, str]) -> str:
    """Entries as a list."""
    return "\n".join(f"- `{name}`: {text}" for name, text in entries.items())
