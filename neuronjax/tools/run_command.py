"""`neuronjax run`: a model continues a text, word by word."""

import enum
import time
from typing import Annotated

import typer
from rich.console import Console

from neuronjax.tools.devices import start_devices
from neuronjax.tools.errors import one_line_errors
from neuronjax.tools.model_options import Dtype, DtypeOption, Model

_stderr = Console(stderr=True)


class Quant(enum.StrEnum):
    """Modes in which a model's projections can be quantized."""

    row_fp8 = "row-fp8"
    static_fp8 = "static-fp8"
    mxfp8 = "mxfp8"
    mxfp4 = "mxfp4"


def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="text to continue, or a question")],
    chat: Annotated[
        bool, typer.Option("--chat", help="ask by the model's chat template")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="draw from tokens that hold this probability")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    dtype: DtypeOption = Dtype.float32,
    devices: Annotated[int, typer.Option(min=1, help="split over this many")] = 1,
    tensor: Annotated[
        int | None, typer.Option(min=1, help="ranks that share the key heads")
    ] = None,
    lnc: Annotated[int, typer.Option(min=1, max=2, help="cores of each rank")] = 1,
    quant: Annotated[
        Quant | None, typer.Option(help="quantize the projections first")
    ] = None,
) -> None:
    """Continues PROMPT with MODEL; the text streams to standard output."""
    with one_line_errors():
        loaded, decoder = _loaded(model, dtype, devices, tensor, lnc, quant)
        if chat:
            ids = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            ids = loaded.tokenizer.encode(prompt)
        with _Speech(loaded.tokenizer, len(ids)) as speech:
            decoder.generate(
                [ids],
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stream=lambda new: speech.say(new[0]),
            )


class _Speech:
    """Writes tokens as text while they come, and then how fast they came."""

    def __init__(self, tokenizer, prompt_tokens: int) -> None:
        from neuronjax.models.tokenizer import TextStream

        self._text = TextStream(tokenizer)
        self._prompt_tokens = prompt_tokens
        self._waiting = _stderr.status("Compiling")
        self._times: list[float] = []

    def __enter__(self) -> "_Speech":
        self._times = [time.perf_counter()]
        if _stderr.is_terminal:
            self._waiting.start()
        return self

    def say(self, token: int | None) -> None:
        if token is None:
            return
        self._times.append(time.perf_counter())
        if piece := self._text.push(token):
            self._waiting.stop()
            typer.echo(piece, nl=False)

    def __exit__(self, kind, error, trace) -> None:
        self._waiting.stop()
        if kind is None:
            typer.echo(self._text.finish())
            typer.echo(self._summary(), err=True)

    def _summary(self) -> str:
        start, *times = self._times
        count = len(times)
        # The first token waits for the prompt and for one compilation, the second for
        # the other compilation; the pace is that of those after them.
        if count > 2:
            before, paced = times[1] - start, times[2:]
            rate = len(paced) / (times[-1] - times[1])
            pace = (
                f"{rate:.1f} tokens/s after {before:.1f} s for prompt and compilation"
            )
        else:
            rate = count / (times[-1] - start) if count else 0.0
            pace = f"{rate:.1f} tokens/s with prompt and compilation"
        return f"prompt {self._prompt_tokens} tokens, answer {count} tokens, {pace}"


def _loaded(
    model: str,
    dtype: Dtype,
    devices: int,
    tensor: int | None,
    lnc: int,
    quant: Quant | None,
):
    """A model with its tokenizer, and its decoder: quantized, spread or over a mesh."""
    over_mesh = tensor is not None or lnc > 1
    if over_mesh and (devices > 1 or quant is not None):
        raise ValueError(
            "--tensor and --lnc: expected without --devices and --quant, got both"
        )
    ranks = tensor or 1
    if over_mesh:
        start_devices(ranks * lnc, "--tensor times --lnc")
    else:
        start_devices(devices, "--devices")
    from neuronjax.models.pretrained import load_pretrained
    from neuronjax.tools.evaluate import quantized

    mesh = _mesh(model, ranks, lnc) if over_mesh else None
    # One compiled layer instead of thirty: the first word comes in a third of
    # the time, and the later ones as fast.
    loaded = load_pretrained(model, dtype=dtype.value, scan_layers=quant is None)
    if mesh is not None:
        from neuronjax.models.mesh_decoder import MeshDecoder

        return loaded, MeshDecoder(loaded.model, mesh)
    decoder = loaded.model
    if quant is not None:
        decoder = quantized(loaded, quant.value).stacked()
    if devices > 1:
        _spread(decoder, devices)
    return loaded, decoder


def _mesh(model: str, tensor: int, lnc: int):
    """A mesh of ranks that can share the heads of `model`, whose weights wait."""
    from neuronjax.models.checkpoint import read_config
    from neuronjax.models.hub import locate
    from neuronjax.models.mesh_packing import require_division
    from neuronjax.sharding.mesh import make_mesh

    mesh, cores = make_mesh(tensor=tensor, lnc=lnc), "lnc" if lnc > 1 else None
    config = read_config(locate(model))
    require_division("--tensor and --lnc", mesh, config, "tensor", cores)
    return mesh


def _spread(model, count: int) -> None:
    """Splits heads and MLP over the devices, where their sizes divide."""
    from neuronjax.sharding.mesh import make_mesh
    from neuronjax.sharding.placement import place

    place(model, make_mesh(tensor=count))
