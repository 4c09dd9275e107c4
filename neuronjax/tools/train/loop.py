"""Training: steps, checkpoints and the log, from the start or from a checkpoint."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from neuronjax.tools.train.blueprint import Blueprint
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.log import Log, Record
from neuronjax.tools.train.run import (
    CHECKPOINTS,
    LOG,
    finished,
    placed,
    require_run,
    require_same,
)
from neuronjax.tools.train.stepping import Stepping
from neuronjax.tools.train.store import Store
from neuronjax.tools.train.windows import Text, Windows, scored_windows

Watch = Callable[[Record], None]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run left.

    Attributes:
        config: its settings.
        records: every step, those before a resumption too.
        began: the step that it went on from, 0 for a new run.
    """

    config: TrainConfig
    records: tuple[Record, ...]
    began: int


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    watch: Watch = lambda record: None,
) -> Trained:
    """Trains a decoder, or goes on with one.

    Checkpoints hold weights, moments, the step, the place in the data, the settings and
    the text's SHA-256. A resumed run with the same settings continues to the bit;
    another mesh, more steps or other rates are allowed, another model, text or data
    order are not. What a killed run did after its last checkpoint is done again.

    Args:
        config: the settings; `config.devices` devices must be there.
        resume: go on from the newest checkpoint in `config.out`.
        watch: called after each step.

    Returns:
        The steps; `load_run(config.out)` has the decoder.

    Raises:
        ValueError: there are too few devices; `config.out` has a finished checkpoint
            and `resume` is False, or none and it is True; a setting that must stay has
            changed; the text is too short; another process writes to `config.out`; a
            loss or a gradient is no finite number.
    """
    text = require_ready(config, resume=resume)
    store = Store(Path(config.out) / CHECKPOINTS, keep=config.keep, writing=True)
    try:
        return _Run(config, text, store).go(watch)
    finally:
        store.close()


def require_ready(config: TrainConfig, *, resume: bool) -> Text:
    """The text of a run that can begin, or go on.

    Raises:
        OSError: the text cannot be read.
        ValueError: it is too short; `config.out` has a finished checkpoint and `resume`
            is False, or none and it is True.
    """
    text = Text(config)
    if resume:
        require_run(config.out)
    elif steps := finished(config.out):
        raise ValueError(
            f"{config.out}: has a checkpoint of step {steps[-1]}: resume it with "
            "--resume, or choose another folder with --out"
        )
    return text


class _Run:
    """The state of a run while it goes on."""

    def __init__(self, config: TrainConfig, text: Text, store: Store) -> None:
        self.config, self.text, self.store = config, text, store
        self.stepping = Stepping(Blueprint(config))
        begun = store.steps
        self.began = self.step = begun[-1] if begun else 0
        position = self._restore() if begun else self._start()
        self.windows = Windows(
            text.train,
            seq=config.seq,
            batch=config.batch,
            seed=config.seed,
            position=position,
        )
        self.log = Log(Path(config.out) / LOG, upto=self.began)
        if not begun:
            self._save()
        self._scored = [
            (self._rows(rows), self._rows(counts), counts.sum())
            for rows, counts in scored_windows(
                text.validation, seq=config.seq, batch=config.batch
            )
        ]

    def go(self, watch: Watch) -> Trained:
        while self.step < self.config.steps:
            record = self._take()
            last = self.step == self.config.steps
            due = last or self.step % self.config.save_every == 0
            if due:
                record = dataclasses.replace(record, validation=self._score())
            # The log comes first: a checkpoint never knows of a step that it lacks.
            self.log.add(record)
            if due:
                self._save()
            watch(record)
        return Trained(self.config, tuple(self.log.records), self.began)

    def _take(self) -> Record:
        batch = self._rows(next(self.windows))
        if self.step == self.began:
            # Compiled before the clock starts.
            operands = self.params, self.moments, batch
            self._step = self.stepping.step.lower(*operands).compile()
        start = time.perf_counter()
        self.params, self.moments, metrics = self._step(
            self.params, self.moments, batch
        )
        values = {name: float(value) for name, value in metrics.items()}
        seconds = time.perf_counter() - start
        self.step += 1
        self._require_finite(values)
        rate = self.config.batch * self.config.seq / seconds
        return Record(self.step, tokens_per_s=rate, **values)

    def _require_finite(self, values: dict[str, float]) -> None:
        """Stops before weights that are no numbers reach a checkpoint."""
        for name, value in values.items():
            if not math.isfinite(value):
                place = f"{self.config.out}: step {self.step}"
                raise ValueError(
                    f"{place}: the {name} is {value}; resume from step "
                    f"{self.store.steps[-1]} with a lower learning_rate"
                )

    def _score(self) -> float | None:
        if not self._scored:
            return None
        total = count = 0.0
        for rows, weights, windows in self._scored:
            loss = self.stepping.score(self.params, rows, weights)
            total, count = total + float(loss) * windows, count + windows
        return float(total / count)

    def _start(self) -> int:
        self.params = self.stepping.blueprint.params()
        self.moments = self.stepping.moments(self.params)
        return 0

    def _restore(self) -> int:
        facts = self.store.facts(self.step)
        require_same(facts, self.config, self.text)
        stepping = self.stepping
        blueprint = stepping.blueprint
        like = {
            "params": placed(blueprint.shapes, blueprint.shardings),
            "moments": placed(stepping.shapes, stepping.shardings),
        }
        found = self.store.arrays(self.step, like)
        self.params, self.moments = found["params"], found["moments"]
        return facts["position"]

    def _save(self) -> None:
        facts = dict(
            config=dataclasses.asdict(self.config),
            text=self.text.digest,
            position=self.windows.position,
        )
        arrays = dict(params=self.params, moments=self.moments)
        self.store.save(self.step, arrays, facts)

    def _rows(self, value: np.ndarray) -> Any:
        return jax.device_put(value, self.stepping.blueprint.rows())
