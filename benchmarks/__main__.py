"""`python -m benchmarks WORKLOAD`: measures, prints tables, writes results."""

import fnmatch
import importlib
import pathlib
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks.harness import Result, drive
from benchmarks.report import case_table, write
from benchmarks.workload import Workload

WORKLOADS = (
    "attention",
    "attention_options",
    "decode_attention",
    "decode_options",
    "swiglu",
    "decode_step",
    "quantized_step",
    "mesh_decode",
    "rmsnorm_quant",
    "router",
    "moe",
    "conv",
    "ring",
    "cross_entropy",
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


def _load(name: str) -> Workload:
    if name not in WORKLOADS:
        raise typer.BadParameter(f"{name}: the workloads are {', '.join(WORKLOADS)}")
    return importlib.import_module(f"benchmarks.{name}").WORKLOAD


def _chosen(names, globs: str) -> list[str]:
    """The names that match, in the order of the globs: the first is the base."""
    return list(
        dict.fromkeys(
            name
            for glob in globs.split(",")
            for name in names
            if fnmatch.fnmatch(name, glob)
        )
    )


@app.command()
def measure(
    workloads: Annotated[list[str], typer.Argument()] = list(WORKLOADS),  # noqa: B006
    sides: Annotated[str, typer.Option(help="globs; the first side is the base")] = "*",
    cases: Annotated[str, typer.Option(help="globs")] = "*",
    reps: Annotated[int, typer.Option(help="rounds of samples")] = 7,
    budget: Annotated[float, typer.Option(help="seconds of rounds a case")] = 1e9,
    out: Annotated[pathlib.Path, typer.Option(help="folder")] = pathlib.Path(
        "benchmarks/results"
    ),
    show: Annotated[bool, typer.Option("--list", help="cases and sides only")] = False,
) -> None:
    """Measures workloads, every side in its own process, interleaved."""
    for name in workloads:
        workload = _load(name)
        case_names = _chosen(workload.cases, cases)
        side_names = _chosen(workload.sides, sides)
        if show:
            console.print(f"{name}\n  cases: {case_names}\n  sides: {side_names}")
        else:
            measured = _measure(workload, case_names, side_names, reps, budget)
            console.print(f"written: {write(out, workload, measured)}")


def _measure(
    workload: Workload,
    cases: list[str],
    sides: list[str],
    reps: int,
    budget: float,
) -> dict[str, list[Result]]:
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    measured = {}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(workload.name, total=len(cases))
        for case in cases:

            def tell(step: str, case: str = case) -> None:
                progress.update(task, description=f"{workload.name} {case}: {step}")

            measured[case] = drive(
                workload, case, sides, reps=reps, budget_s=budget, tell=tell
            )
            progress.advance(task)
            console.print(case_table(workload, case, measured[case]), soft_wrap=True)
    return measured


if __name__ == "__main__":
    app()
