"""A tiny training run: its text, its settings, and the run that nothing stopped."""

from pathlib import Path

import jax
import numpy as np
import pytest

from neuronjax.tools.train.blueprint import Blueprint
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.loop import train
from neuronjax.tools.train.stepping import Stepping
from neuronjax.tools.train.store import Store

TINY = dict(d_model=32, d_ff=32, layers=1, heads=4, kv_heads=2, seq=16, batch=8)
TINY |= dict(steps=60, warmup=4, learning_rate=1e-2, save_every=10, prompt="the")


def config(folder, file, **changes):
    return TrainConfig(**(TINY | dict(out=str(folder), text=str(file)) | changes))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "cat.txt"
    file.write_text("the cat sat on the mat, and the dog sat on the log. " * 12)
    return file


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run that nothing stopped."""
    return train(config(tmp_path_factory.mktemp("straight"), text))


def arrays(folder):
    """Weights and moments of the newest checkpoint."""
    stepping = Stepping(Blueprint(config(folder, "none"), spread=False))
    like = dict(params=stepping.blueprint.shapes, moments=stepping.shapes)
    store = Store(Path(folder) / "checkpoints")
    found = store.arrays(store.steps[-1], _on_one(like))
    store.close()
    return found


def _on_one(like):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like
    )


def losses(trained):
    return np.array([record.loss for record in trained.records])
