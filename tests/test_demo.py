"""The demo learns what the README's plot shows."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from neuronjax.tools.demo_commands import demo_config
from neuronjax.tools.train.log import read_log
from neuronjax.tools.train.loop import train
from tests.demo_curve import PLOT, STORED, require_alike

ROOT = Path(__file__).resolve().parent.parent
STEPS = 12


def test_the_first_steps_are_those_of_the_plot(tmp_path):
    records = []

    def watch(record):
        records.append(record)
        if record.step == STEPS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(demo_config(str(tmp_path / "demo"), 200), watch=watch)
    require_alike(records)


def test_another_run_is_told_apart():
    records = read_log(STORED)
    records[150] = records[140]
    with pytest.raises(AssertionError):
        require_alike(records)


def test_the_loss_of_the_plot_falls():
    records = read_log(STORED)
    assert [r.step for r in records] == list(range(1, 201))
    assert records[0].loss == pytest.approx(np.log(256), abs=0.1)
    means = np.mean(np.reshape([r.loss for r in records], (8, 25)), axis=1)
    assert (np.diff(means) < 0).all() and means[-1] < 1.9
    scored = [r.validation for r in records if r.validation is not None]
    assert len(scored) == 4 and (np.diff(scored) < 0).all() and scored[-1] < 2


def test_the_plot_draws_what_is_stored():
    svg = "{http://www.w3.org/2000/svg}"
    lines = [
        np.array(re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d", "")), float)
        for path in ElementTree.parse(PLOT).iter(f"{svg}path")
    ]
    # matplotlib leaves points out that lie on the line of their neighbours.
    (x, y) = max(lines, key=len).T
    assert 100 < len(x) <= 200
    steps = 1 + 199 * (x - x[0]) / (x[-1] - x[0])
    losses = np.interp(steps, range(1, 201), [r.loss for r in read_log(STORED)])
    slope, offset = np.polyfit(losses, y, 1)
    # In points of 1/72 inch, of which the axis has 40 a nat; downwards is more.
    np.testing.assert_allclose(offset + slope * losses, y, atol=0.3)
    assert slope < -30


def test_the_readme_shows_the_plot_and_says_its_numbers():
    text = " ".join((ROOT / "README.md").read_text().split())
    records = read_log(STORED)
    assert f"]({PLOT.relative_to(ROOT)})" in text
    first, last = records[0].loss, records[-1].loss
    words = f"from {first:.2f} to {last:.2f} nats a byte in {len(records)} steps"
    assert words in text
