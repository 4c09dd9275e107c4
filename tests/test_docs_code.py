"""The code of the documentation's pages runs, each page in one namespace."""

import re
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
# A block that no test can run says so in the line above it, and why.
_BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?```python\n(.*?)```", re.S)
# What is not run, by page: a mark that is not listed here, or left over, fails.
NOT_RUN = {
    "looking.md": ["needs a notebook"],
    "many_hosts.md": ["waits for a second host", "fetches weights"],
    "quantization.md": ["fetches weights"],
}


def blocks(page):
    """The blocks of a page: why each is not run, where it begins, and its code."""
    text = (DOCS / page).read_text()
    return [
        (found[1], text.count("\n", 0, found.start(2)) + 1, found[2])
        for found in _BLOCK.finditer(text)
    ]


def test_what_is_not_run_is_listed():
    marked = {page: [why for why, _, _ in blocks(page) if why] for page in PAGES}
    assert {page: reasons for page, reasons in marked.items() if reasons} == NOT_RUN


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    # As a reader's program: with JAX's own promotion of dtypes.
    with jax.numpy_dtype_promotion("standard"):
        for why, line, code in blocks(page):
            if why is None:
                # Lines as in the page, for the traceback.
                source = "\n" * line + code
                exec(compile(source, str(DOCS / page), "exec"), namespace)
