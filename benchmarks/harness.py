"""Drives one worker process per side in interleaved rounds.

All sides are built and warm before the first sample; each round asks every side for
one sample, in turn, and every other round in the reverse order, so that drift of the
machine hits all sides alike.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.worker import MARK
from benchmarks.workload import Case, Side, Workload

INTERPRETERS = {
    "jax": os.environ.get("BENCH_PYTHON_JAX", sys.executable),
    "torch": os.environ.get("BENCH_PYTHON_TORCH", sys.executable),
    "peers": os.environ.get("BENCH_PYTHON_PEERS", sys.executable),
}
ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Result:
    """What one side took in one case; `error` says why there are no numbers."""

    side: str
    ms: list[float] = dataclasses.field(default_factory=list)
    cpu_ms: list[float] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""

    def measure(self, name: str) -> list[float]:
        """The samples of `ms`, or the one value of another measure."""
        if name == "ms":
            return self.ms
        if name == "compile_s":
            return [self.facts["trace_s"] + self.facts["compile_s"]]
        return [self.facts[name]]

    def ratios(self, other: "Result", measure: str = "ms") -> list[float]:
        """This side over the other, round by round."""
        pairs = zip(self.measure(measure), other.measure(measure), strict=True)
        # A run that needs no more memory than it started with counts as one MB.
        floor = 1.0 if measure == "run_mb" else 0.0
        return [max(mine, floor) / max(theirs, floor) for mine, theirs in pairs]


class Worker:
    """The process of one side."""

    def __init__(self, workload: str, name: str, side: Side, case: Case):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [
                INTERPRETERS[side.interpreter],
                "-m",
                "benchmarks.worker",
                workload,
                name,
                json.dumps(case),
            ],
            cwd=ROOT,
            env=_environment(side),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        """The worker's next message."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self.errors.seek(0)
        return {"error": f"the worker died: {self.errors.read()[-300:].strip()}"}

    def ask(self, word: str) -> dict[str, Any]:
        """Sends one word and returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def _environment(side: Side) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={side.devices}"
    changes = {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
    }
    return {**os.environ, **changes}


def drive(
    workload: Workload,
    case_name: str,
    sides: Sequence[str],
    *,
    reps: int,
    budget_s: float,
    tell: Callable[[str], None],
) -> list[Result]:
    """Measures the sides in one case; a side that fails is reported, not raised."""
    case = workload.cases[case_name]
    workers: dict[str, Worker] = {}
    results = {name: Result(name) for name in sides}
    try:
        for name in sides:
            tell(f"compiling {name}")
            _start(workload, name, case, workers, results[name])
        _rounds(workers, results, reps, budget_s, tell)
        for name, worker in workers.items():
            results[name].facts.update(worker.ask("end"))
    finally:
        for worker in workers.values():
            worker.close()
    _compare(results)
    return list(results.values())


def _start(
    workload: Workload,
    name: str,
    case: Case,
    workers: dict[str, Worker],
    result: Result,
) -> None:
    side = workload.sides[name]
    if reason := side.skip(case):
        result.error = f"not run: {reason}"
        return
    worker = Worker(workload.name, name, side, case)
    facts = worker.read()
    if "error" in facts:
        result.error = facts["error"]
        worker.close()
    else:
        result.facts = facts
        workers[name] = worker


def _rounds(
    workers: dict[str, Worker],
    results: dict[str, Result],
    reps: int,
    budget_s: float,
    tell: Callable[[str], None],
) -> None:
    start = time.monotonic()
    for round_index in range(reps):
        if round_index and time.monotonic() - start > budget_s:
            return
        tell(f"round {round_index + 1} of {reps}")
        order = list(workers)[:: -1 if round_index % 2 else 1]
        for name in order:
            sample = workers[name].ask("go")
            results[name].ms.append(sample["ms"])
            results[name].cpu_ms.append(sample["cpu_ms"])


def _compare(results: dict[str, Result]) -> None:
    """Adds `diff`: the largest distance from the first side, over its largest value."""
    ran = [result for result in results.values() if not result.error]
    for result in ran:
        pairs = zip(ran[0].facts["samples"], result.facts["samples"], strict=False)
        result.facts["diff"] = max(_difference(*pair) for pair in pairs)
    for result in ran:
        del result.facts["samples"]


def _difference(expected: list[float], got: list[float]) -> float:
    if len(expected) != len(got):
        return float("nan")
    largest = max(max(map(abs, expected)), 1e-9)
    return max(abs(a - b) for a, b in zip(expected, got, strict=True)) / largest
