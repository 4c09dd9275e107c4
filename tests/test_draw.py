"""Pictures of masks show what the library's own functions see."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from neuronjax.tools import draw
from neuronjax.tools.cli import app
from neuronjax.tools.draw import attention_picture, decode_picture


def invoke(*arguments):
    return CliRunner().invoke(app, ["draw", *map(str, arguments)])


def lines(text):
    """The cells alone: a string of # and . for each query."""
    rows = [line for line in text.splitlines() if line.startswith("query ")]
    cells = {"■": "#", "·": "."}
    return ["".join(cells.get(c, "") for c in row) for row in rows]


# Drawn by hand from the rules of each option; a prefix comes first, a sink last.
PREFILL = {
    "3": ["#..", "##.", "###"],
    "2 4": ["#...", "##.."],
    "3 2": ["#.", "##", "##"],
    "2 3 --full": ["###", "###"],
    "4 --window 2": ["#...", "##..", ".##.", "..##"],
    "3 --window 1 --sink": ["#..#", ".#.#", "..##"],
    "3 --prior 3 --used 2": ["##.#..", "##.##.", "##.###"],
    "2 --prior 2 --used 0": ["..#.", "..##"],
    "3 --prior 3 --used 2 --window 3": ["##.#..", ".#.##.", "...###"],
    "4 --pack 1,3": ["#...", ".#..", ".##.", ".###"],
    "4 --pack 2,2 --full --sink": ["##..#", "##..#", "..###", "..###"],
    "2 6 --cp-degree 3 --cp-offset 2": ["###...", "####.."],
    "2 6 --cp-degree 3 --cp-offset 1 --strided": ["##....", "#####."],
    "2 6 --cp-degree 3 --cp-offset 4 --window 2": ["...##.", "....##"],
}
DECODE = {
    "4 2": ["##..#"],
    "5 2 --active 2 --sink": ["##...#.#", "##...###"],
    # Five slots go around; the last of the six is the new token's own.
    "6 3 --window 2": ["..#...#"],
    "6 1 --window 3": ["#.....#"],
    "6 5 --window 3": ["...##.#"],
    "6 6 --window 3": ["#...#.#"],
    "6 13 --window 3": [".##...#"],
    "6 7 --window 3 --active 2": [".##...#.", "..#...##"],
    # The sequence's second block lies first.
    "4 3 --block-len 2 --table 1,0": ["#.###"],
    "4 3 --block-len 2 --table 2,0": ["#...###"],
    "4 3 --block-len 2 --table 1,0 --window 2": ["#...#"],
}


@pytest.mark.parametrize("options", PREFILL)
def test_prefill_pictures(options):
    result = invoke("attention", *options.split())
    assert result.exit_code == 0, result.output
    assert lines(result.stdout) == PREFILL[options]


@pytest.mark.parametrize("options", DECODE)
def test_decode_pictures(options):
    result = invoke("decode", *options.split())
    assert result.exit_code == 0, result.output
    assert lines(result.stdout) == DECODE[options]


def test_the_picture_names_positions_and_parts():
    text = str(attention_picture(2, 4, sink=True, cp_degree=2, cp_offset=9))
    title, parts, numbers, first, second = text.splitlines()
    assert title.startswith("attention_cte: 2 queries, 4 keys, causal, sink")
    assert parts.split() == ["keys", "sink"]
    assert numbers.split() == ["0", "1", "2", "3", "0"]
    assert first.startswith("query  9 ") and second.startswith("query 10 ")
    blocks = decode_picture(4, 1, block_len=2, table=[1, 0])
    assert [part.name for part in blocks.parts] == ["cache 0", "cache 1", "new"]


def test_weights_are_those_of_equal_scores_and_the_rest_is_the_sinks():
    picture = attention_picture(3, window=2, sink=True)
    wanted = [[1 / 2, 0, 0, 1 / 2], [1 / 3, 1 / 3, 0, 1 / 3], [0, 1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(picture.weights, wanted, atol=1e-6)


def test_the_picture_is_the_librarys_own_answer(monkeypatch):
    def last_alone(q, k, v, **options):
        return jnp.broadcast_to(v[:, -1:], (1, q.shape[1], v.shape[2]))

    monkeypatch.setattr(draw, "attention_cte", last_alone)
    assert lines(str(attention_picture(2, 3))) == ["..#", "..#"]


def test_a_file_holds_the_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "mask.png"
    result = invoke("attention", 4, "--window", 2, "--sink", "--out", path)
    assert result.exit_code == 0, result.output
    assert not result.stdout
    pixels = image.imread(path)[..., :3].reshape(-1, 3)
    for color in ("#228833", "#ddaa33", "#eeeeee"):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(1) < 0.01).sum() > 1000, color


def test_without_matplotlib_a_file_is_one_line_and_a_terminal_works(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke("attention", 3).exit_code == 0
    result = invoke("attention", 3, "--out", tmp_path / "mask.png")
    assert result.exit_code == 2
    words = "a picture in a file needs matplotlib: pip install matplotlib"
    assert result.stderr == f"neuronjax: {words}\n"


def test_a_long_line_goes_to_a_file_or_a_pipe():
    assert len(lines(invoke("attention", 2, 200).stdout)[0]) == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("attention 0", "q_len and kv_len must be at least 1 and at most 2048"),
        ("attention 9 --prior 2048", "a prior among the keys, got q_len = 9"),
        ("attention 4 --used 1", "used must be in [0, prior = 0], got 1"),
        ("attention 4 --prior 2 --used 3", "used must be in [0, prior = 2], got 3"),
        ("attention 4 --pack 3,2", "pack must be lengths that add to q_len = 4"),
        ("attention 4 --pack 3,x", "--pack: expected 3,5 and alike, got 3,x"),
        ("attention 4 --strided", "cp_offset and strided need cp_degree"),
        ("attention 4 --cp-offset 2", "cp_offset and strided need cp_degree"),
        ("attention 4 --window 2 --full", "attention_cte: "),
        ("attention 4 --window -2", "attention_cte: "),
        ("attention 4 --pack 2,2 --prior 2", "attention_cte: "),
        ("attention 4 --out mask.nothing", "nothing"),
        ("decode 4 4", "slots must be at most 2048 and hold active and position"),
        ("decode 4 0 --active 5", "slots = 4, active = 5, position = 0"),
        ("decode 4 2 --window 4", "window must be in [0, slots - active = 3], got 4"),
        ("decode 4 2 --table 0,1", "table needs block_len, got 0"),
        ("decode 4 2 --block-len 3", "block_len must divide slots = 4, got 3"),
        ("decode 4 2 --block-len 2 --table 1", "table must list 2 blocks, got [1]"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    result = invoke(*arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("neuronjax: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
