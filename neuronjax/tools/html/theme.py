"""The colours of reports and graphs, for light and dark readers."""

import functools
from importlib import resources

from neuronjax.tools.trace import Trace

COLORS = 8


@functools.cache
def style() -> str:
    """The style sheet of pictures."""
    return text_of("theme.css")


def text_of(name: str) -> str:
    """A file of this folder."""
    return (resources.files("neuronjax.tools.html") / name).read_text("utf-8")


def color_of(trace: Trace, line: int) -> str:
    """The class that gives a row of a table the colour of its leaf."""
    leaves = list(dict.fromkeys(row.leaf for row in trace.rows))
    return f"c{leaves.index(trace.rows[line].leaf) % COLORS}"
