"""`neuronjax export`."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from neuronjax.tools.check_commands import ExampleDtype
from neuronjax.tools.console import table_console
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.export import subjects
from neuronjax.tools.export.exporting import PLATFORMS
from neuronjax.tools.export.exporting import export as write
from neuronjax.tools.export.program import ExportedProgram
from neuronjax.tools.export.subjects import Phase, Subject

_stderr = Console(stderr=True)


def export(
    what: Annotated[
        str, typer.Argument(help="a NAME or function, or a model as run takes it")
    ],
    out: Annotated[pathlib.Path, typer.Option(help="the file to write")],
    platform: Annotated[
        list[str] | None,
        typer.Option(help="cpu, cuda, rocm, tpu or neuron; may be given several times"),
    ] = None,
    vjp: Annotated[
        bool, typer.Option("--vjp", help="the derivative goes into the file too")
    ] = False,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="leave the size of the batch open")
    ] = False,
    composites: Annotated[
        bool | None,
        typer.Option(
            "--composites/--inline",
            help="macros as composites or as functions; by default composites where "
            "there is one platform and no open size",
        ),
    ] = None,
    phase: Annotated[Phase, typer.Option(help="of a model")] = Phase.forward,
    batch: Annotated[int, typer.Option(min=1, help="rows, of a model")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="tokens of a row, of a model")] = 128,
    slots: Annotated[
        int | None, typer.Option(min=1, help="of a model's cache; --seq by default")
    ] = None,
    dtype: Annotated[
        ExampleDtype, typer.Option(help="of the operands, or of a model's weights")
    ] = ExampleDtype.float32,
    weights: Annotated[
        pathlib.Path | None,
        typer.Option(help="write the model's parameters too, such as model.npz"),
    ] = None,
    text: Annotated[
        pathlib.Path | None, typer.Option(help="write StableHLO as text too")
    ] = None,
) -> None:
    """Writes WHAT as StableHLO, which jax and flatbuffers alone can run."""
    with one_line_errors():
        _require_weights(what, weights, phase, dtype)
        status = Status(f"Lowering {escape(what)}", console=_stderr)
        with status:
            sizes = dict(batch=batch, seq=seq, slots=seq if slots is None else slots)
            subject = _subject(what, phase, dtype.value, symbolic, sizes)
            program = write(
                subject.call,
                *subject.args,
                platforms=platform or PLATFORMS,
                vjp=vjp,
                composites=composites,
            )
            program.save(out)
            if text is not None:
                text.write_text("\n".join(m.text for m in program.modules))
            if weights is not None:
                status.update(f"Writing {escape(str(weights))}")
                _write_weights(what, weights, dtype.value)
        _tell(program, out, weights)


def _subject(
    what: str, phase: Phase, dtype: str, symbolic: bool, sizes: dict[str, int]
) -> Subject:
    """A macro on its example, or a model of these sizes."""
    if subjects.is_op(what):
        return subjects.of_op(what, dtype, symbolic=symbolic)
    path = subjects.model_path(what)
    return subjects.of_model(path, phase, dtype=dtype, symbolic=symbolic, **sizes)


def _require_weights(
    what: str, weights: pathlib.Path | None, phase: Phase, dtype: ExampleDtype
) -> None:
    if weights is None:
        return
    if subjects.is_op(what):
        raise ValueError(f"--weights: {what} is a macro and has none")
    if weights.suffix != ".npz":
        raise ValueError(f"--weights: expected a name that ends in .npz, got {weights}")
    if phase == Phase.layer:
        raise ValueError("--weights: expected a phase of the whole model, got layer")
    if dtype == ExampleDtype.bfloat16:
        raise ValueError(
            "--weights: an npz file has float16 to float64, got --dtype bfloat16"
        )


def _write_weights(what: str, weights: pathlib.Path, dtype: str) -> None:
    import numpy as np

    from neuronjax.models.pretrained import load_pretrained

    model = load_pretrained(subjects.model_path(what), dtype=dtype).model
    np.savez(weights, **ExportedProgram.arguments(model)[0])


def _tell(
    program: ExportedProgram, out: pathlib.Path, weights: pathlib.Path | None
) -> None:
    table_console().print(program)
    lines = program.loader(out)
    if weights is not None:
        lines = lines.replace("import jax.export, ", "import jax.export, numpy, ")
        lines = lines.replace("call(arg0", f'call(dict(numpy.load("{weights}"))')
    typer.echo(f"\nIts reader needs jax and flatbuffers:\n\n{lines}")
