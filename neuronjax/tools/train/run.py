"""The folder of a run: its checkpoints, what they say, and the model in them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from neuronjax.models.llama import Llama
from neuronjax.tools.train.blueprint import Blueprint
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.store import Store, finished_steps, read_facts
from neuronjax.tools.train.windows import Text

CHECKPOINTS, LOG, CURVE = "checkpoints", "log.jsonl", "loss.png"
# What a run may change when it goes on: none of these says what a weight means or
# which windows come next.
FREE = {
    *("out", "steps", "learning_rate", "warmup", "weight_decay", "clip", "balance"),
    *("data", "tensor", "expert", "lnc", "validation"),
    *("save_every", "keep", "prompt", "sample_tokens", "temperature"),
}


def saved_config(folder: str | Path) -> dict[str, Any]:
    """The settings in the newest checkpoint of a run; reading them starts no jax.

    Raises:
        ValueError: there is no finished checkpoint.
    """
    return read_facts(require_run(folder), finished(folder)[-1])["config"]


def require_run(folder: str | Path) -> Path:
    """The checkpoints of a run.

    Raises:
        ValueError: there is no finished one.
    """
    place = Path(folder) / CHECKPOINTS
    if not finished(folder):
        raise ValueError(f"{folder}: expected a finished checkpoint, found none")
    return place


def finished(folder: str | Path) -> list[int]:
    """The steps of a run's finished checkpoints."""
    return finished_steps(Path(folder) / CHECKPOINTS)


def require_same(facts: dict[str, Any], config: TrainConfig, text: Text) -> None:
    """Refuses settings under which the checkpoint would mean something else.

    Raises:
        ValueError: a setting that must stay has changed, or the text has.
    """
    for name, now in dataclasses.asdict(config).items():
        before = facts["config"].get(name)
        if name not in FREE | {"text"} and before != now:
            raise ValueError(
                f"{config.out}: a resumed run must keep {name} = {before}, got {now}"
            )
    if facts["text"] != text.digest:
        raise ValueError(
            f"{config.out}: a resumed run must keep its text, "
            f"got another in {config.text or 'the sonnets'}"
        )


def load_run(folder: str | Path, step: int | None = None) -> tuple[Llama, TrainConfig]:
    """The decoder of a run on one device, whatever mesh trained it.

    Args:
        folder: of the run.
        step: of the checkpoint; the newest unless named.

    Returns:
        The decoder, and the settings it was trained with. Its tokens are bytes of
        UTF-8.

    Raises:
        ValueError: there is no such finished checkpoint.
    """
    store = Store(require_run(folder))
    try:
        step = store.steps[-1] if step is None else step
        if step not in store.steps:
            raise ValueError(
                f"{folder}: expected a checkpoint of {store.steps}, got {step}"
            )
        config = TrainConfig(**store.facts(step)["config"])
        blueprint = Blueprint(config, spread=False)
        like = {"params": placed(blueprint.shapes)}
        params = store.arrays(step, like, partial=True)["params"]
        return blueprint.model(params), config
    finally:
        store.close()


def placed(shapes: Any, shardings: Any = None) -> Any:
    """`shapes` with their shardings; without, all lie on the first device."""
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: one, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings,
    )
