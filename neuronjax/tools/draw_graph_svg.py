"""Macro graphs as SVG."""

from collections.abc import Iterator, Mapping
from html import escape

from neuronjax.tools.draw_graph import MacroGraph
from neuronjax.tools.draw_graph_flow import INPUTS, MacroNode
from neuronjax.tools.draw_graph_layout import RESULTS, Frame, Layout, Line, arrange
from neuronjax.tools.html.theme import color_of, style
from neuronjax.tools.units import with_prefix

_BOLD, _PLAIN = 8.7, 7.2  # pixels of a character, in wide fonts
_HIGH = 56.0
_MOST = 34  # characters of a node's second line
_HEAD = 26.0
_ENDS = {INPUTS: "arguments", RESULTS: "results"}
_TIPS = """<defs>
<marker id="nj-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" \
markerHeight="7" orient="auto"><path class="nj-tip" d="M0 0L8 4L0 8Z"/></marker>
<marker id="nj-loop-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" \
markerHeight="7" orient="auto"><path class="nj-loop-tip" d="M0 0L8 4L0 8Z"/></marker>
</defs>"""


def svg(graphs: Mapping[str, MacroGraph], *, standalone: bool = True) -> str:
    """Graphs under each other, each under its title."""
    drawn, width, y = [], 0.0, 0.0
    for title, graph in graphs.items():
        layout = arrange(graph.folded, _size_of(graph))
        if title:
            y += _HEAD
            where = f'x="12" y="{y - 6:g}"'
            drawn.append(f'<text class="name" {where}>{escape(title)}</text>')
            width = max(width, 24 + _BOLD * len(title))
        body = "\n".join(_body(graph, layout))
        drawn.append(f'<g transform="translate(0 {y:g})">\n{body}\n</g>')
        width, y = max(width, layout.width), y + layout.height
    count = sum(len(graph.nodes) for graph in graphs.values())
    head = (
        f'<svg class="nj-svg" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width:.0f} {y:.0f}" width="{width:.0f}" height="{y:.0f}" '
        f'role="img" aria-label="Graph of {count} macros">'
    )
    page = '<rect class="nj-page" width="100%" height="100%"/>'
    page = [f"<style>{style()}</style>", page] if standalone else []
    return "\n".join([head, *page, _TIPS, *drawn, "</svg>"])


def _size_of(graph: MacroGraph):
    def size(number: int) -> tuple[float, float]:
        if number in _ENDS:
            return 24 + _PLAIN * len(_ENDS[number]), 26.0
        name, *rest = _words(graph.nodes[number - 1])
        longest = max(_BOLD * len(name), *(_PLAIN * len(line) for line in rest))
        return 28 + longest, _HIGH

    return size


def _words(node: MacroNode) -> tuple[str, str, str]:
    """The three lines of a node."""
    shape = node.outputs[0] if node.outputs else ""
    if len(node.outputs) > 1:
        shape += f" + {len(node.outputs) - 1} more"
    if len(shape) > _MOST:
        shape = shape[: _MOST - 1] + "…"
    row = node.row
    numbers = f"{with_prefix(row.flops, 'FLOP')}, {with_prefix(row.bytes, 'B')}"
    return row.name, shape, numbers


def _body(graph: MacroGraph, layout: Layout) -> Iterator[str]:
    for frame in layout.frames:
        yield f'<rect class="nj-box" {_at(frame)} rx="10"/>'
        x, y = frame.x + 12, frame.y + 16
        yield f'<text class="name" x="{x:.1f}" y="{y:.1f}">{escape(frame.title)}</text>'
    for line in layout.lines:
        yield _path(line)
    for corners in layout.loops:
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        yield f'<path class="nj-loop" d="M{way}" marker-end="url(#nj-loop-tip)"/>'
    for number, frame in layout.nodes.items():
        if number in _ENDS:
            yield f'<rect class="nj-end" {_at(frame)} rx="13"/>'
            yield _text(frame, 17, _ENDS[number], "dim", middle=True)
        else:
            yield from _node(graph, number, frame)


def _node(graph: MacroGraph, number: int, frame: Frame) -> Iterator[str]:
    node, line = graph.nodes[number - 1], graph.lines[number - 1]
    name, shape, numbers = _words(node)
    row = node.row
    told = [f"{number}: {name}, runs {row.count} times", ", ".join(row.shapes)]
    told += [f"{key} = {value}" for key, value in row.config]
    yield f'<g class="nj-macro" data-row="{line}">'
    yield f"<title>{escape(chr(10).join(told))}</title>"
    yield f'<rect class="nj-node" {_at(frame)} rx="6"/>'
    accent = Frame(frame.x, frame.y, 5, frame.height)
    yield f'<rect class="{color_of(graph.trace, line)}" {_at(accent)} rx="2"/>'
    yield _text(frame, 18, name, "name")
    yield _text(frame, 33, shape, "dim")
    yield _text(frame, 48, numbers, "dim")
    yield "</g>"


def _text(frame: Frame, dy: float, words: str, kind: str, middle: bool = False) -> str:
    x = frame.x + (frame.width / 2 if middle else 15)
    anchor = ' text-anchor="middle"' if middle else ""
    where = f'x="{x:.1f}" y="{frame.y + dy:.1f}"'
    return f'<text class="{kind}" {where}{anchor}>{escape(words)}</text>'


def _at(frame: Frame) -> str:
    x, y, width, height, _ = frame
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'


def _path(line: Line) -> str:
    (x, y), *rest = line.points
    way = f"M{x:.1f} {y:.1f}"
    for index, (to_x, to_y) in enumerate(rest):
        if index % 2 == 0 and index + 1 < len(rest):
            way += f"L{to_x:.1f} {to_y:.1f}"
        else:
            half = (y + to_y) / 2
            way += f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    tip = ' marker-end="url(#nj-tip)"' if line.arrow else ""
    return f'<path class="nj-line" d="{way}"{tip}/>'
