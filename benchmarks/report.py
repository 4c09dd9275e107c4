"""Turns results into a markdown table, a table of targets, and a JSON file."""

import dataclasses
import fnmatch
import json
import math
import operator
import os
import pathlib
import platform
import statistics
from collections.abc import Sequence

from benchmarks.harness import Result
from benchmarks.workload import Target, Workload

COLUMNS = (
    "side",
    "median ms",
    "min..max",
    "x first (spread)",
    "GFLOP/s",
    "GB/s",
    "run MB",
    "XLA temp MB",
    "stored MB",
    "trace + compile s",
    "cpu ms",
    "difference",
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target beside what was measured.

    Attributes:
        ratios: paired round by round; single values where the target is absolute.
        cpu_ratio: of the medians of processor time, which another process's load
            touches less; `None` where time is not compared.
    """

    target: Target
    case: str
    ratios: list[float]
    cpu_ratio: float | None = None

    @property
    def met(self) -> bool:
        """Whether the median stays within the target."""
        return statistics.median(self.ratios) <= self.target.at_most


def spread(values: Sequence[float]) -> str:
    """`median (min..max)`, or the one value."""
    middle = f"{statistics.median(values):.2f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.2f}..{max(values):.2f})"


def case_table(workload: Workload, case: str, results: Sequence[Result]) -> str:
    """The markdown table of one case; sides that did not run are listed below it."""
    ran = [result for result in results if not result.error]
    ideal = workload.ideal(workload.cases[case])
    lines = [f"### {workload.title}: {case}", "", f"`{workload.cases[case]}`", ""]
    if ran:
        lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row(_cells(result, ran[0], ideal)) for result in ran]
    lines += [
        f"\n- `{result.side}`: {result.error}" for result in results if result.error
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(result: Result, first: Result, ideal: dict[str, float]) -> list[str]:
    ms, facts = statistics.median(result.ms), result.facts
    compiled = "trace_s" in facts
    return [
        result.side,
        f"{ms:.2f}",
        f"{min(result.ms):.2f}..{max(result.ms):.2f}",
        spread(result.ratios(first)),
        f"{ideal['flops'] / ms / 1e6:.0f}",
        f"{ideal['bytes'] / ms / 1e6:.1f}",
        f"{facts['run_mb']:.0f}",
        f"{facts['temp_mb']:.0f}" if compiled else "",
        f"{facts['stored_mb']:.0f}" if "stored_mb" in facts else "",
        f"{facts['trace_s']:.2f} + {facts['compile_s']:.2f}" if compiled else "",
        f"{statistics.median(result.cpu_ms):.1f}",
        f"{facts['diff']:.0e}",
    ]


def verdicts(workload: Workload, case: str, results: Sequence[Result]) -> list[Verdict]:
    """The targets that both of their sides were measured for."""
    by_side = {result.side: result for result in results if not result.error}
    found = []
    for target in workload.targets:
        wanted = {target.side} | ({target.against} - {""})
        if fnmatch.fnmatch(case, target.cases) and wanted <= by_side.keys():
            mine, cpu_ratio = by_side[target.side], None
            if target.against:
                theirs = by_side[target.against]
                ratios = mine.ratios(theirs, target.measure)
            else:
                ratios = mine.measure(target.measure)
            if target.against and target.measure == "ms":
                medians = map(statistics.median, (mine.cpu_ms, theirs.cpu_ms))
                cpu_ratio = operator.truediv(*medians)
            found.append(Verdict(target, case, ratios, cpu_ratio))
    return found


def target_table(found: Sequence[Verdict]) -> str:
    """The markdown table of targets, met and missed."""
    head = ("case", "side", "measure", "against", "target", "measured", "cpu", "")
    lines = [_row(head), _row(["---"] * len(head))]
    for verdict in found:
        target = verdict.target
        lines.append(
            _row(
                [
                    verdict.case,
                    target.side,
                    target.measure,
                    target.against,
                    f"<= {target.at_most:g}",
                    spread(verdict.ratios),
                    "" if verdict.cpu_ratio is None else f"{verdict.cpu_ratio:.2f}",
                    "met" if verdict.met else "missed",
                ]
            )
        )
    return "\n".join(lines) + "\n"


def machine() -> str:
    """The processor, the cores and the load under which this was measured."""
    model = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    python, load = platform.python_version(), os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, Python {python}, load {load:.1f}"


def write(
    folder: pathlib.Path, workload: Workload, measured: dict[str, list[Result]]
) -> pathlib.Path:
    """Writes `<workload>.md` and `<workload>.json`; returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        verdict
        for case, results in measured.items()
        for verdict in verdicts(workload, case, results)
    ]
    parts = [f"## {workload.title}\n", machine() + "\n"]
    parts += [case_table(workload, case, results) for case, results in measured.items()]
    if found:
        parts += [f"### {workload.title}: targets\n", target_table(found)]
    path = folder / f"{workload.name}.md"
    path.write_text("\n".join(parts))
    raw = {
        "workload": workload.name,
        "machine": machine(),
        "cases": {
            case: {
                "case": workload.cases[case],
                "results": [dataclasses.asdict(result) for result in results],
            }
            for case, results in measured.items()
        },
    }
    path.with_suffix(".json").write_text(json.dumps(_plain(raw), indent=1) + "\n")
    return path


def _plain(value):
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
