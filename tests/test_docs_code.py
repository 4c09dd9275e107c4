"""The code of the documentation's pages runs, each page in one namespace."""

import re
import subprocess
import sys
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
    # tests/test_export_tool_reader.py runs it for another platform.
    "on_trainium.md": ["needs the platform neuron"],
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


# JAX looks once in a process for its cache on disk.
OWN_PROCESS = ("compilation_cache.md",)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page) and page not in OWN_PROCESS]
)
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


def test_a_program_of_macros_is_read_back_from_the_cache(tmp_path):
    ((_, _, code),) = blocks("compilation_cache.md")
    listen = (
        "import jax\nhits = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))\n"
    )
    told = "print(hits.count('/jax/compilation_cache/cache_hits'))\n"
    check = "assert (first == second).all()\n"
    command = [sys.executable, "-c", listen + code + told + check]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert int(done.stdout) >= 1
    assert any("rms_norm" in path.name for path in (tmp_path / "jax_cache").iterdir())


def _links(page):
    """The files of the repository that a page links to, without their anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|#", link):
            yield link.partition("#")[0]


def test_every_link_between_pages_leads_to_a_file():
    """As GitHub follows it: from the page, to a file of the repository."""
    pages = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
    pages += [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    lost = [
        f"{page.name}: {link}"
        for page in pages
        for link in _links(page)
        if not (page.parent / link).is_file()
    ]
    assert not lost
