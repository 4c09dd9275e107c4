"""The benchmarks' harness: targets, ratios, and one short run."""

import fnmatch
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import WORKLOADS
from benchmarks.harness import Result
from benchmarks.report import verdicts
from benchmarks.workload import Target, Workload

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", WORKLOADS)
def test_targets_name_sides_and_cases_that_exist(name):
    workload = importlib.import_module(f"benchmarks.{name}").WORKLOAD
    assert workload.name == name
    for target in workload.targets:
        assert {target.side, target.against} <= {*workload.sides, ""}
        assert fnmatch.filter(workload.cases, target.cases)
    for case in workload.cases.values():
        assert workload.ideal(case)["flops"] > 0


def _workload(*targets: Target) -> Workload:
    return Workload("w", "W", {"case": {}}, {}, lambda case: {}, targets)


def test_a_target_reads_the_ratios_of_one_round():
    # The machine slowed down threefold in the last round; no ratio shows it.
    ours = Result("ours", [10.0, 10.0, 30.0], [9.0] * 3, {"run_mb": 0.2})
    peer = Result("peer", [20.0, 20.0, 60.0], [36.0] * 3, {"run_mb": 100.0})
    workload = _workload(
        Target("ours", "*", "ms", 0.5, "peer"),
        Target("ours", "*", "ms", 0.4, "peer"),
        Target("ours", "*", "run_mb", 0.1, "peer"),
        Target("ours", "other", "ms", 0.5, "peer"),
    )
    found = verdicts(workload, "case", [peer, ours])
    assert [verdict.ratios for verdict in found] == [[0.5] * 3, [0.5] * 3, [0.01]]
    assert [verdict.met for verdict in found] == [True, False, True]
    assert [verdict.cpu_ratio for verdict in found] == [0.25, 0.25, None]


def test_a_side_that_failed_has_no_verdict():
    ours, peer = Result("ours", ms=[1.0]), Result("peer", error="ImportError")
    workload = _workload(Target("ours", "*", "ms", 0.5, "peer"))
    assert verdicts(workload, "case", [ours, peer]) == []


def test_a_run_writes_a_table_and_its_samples(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "swiglu", "--reps", "2"]
    command += ["--cases", "forward_float32", "--sides", "jnp,jnp_float32*"]
    subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, check=True, capture_output=True
    )
    assert "| jnp_float32_accumulation |" in (tmp_path / "swiglu.md").read_text()
    raw = json.loads((tmp_path / "swiglu.json").read_text())
    first, second = raw["cases"]["forward_float32"]["results"]
    assert len(first["ms"]) == len(second["ms"]) == 2
    assert second["facts"]["diff"] < 1e-5
    assert second["facts"]["temp_mb"] > 0
