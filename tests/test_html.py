"""HTML reports: what they say, that they are whole, and how a browser shows them."""

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest
import treescope
from jax import lax
from typer.testing import CliRunner

import neuronjax
from neuronjax.tools.cli import app
from neuronjax.tools.html import report
from neuronjax.tools.html.roofline import CORES, bound_of
from neuronjax.tools.trace import MacroRow, Trace
from tests.tiny_checkpoints import random_tensors, write_folder

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
WEIGHTS = jax.ShapeDtypeStruct((8, 16), jnp.float32)
COLUMNS = (
    "NAME count MFLOP MB FLOP/byte bound µs at best share tiled leaf operands config"
)


def program(x, w):
    turn = lambda c, _: (neuronjax.rms_norm(c, jnp.ones(8)), None)  # noqa: E731
    x = lax.scan(turn, x, None, length=3)[0]
    return neuronjax.fused_linear(x, w)


@pytest.fixture(scope="module")
def trace():
    return neuronjax.trace(program, X, WEIGHTS)


@pytest.fixture(scope="module")
def page(trace):
    return trace.to_html()


class _Reader(html.parser.HTMLParser):
    """Refuses tags that do not pair; keeps cells, and what every tag says."""

    VOID = {"meta", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.cells, self.values = [], [], [], []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "tr":
            self.cells.append([])
            self.values.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
            self.values[-1].append(dict(attrs).get("data-value"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        # In HTML a circle inside an svg may end with it.
        while self.open[-1] in ("circle",) and tag == "svg":
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.cells and self.cells[-1] and {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data


def read(page):
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open, "every tag is closed"
    return reader


def test_the_table_holds_every_row_with_its_numbers(trace, page):
    reader = read(page)
    head, *rows = [[cell.strip() for cell in row] for row in reader.cells]
    assert " ".join(head) == COLUMNS
    assert [row[0] for row in rows] == [row.name for row in trace.rows]
    bounds = [bound_of(row, CORES["gen3"]) for row in trace.rows]
    total = sum(r.count * b.seconds for r, b in zip(trace.rows, bounds, strict=True))
    numbers = [[float(v) for v in row if v] for row in reader.values[1:]]
    for shown, row, bound in zip(numbers, trace.rows, bounds, strict=True):
        each = [row.count, row.flops / 1e6, row.bytes / 1e6, bound.intensity]
        each += [bound.seconds * 1e6, row.count * bound.seconds / total]
        assert shown == pytest.approx(each)
    assert sum(row[-1] for row in numbers) == pytest.approx(1)


def test_the_page_needs_nothing_from_outside(page):
    reader = read(page)
    for tag, name, value in reader.attributes:
        assert name not in ("src", "href", "srcset", "action", "data"), (tag, value)
    addresses = set(re.findall(r"\w+://[^\"' )]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name, which nothing loads"
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", page))
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_graph_and_dots_and_rows_are_tied(trace, page):
    tied = [(t, v) for t, name, v in read(page).attributes if name == "data-row"]
    by_tag = {
        t: sorted(v for tag, v in tied if tag == t) for t in ("tr", "g", "circle")
    }
    assert by_tag["tr"] == by_tag["g"] == ["0", "1"]
    dots = [str(i) for i, row in enumerate(trace.rows) if row.flops]
    assert by_tag["circle"] == dots == ["1"]
    assert "3 macros without matrix products" in read(page).text


def test_what_users_call_things_is_text(trace):
    row = dataclasses.replace(
        trace.rows[0], name="<script>alert(1)</script>", config=(("a", '"><b>&'),)
    )
    shown = Trace((row, *trace.rows[1:]), trace.jaxpr)
    page = report({"<i>first</i>": trace}, title="</title><u>")
    assert "<i>first" not in page and "<u>" not in page
    assert "<script>alert" not in shown_table(shown)
    assert "&quot;&gt;&lt;b&gt;&amp;" in shown_table(shown)


def shown_table(trace):
    from neuronjax.tools.html.page import _table

    return _table(trace, [bound_of(row, CORES["gen2"]) for row in trace.rows])


def test_a_program_without_macros_has_a_page():
    page = neuronjax.trace(jnp.sin, X).to_html(title="Sine")
    assert "No macros." in read(page).text and "<h1>Sine</h1>" in page


def test_a_page_is_written_and_comes_out_alike(trace, page, tmp_path):
    file = tmp_path / "report.html"
    assert trace.to_html(file) == page == file.read_text("utf-8")


def test_an_unknown_target_is_refused(trace):
    with pytest.raises(ValueError, match="report: target must be one of .*got 'gen9'"):
        trace.to_html(target="gen9")


def row_of(flops, size, dtype):
    return MacroRow("MLP", "mlp", False, 1, (), (), 0, flops, size, dtype)


@pytest.mark.parametrize(
    ("target", "dtype", "flops", "size", "by", "microseconds"),
    [
        # A Trainium2 core: 181, 667, 1299 TFLOP/s and 2.9 TB/s by 8 cores.
        ("gen3", "float32", 181e12 / 8, 1000, "compute", 1e6),
        ("gen3", "bfloat16", 667e12 / 8, 1000, "compute", 1e6),
        ("gen3", "float8_e4m3", 1299e12 / 8, 1000, "compute", 1e6),
        ("gen3", "bfloat16", 10, 2.9e12 / 8, "memory", 1e6),
        ("gen3", "int32", 0, 2.9e6, "memory", 8),
        # A Trainium core: 47.5 and 190 TFLOP/s and 820 GiB/s by 2 cores.
        ("gen2", "float64", 47.5e12 / 2, 1000, "compute", 1e6),
        ("gen2", "float16", 10, 820 * 2**30 / 2, "memory", 1e6),
        # A Trainium3 core: 2517 TFLOP/s of block-scaled 8 bit and 4.9 TB/s by 8 cores.
        ("gen4", "float8_e4m3fn", 2517e12 / 8, 1000, "compute", 1e6),
        ("gen4", "float32", 10, 4.9e12 / 8, "memory", 1e6),
    ],
)
def test_bounds_are_those_of_the_chips(target, dtype, flops, size, by, microseconds):
    bound = bound_of(row_of(flops, size, dtype), CORES[target])
    assert bound.by == by
    assert bound.seconds * 1e6 == pytest.approx(microseconds)
    assert bound.intensity == pytest.approx(flops / size)
    assert bound.rate * bound.seconds == pytest.approx(flops)


def test_the_peak_is_that_of_the_dtype_with_most_bytes():
    def mixed(x, w):
        return neuronjax.fused_linear(x, w)

    half = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    (row,) = neuronjax.trace(
        mixed, half, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    ).rows
    assert row.dtype == "bfloat16"
    (row,) = neuronjax.trace(neuronjax.rms_norm, X, jnp.ones(8)).rows
    assert row.dtype == "float32"


def test_the_command_writes_prefill_and_decode(tmp_path):
    folder = write_folder(tmp_path / "model", random_tensors())
    file = tmp_path / "report.html"
    arguments = ["trace", folder, "--seq", 4, "--html", file, "--target", "gen2"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "CausalAttentionMMSoftmaxMMWithoutSwap" in result.stdout
    text = read(file.read_text("utf-8")).text
    assert "prefill, batch 1, 4 tokens" in text
    assert "one decode step after 4 tokens" in text
    assert "one of the 2 cores of a Trainium" in text


# treescope 0.1.10 reads numpy.char, where NumPy 2.5 warns.
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
def test_treescope_shows_tables_and_tiles(trace):
    text = treescope.render_to_text(trace, ignore_exceptions=False)
    assert text.startswith("Trace(  # 4 macros, 1.02 kFLOP, ")
    assert "3 × NeuronReduceMacro (f32[4,8], f32[8])" in text
    tile = neuronjax.MemrefTile.from_tensor(jnp.ones((3, 256)), 1)
    text = treescope.render_to_text(tile, ignore_exceptions=False)
    assert text.startswith(
        "MemrefTile(  # float32[3,256]: axis 1 on 128 partitions of sbuf, 2 chunks, "
        "24 bytes a partition\n"
    )
    for shown in trace, tile, dataclasses.replace(tile, data=None):
        assert treescope.render_to_html(shown, ignore_exceptions=False)


# In the browser.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
# First in the page: notes what goes wrong.
LISTEN = """<script>
window.faults = [];
window.onerror = (message) => window.faults.push(message);
document.addEventListener("securitypolicyviolation", (e) => faults.push(e.blockedURI));
</script>"""
# Last: uses the page as a reader does, and writes what came of it.
ACT = r"""<script>
const names = () => [...document.querySelectorAll("tbody tr")]
  .filter((row) => !row.hidden).map((row) => row.cells[0].textContent.trim());
const click = (word) => [...document.querySelectorAll("th button")]
  .find((button) => button.textContent === word).click();
const said = { first: names() };
click("MFLOP"); said.largest = names();
click("MFLOP"); said.smallest = names();
click("NAME"); said.alphabet = names();
said.sorted = [...document.querySelectorAll("[aria-sort]")].map((h) => h.textContent);
const search = document.querySelector("input");
search.value = "rms 8,16 NOTHING"; search.dispatchEvent(new Event("input"));
said.nothing = names();
search.value = "Neuron NORM=rms"; search.dispatchEvent(new Event("input"));
said.found = names();
search.value = ""; search.dispatchEvent(new Event("input"));
const row = document.querySelector("tr[data-row='1']");
row.dispatchEvent(new Event("mouseenter"));
said.marked = [...document.querySelectorAll(".nj-picked")].map((e) => e.tagName);
row.dispatchEvent(new Event("mouseleave"));
said.left = document.querySelectorAll(".nj-picked").length;
const light = (color) => {
  const part = color.match(/\d+/g).slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
};
const contrast = (one, two) => {
  const [low, high] = [light(one), light(two)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const style = (query) => getComputedStyle(document.querySelector(query));
const paper = style("body").backgroundColor;
said.paper = light(paper);
said.words = contrast(style("body").color, paper);
said.graph = contrast(style("svg text.name").fill, style(".nj-node").fill);
said.dim = contrast(style("svg text.dim").fill, style(".nj-node").fill);
said.dot = contrast(style("circle.nj-dot").fill, paper);
said.boxes = [...document.querySelectorAll(".nj-macro")].map((macro) => {
  const box = macro.querySelector(".nj-node").getBBox();
  return [...macro.querySelectorAll("text")].every((text) => {
    const words = text.getBBox();
    return words.x >= box.x && words.x + words.width <= box.x + box.width;
  });
});
said.faults = window.faults;
document.title = JSON.stringify(said);
</script>"""


def in_browser(page, folder, dark):
    file = folder / "page.html"
    acted = page.replace("<head>", f"<head>{LISTEN}").replace(
        "</body>", f"{ACT}</body>"
    )
    file.write_text(acted, "utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", scheme]
    options += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000"]
    command = [CHROMIUM, *options, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    title, *_of_pictures = re.findall(r"<title>(.*?)</title>", done.stdout, re.S)
    return json.loads(html.unescape(title))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_sorts_finds_marks_and_shows_both_themes(page, tmp_path, dark):
    said = in_browser(page, tmp_path, dark)
    assert said["faults"] == []
    assert said["first"] == ["NeuronReduceMacro", "FusedLinear"]
    assert said["largest"] == ["FusedLinear", "NeuronReduceMacro"]
    assert said["smallest"] == ["NeuronReduceMacro", "FusedLinear"]
    assert said["alphabet"] == ["FusedLinear", "NeuronReduceMacro"]
    assert said["sorted"] == ["NAME"]
    assert said["nothing"] == [] and said["found"] == ["NeuronReduceMacro"]
    assert said["marked"] == ["g", "circle", "TR"] and said["left"] == 0
    assert (said["paper"] < 0.1) == dark
    assert said["words"] > 7 and said["graph"] > 7
    assert said["dim"] > 4.5, "small words"
    assert said["dot"] > 3
    assert all(said["boxes"]), "words stay inside their boxes"
