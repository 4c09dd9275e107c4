"""Tile maps show where the library's own tiles put each element."""

import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from neuronjax import MemrefTile
from neuronjax.tools.cli import app
from neuronjax.tools.draw_tile import tile_picture


def invoke(*arguments):
    return CliRunner().invoke(app, ["draw", *map(str, arguments)])


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 256), 1), ((256, 3), 0), ((2, 5, 7), -1), ((384,), 0), ((4, 128, 2), 1)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_element_lies_where_the_tile_puts_it(shape, axis, dtype):
    flat = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    data = np.asarray(MemrefTile.from_tensor(jnp.asarray(flat), axis).data)
    for number in range(0, flat.size, 29):
        element = tuple(int(i) for i in np.unravel_index(number, shape))
        picture = tile_picture(shape, axis, dtype=dtype, element=element)
        partition, chunk, byte = picture.place
        size = jnp.dtype(dtype).itemsize
        assert byte % size == 0
        assert data[partition].ravel()[byte // size] == number
        assert number in data[partition, chunk].ravel()


def test_the_picture_names_partitions_chunks_and_memory():
    lines = str(tile_picture((260, 2, 3), 1, dtype="bfloat16")).splitlines()
    assert lines[0] == (
        "bfloat16[260,2,3]: axis 1 on 2 partitions, 1 chunk of 780 elements"
    )
    assert lines[1] == "SBUF of gen3: 1560 of 196608 bytes a partition, fits"
    assert [line.split() for line in lines[2:]] == [
        ["chunk", "0"],
        ["partition", "0", "0"],
        ["partition", "1", "1"],
    ]


def test_a_large_tile_is_shown_around_the_marked_element():
    text = str(tile_picture((128 * 40, 1), 0, element=(128 * 20 + 7, 0)))
    assert "[2567]" in text and "…" in text and "⋮" in text
    rows = [line.split()[1] for line in text.splitlines() if "partition " in line[:10]]
    assert rows == ["0", "1", "2", "3", "63", "64", "65", "126", "127"]
    chunks = [int(word) for word in text.splitlines()[3].split() if word.isdigit()]
    assert chunks == [0, 1, 2, 3, 6, 7, 8, 38, 39]


def test_what_does_not_fit_is_said():
    picture = tile_picture((128, 5000), 0, buffer="psum")
    assert picture.memory == (
        "PSUM of gen3: 20000 of 16384 bytes a partition, does not fit"
    )
    wider = tile_picture((128, 60000), 0, generation="gen4")
    assert wider.memory == "SBUF of gen4: 240000 of 262144 bytes a partition, fits"


PICTURES = {
    "attention 4 --window 2 --sink": "attention_cte: 4 queries, 4 keys",
    "decode 6 2 --active 2": "attention_tkg: position 2",
    "ring 4 --bidirectional": "ring of 4 ranks, both ways",
    "conv 6 16 32": "conv1d: 6 taps",
    "probe row 3 64 64": "row: 3 tiles",
    "tile 3,256 --axis 1 --element 2,5": "float32[3,256]: axis 1",
    "graph RoPE": "RoPE",
}


@pytest.mark.parametrize("command", PICTURES)
def test_every_picture_can_be_svg_with_words_in_it(command, tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "one.svg", tmp_path / "two.svg"
    for file in files:
        result = invoke(*command.split(), "--out", file)
        assert result.exit_code == 0, result.output
        assert not result.stdout
    root = ET.parse(files[0]).getroot()
    words = "".join(text for node in root.iter() for text in node.itertext())
    assert PICTURES[command] in " ".join(words.split())
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tile 130", "nearest size that fits: 128"),
        ("tile 3,x", "SHAPE: expected 3,5 and alike, got 3,x"),
        ("tile 3,0", "shape must be positive sizes, got [3, 0]"),
        ("tile 3,4 --axis 2", "axis must lie in [-2, 2) for x of shape (3, 4), got 2"),
        ("tile 3 --dtype nothing", "there is no dtype 'nothing'"),
        ("tile 3 --buffer dram", "buffer must be one of ('sbuf', 'psum'), got 'dram'"),
        ("tile 3 --target gen9", "generation must be one of"),
        ("tile 3,4 --element 3,0", "element must lie in (3, 4), got (3, 0)"),
        ("tile 3,4 --element 1", "element must lie in (3, 4), got (1,)"),
        ("tile 1280000", "a picture shows at most 4096 chunks, got 10000"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    result = invoke(*arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("neuronjax: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
