"""The page of a report."""

from collections.abc import Iterator, Mapping
from html import escape
from importlib import metadata

from neuronjax.tools.draw_graph import macro_graph
from neuronjax.tools.html.roofline import Bound, Core, bound_of, core_of
from neuronjax.tools.html.roofline_svg import roofline_svg
from neuronjax.tools.html.theme import color_of, style, text_of
from neuronjax.tools.trace import MacroRow, Trace
from neuronjax.tools.units import with_prefix

# Nothing is loaded from anywhere: what a page shows is in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_COLUMNS = (
    ("NAME", "the macro; the colour is that of its leaf"),
    ("count", "how often it runs; in a loop, times the loop's turns"),
    ("MFLOP", "of the matrix products of one"),
    ("MB", "of the operands and outputs of one"),
    ("FLOP/byte", "MFLOP over MB"),
    ("bound", "what holds it back at best"),
    ("µs at best", "of one"),
    ("share", "of the time at best, all of the row's macros together"),
    ("tiled", "whether its operands are tiles"),
    ("leaf", "the module that holds its math"),
    ("operands", "dtype and shape of each"),
    ("config", "its settings"),
)
_NUMBERS = {"count", "MFLOP", "MB", "FLOP/byte", "µs at best", "share"}


def report(
    tables: Mapping[str, Trace], *, title: str = "Macros", target: str | None = None
) -> str:
    """One HTML page for several tables, without anything from the network.

    Args:
        tables: traces by title, such as those of prefill and of a decode step.
        title: of the page.
        target: whose roofline: `"gen2"`, `"gen3"` or `"gen4"`; that of
            `neuronjax.target` unless given.

    Returns:
        The page.

    Raises:
        ValueError: there is no such target, or a table was made by hand.
    """
    core = core_of(target)
    sections = [_section(words, trace, core) for words, trace in tables.items()]
    versions = (f"{name} {metadata.version(name)}" for name in ("neuronjax", "jax"))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style()}{text_of('page.css')}</style>\n</head>\n<body>",
            f"<header><h1>{escape(title)}</h1>",
            f"<p>{', '.join(versions)}; at best on {escape(core.name)}</p></header>",
            *sections,
            _NOTE,
            f"<script>\n{text_of('page.js')}</script>\n</body>\n</html>\n",
        ]
    )


_NOTE = """<footer>
<p>Graph: an arrow leads to a macro from the last macros whose results it reads,
directly or through operations between them; an arrow that follows from others is left
out. A frame holds what repeats, drawn once; broken arrows lead to its next turn.</p>
<p>At best: each operand and each output passes the core's memory once, and matrix
products run at the peak of the dtype that most bytes of the operands have. Operations
between macros, and the exchange between devices, are not counted. Nothing here was
measured.</p>
</footer>"""


def _section(words: str, trace: Trace, core: Core) -> str:
    bounds = [bound_of(row, core) for row in trace.rows]
    heading = f"<h2>{escape(words)}</h2>" if words else ""
    if not trace.rows:
        return f"<section>{heading}<p>No macros.</p></section>"
    graph = macro_graph(trace)
    return "\n".join(
        [
            f"<section>{heading}",
            _sums(trace, bounds),
            '<figure class="graph"><figcaption>Graph</figcaption><div class="scroll">',
            graph.svg(standalone=False),
            "</div></figure>",
            '<figure><figcaption>Roofline</figcaption><div class="scroll">',
            roofline_svg(trace, bounds, core),
            f"</div>{_without_products(trace, bounds)}</figure>",
            _table(trace, bounds),
            "</section>",
        ]
    )


def _time(trace: Trace, bounds: list[Bound]) -> float:
    pairs = zip(trace.rows, bounds, strict=True)
    return sum(row.count * bound.seconds for row, bound in pairs)


def _sums(trace: Trace, bounds: list[Bound]) -> str:
    seconds = _time(trace, bounds)
    held = sum(
        row.count * bound.seconds
        for row, bound in zip(trace.rows, bounds, strict=True)
        if bound.by == "memory"
    )
    told = {
        "macros": f"{sum(row.count for row in trace.rows):,}",
        "rows": f"{len(trace.rows)}",
        "in matrix products": with_prefix(trace.flops, "FLOP"),
        "operands and outputs": with_prefix(trace.bytes, "B"),
        "at best": f"{seconds * 1e6:,.4g} µs" if seconds < 1 else f"{seconds:.4g} s",
        "of it bound by memory": f"{held / seconds:.0%}" if seconds else "–",
    }
    tiles = (f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in told.items())
    return f'<dl class="sums">{"".join(tiles)}</dl>'


def _without_products(trace: Trace, bounds: list[Bound]) -> str:
    pairs = zip(trace.rows, bounds, strict=True)
    rest = [(row, bound) for row, bound in pairs if not row.flops]
    if not rest:
        return ""
    count = sum(row.count for row, _ in rest)
    moved = sum(row.count * row.bytes for row, _ in rest)
    spent = sum(row.count * bound.seconds for row, bound in rest)
    share = spent / (_time(trace, bounds) or 1)
    return (
        f"<p>{count:,} macro{'s' * (count != 1)} without matrix products, which "
        f"{'have' if count != 1 else 'has'} no dot, "
        f"move{'s' * (count == 1)} "
        f"{with_prefix(moved, 'B')}, {share:.1%} of the time at best.</p>"
    )


def _table(trace: Trace, bounds: list[Bound]) -> str:
    heads = "".join(
        f'<th scope="col" title="{escape(told)}"><button>{name}</button></th>'
        for name, told in _COLUMNS
    )
    total = _time(trace, bounds) or 1.0
    rows = []
    for index, (row, bound) in enumerate(zip(trace.rows, bounds, strict=True)):
        share = row.count * bound.seconds / total
        cells = "".join(_cells(row, bound, share, color_of(trace, index)))
        rows.append(f'<tr data-row="{index}">{cells}</tr>')
    body = "\n".join(rows)
    return (
        '<label class="find">Show rows with <input type="search"></label>\n'
        f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cells(row: MacroRow, bound: Bound, share: float, color: str) -> Iterator[str]:
    shapes = ", ".join(row.shapes) + " vmap" * row.vmapped
    config = ", ".join(f"{key}={value}" for key, value in row.config)
    dot = f'<svg width="10" height="10"><circle class="{color}" cx="5" cy="5" r="5"/>'
    cells = {
        "NAME": f"{dot}</svg> {escape(row.name)}",
        "count": row.count,
        "MFLOP": row.flops / 1e6,
        "MB": row.bytes / 1e6,
        "FLOP/byte": bound.intensity,
        "bound": bound.by,
        "µs at best": bound.seconds * 1e6,
        "share": share,
        "tiled": "yes" if row.tiled else "no",
        "leaf": escape(row.leaf),
        "operands": escape(shapes),
        "config": escape(config),
    }
    for name, value in cells.items():
        if name not in _NUMBERS:
            long = ' class="long"' if name in ("operands", "config") else ""
            yield f"<td{long}>{value}</td>"
            continue
        words = f"{value:.1%}" if name == "share" else f"{value:.4g}"
        if name == "count":
            words = f"{value:,}"
        yield f'<td class="number" data-value="{value!r}">{words}</td>'
