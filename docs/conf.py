"""Sphinx settings: MyST pages, executed notebooks, docstrings in Markdown."""

import re
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "NeuronJAX"
author = "the NeuronJAX authors"
copyright = author
release = metadata.version("neuronjax")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
nb_execution_mode = "off"  # the notebooks are stored with their outputs
html_theme = "furo"
html_title = "NeuronJAX"
exclude_patterns = ["_build", "jupyter_execute"]
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"


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
    text = re.sub(r"(?<!`)(`[^`\n]+`)(?=\w)", r"\1\\ ", text)
    lines[:] = re.sub(r"\$([^$\n]+)\$", r":math:`\1`", text).splitlines()


def setup(app):
    """Connects the conversion of docstrings."""
    app.connect("autodoc-process-docstring", _markdown_to_rst)
