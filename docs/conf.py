"""Sphinx settings: MyST pages, executed notebooks, docstrings in Markdown."""

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
# Sphinx reads below its own folder only.
(DOCS / "notebooks").mkdir(exist_ok=True)
for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
    shutil.copy(notebook, DOCS / "notebooks")

project = "NeuronJAX"
author = "the NeuronJAX authors"
copyright = author
release = metadata.version("neuronjax")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_fence_as_directive = ["math"]  # a fence that GitHub draws too
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are stored with their outputs
html_theme = "furo"
html_title = "NeuronJAX"
html_static_path = ["static"]
html_css_files = ["wide.css"]
exclude_patterns = ["_build", "jupyter_execute"]
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"


def _code(match):
    return match[0] + ("\\ " if match[2] else "")


def _markdown_to_rst(app, what, name, obj, options, lines):
    """Turns `$$...$$` and `$...$` of a docstring into Sphinx's math."""
    text = "\n".join(lines)
    text = re.sub(
        r"\$\$(.+?)\$\$",
        lambda m: "\n\n.. math::\n\n   " + " ".join(m[1].split()) + "\n\n",
        text,
        flags=re.S,
    )
    # A word may go on after code (`Array`s): reStructuredText wants a break there.
    text = re.sub(r"`([^`\n]+)`(?=(\w?))", _code, text)
    lines[:] = re.sub(r"\$([^$\n]+)\$", r":math:`\1`", text).splitlines()


def _beside(app, docname, source):
    """A page links to the notebooks as they lie in the repository: beside docs."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")


def setup(app):
    """Connects the conversions of docstrings and pages."""
    app.connect("autodoc-process-docstring", _markdown_to_rst)
    app.connect("source-read", _beside)
