"""The `neuronjax draw` commands: pictures in a terminal or in a file."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from neuronjax.tools.check_commands import ExampleDtype
from neuronjax.tools.errors import one_line_errors

draw = typer.Typer(
    help="Draws masks, rings, convolutions, probes, tiles and the graph of macros.",
    no_args_is_help=True,
)

_Out = Annotated[
    pathlib.Path | None,
    typer.Option(help="write an image, such as mask.png or mask.svg"),
]
_Sink = Annotated[bool, typer.Option("--sink", help="one more logit of each head")]


@draw.command("attention")
def draw_attention(
    q_len: Annotated[int, typer.Argument(help="queries")],
    kv_len: Annotated[
        int | None, typer.Argument(help="keys; as many as queries unless given")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--full", help="no query sees a later key")
    ] = True,
    window: Annotated[
        int | None, typer.Option(help="keys that a query sees, itself among them")
    ] = None,
    sink: _Sink = False,
    prior: Annotated[int, typer.Option(help="slots of a prefix")] = 0,
    used: Annotated[
        int | None, typer.Option(help="of its slots; all unless given")
    ] = None,
    pack: Annotated[
        str, typer.Option(help="lengths of packed sequences, by commas")
    ] = "",
    cp_degree: Annotated[
        int | None, typer.Option(help="devices that share the queries")
    ] = None,
    cp_offset: Annotated[
        int | None, typer.Option(help="position of the first query")
    ] = None,
    strided: Annotated[
        bool, typer.Option("--strided", help="queries are every CP_DEGREEth token")
    ] = False,
    out: _Out = None,
) -> None:
    """Draws what the queries of prefill attention see."""
    with one_line_errors():
        from neuronjax.tools.draw import attention_picture

        picture = attention_picture(
            q_len,
            kv_len,
            causal=causal,
            window=window,
            sink=sink,
            prior=prior,
            used=used,
            pack=_numbers("--pack", pack),
            cp_degree=cp_degree,
            cp_offset=cp_offset,
            strided=strided,
        )
        _show(picture, out)


@draw.command("decode")
def draw_decode(
    slots: Annotated[int, typer.Argument(help="slots of the cache, new tokens last")],
    position: Annotated[int, typer.Argument(help="of the first new token")],
    active: Annotated[int, typer.Option(help="new tokens")] = 1,
    window: Annotated[
        int | None, typer.Option(help="tokens that are seen, the new one among them")
    ] = None,
    sink: _Sink = False,
    block_len: Annotated[
        int, typer.Option(help="slots of a cache block; 0 is a flat, circular cache")
    ] = 0,
    table: Annotated[
        str, typer.Option(help="blocks of the sequence in its order, by commas")
    ] = "",
    out: _Out = None,
) -> None:
    """Draws what the new tokens of decode attention see."""
    with one_line_errors():
        from neuronjax.tools.draw import decode_picture

        picture = decode_picture(
            slots,
            position,
            active=active,
            window=window,
            sink=sink,
            block_len=block_len,
            table=_numbers("--table", table),
        )
        _show(picture, out)


@draw.command("ring")
def draw_ring(
    ranks: Annotated[int, typer.Argument(help="devices of the ring")],
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="chunks travel both ways")
    ] = False,
    channels: Annotated[int, typer.Option(help="rings side by side")] = 1,
    out: _Out = None,
) -> None:
    """Draws what each rank of a ring works on, and when it writes the result."""
    with one_line_errors():
        from neuronjax.tools.draw_ring import ring_picture

        picture = ring_picture(ranks, bidirectional=bidirectional, channels=channels)
        _show(picture, out)


@draw.command("conv")
def draw_conv(
    taps: Annotated[int, typer.Argument(help="taps of the filter")],
    channels_in: Annotated[int, typer.Argument(help="channels of the input")],
    channels_out: Annotated[int, typer.Argument(help="channels of the result")] = 128,
    cores: Annotated[int, typer.Option(help="cores that share the result's")] = 1,
    out: _Out = None,
) -> None:
    """Draws which taps and channels of a convolution share a pass of the array."""
    with one_line_errors():
        from neuronjax.tools.draw_conv import conv_picture

        picture = conv_picture(taps, channels_in, channels_out, cores=cores)
        _show(picture, out)


@draw.command("probe")
def draw_probe(
    kind: Annotated[str, typer.Argument(help="row, column or packed")],
    tiles: Annotated[int, typer.Argument(help="small products")],
    k: Annotated[int, typer.Argument(help="rows that each contracts")],
    m: Annotated[int, typer.Argument(help="columns of each")] = 128,
    size: Annotated[
        int | None, typer.Option(help="of a band: 32, 64 or 128; it fits unless given")
    ] = None,
    at: Annotated[
        str, typer.Option(help="where the bands that are used begin, by commas")
    ] = "",
    unpacked: Annotated[
        bool, typer.Option("--unpacked", help="each half of double rows is a pass")
    ] = False,
    out: _Out = None,
) -> None:
    """Draws which small product of a matmul probe lies where in the array."""
    with one_line_errors():
        from neuronjax.tools.draw_probe import probe_picture

        places = _numbers("--at", at) or None
        picture = probe_picture(
            kind, tiles, k, m, size=size, at=places, double_row=not unpacked
        )
        _show(picture, out)


@draw.command("tile")
def draw_tile(
    shape: Annotated[str, typer.Argument(help="of the tensor, by commas")],
    axis: Annotated[int, typer.Option(help="the one on the partitions")] = 0,
    dtype: Annotated[str, typer.Option(help="of its elements")] = "float32",
    buffer: Annotated[str, typer.Option(help="sbuf or psum")] = "sbuf",
    target: Annotated[str, typer.Option(help="gen2, gen3 or gen4")] = "gen3",
    element: Annotated[
        str, typer.Option(help="coordinates of one to mark, by commas")
    ] = "",
    out: _Out = None,
) -> None:
    """Draws how a tensor lies in 128 partitions and chunks."""
    with one_line_errors():
        from neuronjax.tools.draw_tile import tile_picture

        picture = tile_picture(
            _numbers("SHAPE", shape),
            axis,
            dtype=dtype,
            buffer=buffer,
            generation=target,
            element=_numbers("--element", element) or None,
        )
        _show(picture, out)


@draw.command("graph")
def draw_graph(
    what: Annotated[
        str, typer.Argument(help="a model as run takes it, or a NAME or function")
    ],
    seq: Annotated[int, typer.Option(min=1, help="tokens of a row, of a model")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="rows, of a model")] = 1,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="draw that of the gradient")
    ] = False,
    dtype: Annotated[
        ExampleDtype, typer.Option(help="of the operands")
    ] = ExampleDtype.float32,
    unfolded: Annotated[
        bool, typer.Option("--unfolded", help="draw every layer, not the first for all")
    ] = False,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="write an image, such as graph.svg")
    ] = None,
) -> None:
    """Draws which macro of a model, or of a NAME's example, reads whose results."""
    with one_line_errors():
        from neuronjax.tools.diff_tables import tables_of
        from neuronjax.tools.draw_graph import GraphPicture, macro_graph

        tables = tables_of(
            what, dtype=dtype.value, seq=seq, batch=batch, gradient=gradient
        )
        folds = not unfolded
        graphs = {k: macro_graph(v, fold_repeated=folds) for k, v in tables.items()}
        _show(GraphPicture(graphs), out)


def _show(picture, out: pathlib.Path | None) -> None:
    """Prints the picture, or writes it to a file."""
    if out is not None:
        picture.save(out)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, picture.width))
    if picture.width > console.width:
        raise ValueError(
            f"draw: a line has {picture.width} characters and the terminal "
            f"{console.width}: --out with a file writes an image"
        )
    console.print(picture)


def _numbers(option: str, given: str) -> list[int]:
    try:
        return [int(word) for word in given.split(",")] if given else []
    except ValueError:
        raise ValueError(f"{option}: expected 3,5 and alike, got {given}") from None
