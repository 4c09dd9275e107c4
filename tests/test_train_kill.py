"""A run that is killed at any moment goes on from its last checkpoint, to the bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from neuronjax.tools.train.log import read_log
from neuronjax.tools.train.loop import train
from neuronjax.tools.train.run import finished, load_run
from tests.train_case import arrays, config, losses, straight, text

__all__ = ["straight", "text"]

ROOT = Path(__file__).resolve().parent.parent
# Slow enough to be caught at a step; otherwise the run of `straight`, but that one
# checkpoint alone stays.
CODE = """
import sys, time
from tests.test_train import config
from neuronjax.tools.train.loop import train
folder, text, resume = sys.argv[1:]
settings = config(folder, text, keep=1)
train(settings, resume=resume == "resume", watch=lambda record: time.sleep(0.05))
"""


def start(folder, file, how):
    command = [sys.executable, "-c", CODE, str(folder), str(file), how]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def kill_when(process, happens):
    """Kills as `kill -9` does, the moment something happens."""
    end = time.monotonic() + 300
    while not happens():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < end
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def begun(folder, step):
    """Whether a checkpoint is being written, or has just been."""
    place = folder / "checkpoints"
    names = os.listdir(place) if place.is_dir() else []
    return any(name.split(".")[0] == str(step) for name in names)


def test_a_killed_run_loses_what_came_after_its_checkpoint(straight, text, tmp_path):
    folder = tmp_path / "run"
    kill_when(
        start(folder, text, "new"), lambda: len(read_log(folder / "log.jsonl")) >= 13
    )
    assert finished(folder) == [10]
    # In the middle of writing the next one: it is whole or it is not there, and the
    # last one stays until it is.
    kill_when(start(folder, text, "resume"), lambda: begun(folder, 20))
    left = finished(folder)
    assert left in ([10], [10, 20], [20])
    load_run(folder, left[0])
    resumed = train(config(folder, text, keep=1), resume=True)
    assert resumed.began == left[-1] and finished(folder) == [60]
    np.testing.assert_array_equal(losses(resumed), losses(straight))
    jax.tree.map(
        np.testing.assert_array_equal, arrays(folder), arrays(straight.config.out)
    )


def test_a_run_killed_at_once_starts_anew(text, tmp_path):
    folder = tmp_path / "run"
    kill_when(start(folder, text, "new"), lambda: begun(folder, 0))
    if not finished(folder):
        with pytest.raises(ValueError, match="expected a finished checkpoint"):
            train(config(folder, text), resume=True)
    begins = bool(finished(folder))
    trained = train(config(folder, text, steps=5), resume=begins)
    assert trained.began == 0 and len(trained.records) == 5
