"""K-replication: the plan as data, as pictures, and as what the leaf multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import neuronjax
from neuronjax.kernels.conv.stacked import stacked_filters, stacked_windows
from neuronjax.kernels.conv.window import Window
from neuronjax.tools.cli import app
from neuronjax.tools.draw_conv import conv_picture

# `channels: (taps stacked, rows from tap to tap)`, the chip's table at its borders.
STACKS = {
    1: (4, 32),
    32: (4, 32),
    33: (2, 64),
    64: (2, 64),
    65: (1, 65),
    128: (1, 128),
}
SIZES = [(1, 1), (3, 16), (7, 16), (5, 33), (3, 65), (3, 128), (2, 160), (9, 200)]


def invoke(*arguments):
    return CliRunner().invoke(app, ["draw", "conv", *map(str, arguments)])


@pytest.mark.parametrize("channels", STACKS)
@pytest.mark.parametrize("taps", [1, 2, 3, 9])
def test_the_chips_table(channels, taps):
    most, stride = STACKS[channels]
    plan = neuronjax.conv1d_plan(taps, channels)
    counts = [one.taps for one in plan.passes]
    assert sum(counts) == taps and len(counts) == -(-taps // most)
    assert all(one.row_stride == stride for one in plan.passes)
    assert max(counts) == min(taps, most)


@pytest.mark.parametrize(("taps", "channels"), SIZES)
def test_every_channel_of_every_tap_lies_on_one_row(taps, channels):
    plan = neuronjax.conv1d_plan(taps, channels)
    rows = plan.layout()
    held = rows[rows[..., 0] >= 0]
    every = [(tap, channel) for tap in range(taps) for channel in range(channels)]
    assert sorted(map(tuple, held)) == every
    assert all(one.rows <= 128 for one in plan.passes)
    assert plan.occupied == len(every) / rows[..., 0].size


@pytest.mark.parametrize(("taps", "channels"), SIZES)
def test_the_leaf_multiplies_what_the_plan_lays_out(taps, channels):
    """Filters and windows that hold their own places end on the rows of the plan."""
    plan = neuronjax.conv1d_plan(taps, channels, 3)
    rows = plan.layout()
    place = 1.0 + np.arange(taps * channels).reshape(taps, channels, 1)
    weights = stacked_filters(jnp.asarray(np.repeat(place, 3, 2), jnp.float32), plan)
    # Tap k of result 0 reads position k, where channel c holds its place in that tap.
    x = jnp.asarray(place[..., 0].T[None], jnp.float32)
    windows = stacked_windows(x, plan, Window())
    for number, (pass_rows, w, window) in enumerate(
        zip(rows, weights[0], windows, strict=True)
    ):
        held = pass_rows[:, 0] >= 0
        wanted = np.where(held, 1 + pass_rows[:, 0] * channels + pass_rows[:, 1], 0)
        size = plan.passes[number].rows
        assert not held[size:].any()
        np.testing.assert_array_equal(w[:, 0], wanted[:size])
        np.testing.assert_array_equal(window[0, :, 0], wanted[:size])


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("channels_out", [1, 2, 5, 128, 129, 384])
def test_cores_share_the_columns_and_none_holds_one_twice(channels_out, cores):
    plan = neuronjax.conv1d_plan(3, 16, channels_out, cores=cores)
    assert len(plan.columns) == cores
    bands = [band for core in plan.columns for band in core]
    held = [column for first, size in bands for column in range(first, first + size)]
    assert held == list(range(channels_out))
    assert all(1 <= size <= 128 for _, size in bands)
    sizes = [sum(size for _, size in core) for core in plan.columns]
    assert max(sizes) == -(-channels_out // cores)
    assert plan.matmuls == len(plan.passes) * len(bands)


def test_the_stacked_form_is_one_matmul_a_pass_and_core():
    """What is executed is the plan: its matmuls, and no convolution."""
    x, w = jnp.ones((1, 40, 9)), jnp.ones((5, 40, 6))
    for shard, cores in ((False, 1), (True, 2)):
        plan = neuronjax.conv1d_plan(5, 40, 6, cores=cores)

        def call(x, w, shard=shard):
            return neuronjax.emit.conv1d_kernel(x, w, form="stacked", lnc_shard=shard)

        text = jax.jit(call).lower(x, w).as_text()
        assert text.count("stablehlo.dot_general") == plan.matmuls
        assert "stablehlo.convolution" not in text
        assert text.count("tensor<1x128x5xf32>") > 0  # two taps of 40 on 128 rows


@pytest.mark.parametrize("argument", ["taps", "channels_in", "channels_out", "cores"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_sizes_are_positive_integers(argument, value):
    sizes = dict(taps=3, channels_in=4, channels_out=5, cores=1) | {argument: value}
    with pytest.raises(ValueError, match=f"conv1d_plan: {argument} must be a positive"):
        neuronjax.conv1d_plan(**sizes)


def test_a_picture_shows_the_rows_of_each_pass():
    result = invoke(5, 40, 200, "--cores", 2)
    assert result.exit_code == 0, result.output
    title, _, *rest = result.stdout.splitlines()
    assert (
        title
        == "conv1d: 5 taps, 40 channels to 200: 3 passes, 52% of the rows, 2 cores"
    )
    passes, cores = rest[:3], rest[3:]
    assert [line.split()[-1] for line in passes] == [
        "0000000000······1111111111······",
        "2222222222······3333333333······",
        "4444444444······················",
    ]
    assert cores == [
        "core 0: output channels 0..99",
        "core 1: output channels 100..199",
    ]


def test_a_tile_of_few_channels_stacks_beside_a_full_one():
    cells = [line.split()[-1] for line in str(conv_picture(2, 144)).splitlines()[2:-1]]
    assert cells == ["0" * 32, "1" * 32, "0000····1111····" + "·" * 16]


def test_a_core_without_columns_says_so():
    assert str(conv_picture(1, 1, 1, cores=2)).endswith("core 1: output channels none")


def test_a_file_holds_the_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "plan.png"
    result = invoke(3, 16, "--out", path)
    assert result.exit_code == 0 and not result.stdout, result.output
    pixels = image.imread(path)[..., :3].reshape(-1, 3)
    for color in ("#4477aa", "#228833", "#ccbb44", "#eeeeee"):  # taps 0, 1, 2, zeros
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(1) < 0.01).sum() > 1000, color


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0 16", "conv1d_plan: taps must be a positive integer, got 0"),
        ("3 16 0", "channels_out must be a positive integer, got 0"),
        ("3 16 --cores 0", "cores must be a positive integer, got 0"),
        ("600 128", "a picture shows at most 512 passes, got 600 for taps = 600"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    result = invoke(*arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("neuronjax: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
