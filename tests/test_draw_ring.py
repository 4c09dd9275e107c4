"""Pictures of the ring show what the library's own ring does."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from neuronjax.kernels.collective_matmul import collective_matmul_fwd
from neuronjax.kernels.shard_common import Group, arriving
from neuronjax.sharding import make_mesh
from neuronjax.tools import draw_ring
from neuronjax.tools.cli import app
from neuronjax.tools.draw_ring import Permute, ring_picture

# Drawn by hand: the time line, then the step of each block of rows.
PICTURES = {
    "1": (["0"], ["0"]),
    "2": (["0→ 1", "1→ 0"], ["0 1", "1 0"]),
    "2 --bidirectional": (["0→ 1", "1→ 0"], ["0 1", "1 0"]),
    "3": (["0→ 2→ 1", "1→ 0→ 2", "2→ 1→ 0"], ["0 1 2", "2 0 1", "1 2 0"]),
    "3 --bidirectional": (
        ["0↔ 2← 1", "1↔ 0← 2", "2↔ 1← 0"],
        ["0 1 2", "2 0 1", "1 2 0"],
    ),
    "4 --bidirectional": (
        ["0↔ 3↔ 1→ 2", "1↔ 0↔ 2→ 3", "2↔ 1↔ 3→ 0", "3↔ 2↔ 0→ 1"],
        ["0 1 3 2", "2 0 1 3", "3 2 0 1", "1 3 2 0"],
    ),
    "2 --channels 2": (
        ["0→ 1", "0→ 1", "1→ 0", "1→ 0"],
        ["0 1", "0 1", "1 0", "1 0"],
    ),
}
SIZES = [(ranks, both) for ranks in (1, 2, 3, 5, 8) for both in (False, True)]


def invoke(*arguments):
    return CliRunner().invoke(app, ["draw", "ring", *map(str, arguments)])


def tables(text, words):
    """The cells of both tables; `words` are the first ones of a line, its name."""
    time_line, written = text.split("the step that writes each block of rows")
    return tuple(
        [" ".join(line.split()[words:]) for line in part.splitlines() if line[:4] == of]
        for part, of in ((time_line, "rank"), (written, "rows"))
    )


@pytest.mark.parametrize("options", PICTURES)
def test_pictures(options):
    result = invoke(*options.split())
    assert result.exit_code == 0, result.output
    words = 4 if "channels" in options else 2
    assert tables(result.stdout, words) == PICTURES[options]


def test_the_title_counts_the_permutes_of_all_channels():
    assert ring_picture(8).title == "ring of 8 ranks, one way: 7 permutes"
    both = ring_picture(5, bidirectional=True, channels=2).title
    assert both == "ring of 5 ranks, both ways, 2 channels: 8 permutes"
    assert ring_picture(2).title.endswith(": 1 permute")


@pytest.mark.parametrize(("ranks", "both"), SIZES)
def test_a_rank_uses_every_chunk_once_and_each_block_is_written_once(ranks, both):
    picture = ring_picture(ranks, bidirectional=both, channels=2)
    every = np.broadcast_to(np.arange(ranks), picture.owners.shape)
    np.testing.assert_array_equal(np.sort(picture.owners, -1), every)
    twice = np.repeat(np.arange(ranks), 2)
    for written in picture.arrival.T:
        np.testing.assert_array_equal(np.sort(written), twice)
    assert len(picture.permutes) == ranks - 1


@pytest.mark.parametrize(("ranks", "both"), SIZES)
def test_the_picture_is_what_devices_hold(ranks, both):
    def held(own):
        arrived = arriving(own, Group("tensor"), bidirectional=both)
        return jnp.concatenate([chunk for _, chunk in arrived])

    mesh = make_mesh(tensor=ranks)
    spec = P("tensor")
    mapped = jax.shard_map(held, mesh=mesh, in_specs=spec, out_specs=spec)
    chunks = jax.jit(mapped)(jnp.arange(ranks, dtype=jnp.int32))
    picture = ring_picture(ranks, bidirectional=both)
    np.testing.assert_array_equal(chunks.reshape(ranks, ranks), picture.owners[:, 0])


@pytest.mark.parametrize(("ranks", "both"), SIZES)
def test_the_permutes_are_those_of_the_product(ranks, both):
    """In its trace each is issued before the product that the picture says."""

    def product(lhs, rhs):
        options = dict(axis="tensor", bidirectional=both)
        return collective_matmul_fwd(lhs, rhs, name="CollectiveMatmul", **options)

    specs = dict(in_specs=(P("tensor"), P(None, "tensor")), out_specs=P(None, "tensor"))
    mapped = jax.shard_map(product, mesh=make_mesh(tensor=ranks), **specs)
    operands = jnp.ones((2 * ranks, 3)), jnp.ones((3, ranks))
    (inner,) = jax.make_jaxpr(mapped)(*operands).eqns
    found, products = [], 0
    for eqn in inner.params["jaxpr"].eqns:
        products += eqn.primitive.name == "dot_general"
        if eqn.primitive.name == "ppermute":
            target = dict(eqn.params["perm"])[0]
            found.append((products, 1 if target == 1 % ranks else -1))
    assert products == ranks
    picture = ring_picture(ranks, bidirectional=both)
    assert found == [(p.sent, p.direction) for p in picture.permutes]


def test_permutes_fly_until_what_they_bring_is_used():
    picture = ring_picture(4, bidirectional=True)
    assert picture.permutes == (Permute(0, 1, 1), Permute(0, 2, -1), Permute(1, 3, 1))
    assert [picture.in_flight(step) for step in range(4)] == [(-1, 1)] * 2 + [(1,), ()]


def test_the_picture_is_the_librarys_own_answer(monkeypatch):
    def standing(chunk, group, *, channel=0, bidirectional=False):
        for _ in range(3):
            yield 1, chunk

    monkeypatch.setattr(draw_ring, "arriving", standing)
    picture = ring_picture(3)
    assert (picture.owners == 1).all() and picture.permutes == ()


def test_a_file_holds_both_tables(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "ring.png"
    result = invoke(4, "--bidirectional", "--channels", 2, "--out", path)
    assert result.exit_code == 0, result.output
    assert not result.stdout
    pixels = image.imread(path)[..., :3].reshape(-1, 3)
    # A rank's chunk is used by all, and permutes of both directions are drawn.
    colors = [draw_ring._color(rank, 4) for rank in range(4)]
    for color in (*colors, *draw_ring._WAYS.values()):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(1) < 0.01).sum() > 500, color


def test_a_large_ring_has_a_file_too(tmp_path):
    pytest.importorskip("matplotlib")
    picture = ring_picture(128, channels=2)
    picture.save(tmp_path / "ring.png")
    assert (tmp_path / "ring.png").stat().st_size > 10_000


def test_without_matplotlib_a_file_is_one_line_and_a_terminal_works(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke(3).exit_code == 0
    result = invoke(3, "--out", tmp_path / "ring.png")
    assert result.exit_code == 2
    words = "a picture in a file needs matplotlib: pip install matplotlib"
    assert result.stderr == f"neuronjax: {words}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0", "ranks must be in [1, 128], got 0"),
        ("129", "ranks must be in [1, 128], got 129"),
        ("4 --channels 0", "channels must be in [1, 16], got 0"),
        ("4 --channels 17", "channels must be in [1, 16], got 17"),
        ("4 --out ring.nothing", "nothing"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    result = invoke(*arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("neuronjax: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
