"""HTML reports of macro tables."""

from neuronjax.tools.html.page import report as report

__all__ = ["report"]
