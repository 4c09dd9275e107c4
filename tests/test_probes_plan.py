"""The plan of a probe: as data, as a picture, and as what the leaf multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import neuronjax
from neuronjax.kernels.hw_ubench.layout import loaded
from neuronjax.tools.cli import app
from neuronjax.tools.draw_probe import probe_picture
from tests.probe_equations import EMITTERS, drawn

# kind, tiles, k, m, tile_size, tile_position, double_row
CASES = [
    ("row", 1, 1, 1, None, None, True),
    ("row", 6, 30, 128, None, None, True),
    ("row", 5, 70, 9, (32, 128), ((96, 0), (32, 0)), True),
    ("row", 3, 300, 16, None, None, True),
    ("column", 5, 17, 31, None, None, True),
    ("column", 4, 200, 64, (128, 64), (0, 64), True),
    ("column", 7, 128, 20, (128, 32), ((0, 96), (0, 0), (0, 32)), True),
    ("packed", 3, 40, 100, None, None, True),
    ("packed", 3, 100, 12, (64, 128), None, False),
]


def plan_of(case):
    *sizes, size, positions, double = case
    return neuronjax.probe_plan(
        *sizes, tile_size=size, tile_position=positions, double_row=double
    )


def invoke(*arguments):
    return CliRunner().invoke(app, ["draw", "probe", *map(str, arguments)])


@pytest.mark.parametrize("case", CASES)
def test_every_row_of_every_tile_is_loaded_once_and_no_band_twice(case):
    plan = plan_of(case)
    seen = []
    for one in plan.passes:
        where = [(p.row, p.column) for p in one.placements]
        assert len(set(where)) == len(where)
        for p in one.placements:
            rows, columns = plan.tile_size
            assert p.row % rows == 0 and p.row + rows <= 128 and p.rows <= rows
            assert p.column % columns == 0 and p.column + columns <= 128
            seen += [
                (p.tile, row, half)
                for row in range(p.first, p.first + p.rows)
                for half in one.halves
            ]
    halves = (0, 1) if plan.kind == "packed" else (0,)
    every = np.ndindex(plan.tiles, plan.k, len(halves))
    assert sorted(seen) == sorted(every)


@pytest.mark.parametrize("case", CASES)
def test_the_first_pass_of_a_group_starts_it_and_the_others_add(case):
    plan = plan_of(case)
    groups = [one.group for one in plan.passes]
    assert groups == sorted(groups) and set(groups) == set(range(plan.groups))
    starts = [i for i, one in enumerate(plan.passes) if one.start]
    assert starts == [groups.index(group) for group in range(plan.groups)]
    assert len(groups) == plan.groups * plan.passes_of_a_group
    for one in plan.passes:  # a group holds its own tiles, each in one band
        tiles = {p.tile for p in one.placements}
        assert {tile // len(plan.positions) for tile in tiles} == {one.group}


@pytest.mark.parametrize("case", CASES)
def test_the_layout_has_each_placement_and_nothing_else(case):
    plan = plan_of(case)
    cells = plan.layout()
    for held, one in zip(cells, plan.passes, strict=True):
        left = held.copy()
        for p in one.placements:
            block = left[p.row : p.row + p.rows, p.column : p.column + plan.m]
            assert (block == p.tile).all()
            block[:] = -1
        assert (left == -1).all()
    assert plan.occupied == pytest.approx((cells >= 0).mean())


@pytest.mark.parametrize("case", CASES)
def test_the_leaf_loads_what_the_plan_lays_out(case):
    """Rows that hold their own places end in the bands of the plan."""
    plan = plan_of(case)
    halves = 2 if plan.kind == "packed" else 1
    shape = plan.tiles, plan.k, halves, 2
    places = 1 + np.arange(np.prod(shape)).reshape(shape)
    got = np.asarray(loaded(jnp.asarray(places, jnp.float32), plan))
    assert got[0, 0].size == 128 * max(128 // plan.tile_size[1], 1) * halves * 2
    size, step = min(plan.tile_size), len(plan.halves)
    wanted = np.zeros_like(got)
    for number, one in enumerate(plan.passes):
        chunk = number % plan.passes_of_a_group // step
        for p in one.placements:
            band = max(p.row, p.column) // size
            rows = places[p.tile, p.first : p.first + p.rows]
            for half in one.halves:
                wanted[one.group, chunk, band, : p.rows, half] = rows[:, half]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "packed"])
def test_a_group_is_one_product_of_the_array_a_pass(case):
    kind, tiles, k, m, size, positions, _ = case
    plan, (s, x) = plan_of(case), drawn(0, (tiles, k, m), (tiles, k, 3))

    def call(s, x):
        return EMITTERS[kind](s, x, tile_size=size, tile_position=positions)

    text = jax.jit(call).lower(s, x).as_text()
    assert text.count("stablehlo.dot_general") == plan.passes_of_a_group
    width = plan.tile_size[1] if kind == "column" else m
    array = f"{plan.bands}x{plan.tile_size[0]}x1x{width}xf32>"
    assert f"tensor<{array}" in text
    assert f"tensor<{plan.groups}x{plan.chunks}x{array}" in text
    assert text.count("stablehlo.while") == (plan.groups > 1)  # a turn a group


def test_double_rows_halve_the_passes():
    s, x = drawn(0, (2, 200, 2, 3), (2, 200, 2, 3))
    counts = []
    for mode in ("double_row_gen3", None):

        def call(s, x, mode=mode):
            return neuronjax.emit.packed_cayman_pe_tp_kernel(s, x, perf_mode=mode)

        counts.append(jax.jit(call).lower(s, x).as_text().count("dot_general"))
    assert counts == [2, 4]
    packed, alone = (
        neuronjax.probe_plan("packed", 2, 200, 3, double_row=double)
        for double in (True, False)
    )
    assert len(alone.passes) == 2 * len(packed.passes) == 8
    assert [one.halves for one in alone.passes[:2]] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(kind="diagonal"), "kind must be one of"),
        (dict(tiles=0), "tiles must be a positive integer, got 0"),
        (dict(k=2.0), "k must be a positive integer, got 2.0"),
        (dict(m=True), "m must be a positive integer, got True"),
        (dict(m=129), "m must be at most 128, the columns of a band"),
        (dict(double_row=1), "double_row must be True or False, got 1"),
        (dict(tile_size=(32, 32)), "32, 64 or 128 rows and all 128 columns"),
        (dict(tile_size=32), "32, 64 or 128 rows and all 128 columns"),
        (
            dict(kind="column", tile_size=(32, 128)),
            "32, 64 or 128 columns and all 128 rows",
        ),
        (dict(tile_position=(16, 0)), r"tile 0 at \(16, 0\) must lie at multiples"),
    ],
)
def test_a_wrong_setting_is_one_error(changes, words):
    settings = dict(kind="row", tiles=3, k=20, m=8) | changes
    with pytest.raises(ValueError, match=f"probe_plan: .*{words}"):
        neuronjax.probe_plan(**settings)


def test_a_picture_shows_the_array_of_each_pass():
    result = invoke("row", 6, 30, 100)
    assert result.exit_code == 0, result.output
    title, _, label, *rows = result.stdout.splitlines()
    assert title == "row: 6 tiles of 30 x 100 in bands of 32 x 128: 2 passes, " + (
        "55% of the array"
    )
    assert label.split("  ")[0] == "pass 0, group 0 starts" and len(rows) == 16
    wide = 25  # characters of 4 columns
    first = ["".join(row[:wide]) for row in rows]
    assert first == [digit * wide for digit in "0000111122223333"]
    second = [row[34 : 34 + wide] for row in rows]
    assert second == [digit * wide for digit in "44445555" + "·" * 8]


def test_a_picture_shows_groups_and_halves():
    text = str(probe_picture("packed", 1, 130, double_row=False))
    labels = [part for part in text.replace("\n", "  ").split("  ") if "pass " in part]
    assert [label.strip() for label in labels[-4:]] == [
        "pass 0, group 0 starts, half 0",
        "pass 1, group 0 adds, half 1",
        "pass 2, group 0 adds, half 0",
        "pass 3, group 0 adds, half 1",
    ]
    columns = str(probe_picture("column", 2, 8, 64, size=64, at=[64])).splitlines()
    assert columns[3].split("  ")[0] == "·" * 16 + "0" * 16


def test_a_file_holds_the_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "probe.png"
    result = invoke("column", 3, 128, 60, "--size", 64, "--out", path)
    assert result.exit_code == 0 and not result.stdout, result.output
    pixels = image.imread(path)[..., :3].reshape(-1, 3)
    for color in ("#4477aa", "#228833", "#ccbb44", "#eeeeee"):  # tiles 0, 1, 2, none
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(1) < 0.01).sum() > 1000, color


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("row 0 16", "probe_plan: tiles must be a positive integer, got 0"),
        ("diagonal 1 16", "probe_plan: kind must be one of"),
        ("row 2 16 --size 48", "32, 64 or 128 rows and all 128 columns, got (48, 128)"),
        ("row 2 16 --at 0,0", "tile 1 at (0, 0) overlaps tile 0 there"),
        ("row 2 16 --at x", "--at: expected 3,5 and alike, got x"),
        ("row 1 6200", "a picture shows at most 48 passes, got 49 for tiles = 1"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    result = invoke(*arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("neuronjax: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
