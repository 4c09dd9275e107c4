"""The `neuronjax draw` commands: pictures in a terminal or in a file."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from neuronjax.tools.errors import one_line_errors

draw = typer.Typer(
    help="Draws what sees what in attention, what travels in a ring, what fills the "
    "array in a convolution or a probe.",
    no_args_is_help=True,
)

_Out = Annotated[
    pathlib.Path | None, typer.Option(help="write an image, such as mask.png")
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
            f"{console.width}: --out mask.png writes an image"
        )
    console.print(picture)


def _numbers(option: str, given: str) -> list[int]:
    try:
        return [int(word) for word in given.split(",")] if given else []
    except ValueError:
        raise ValueError(f"{option}: expected 3,5 and alike, got {given}") from None
