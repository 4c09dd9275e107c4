"""The roofline of a core with the macros of a table, as SVG."""

import math
from collections.abc import Iterator
from html import escape

from neuronjax.tools.html.roofline import WIDTHS, Bound, Core
from neuronjax.tools.html.theme import color_of
from neuronjax.tools.trace import Trace

_WIDE, _HIGH = 760.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 92.0, 34.0, 46.0
_LEAST, _MOST = 4.0, 18.0  # radius of a dot
_DECADES_BELOW = 3  # of the ridge that are always shown


class _Axes:
    """From logarithms of FLOP/byte and FLOP/s to pixels."""

    def __init__(self, bounds: list[Bound], core: Core) -> None:
        ridge = max(core.flops.values()) / core.bandwidth
        lows = [b.intensity for b in bounds] + [ridge / 10**_DECADES_BELOW]
        highs = [b.intensity for b in bounds] + [ridge * 10]
        self.left, self.right = math.floor(_log(min(lows))), math.ceil(_log(max(highs)))
        self.high = math.ceil(_log(max(core.flops.values())))
        lowest = min(min(lows) * core.bandwidth, core.bandwidth * 10**self.left)
        self.low = math.floor(_log(lowest))

    def x(self, intensity: float) -> float:
        share = (_log(intensity) - self.left) / (self.right - self.left)
        return _LEFT + share * (_WIDE - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        share = (_log(rate) - self.low) / (self.high - self.low)
        return _HIGH - _BOTTOM - share * (_HIGH - _TOP - _BOTTOM)


def roofline_svg(trace: Trace, bounds: list[Bound], core: Core) -> str:
    """The roofs of `core` and a dot for each row that has products.

    A dot lies where its macro would be at best; its area is its share of the time.
    """
    shown = [(i, b) for i, b in enumerate(bounds) if b.rate > 0]
    axes = _Axes([bound for _, bound in shown], core)
    total = sum(r.count * b.seconds for r, b in zip(trace.rows, bounds, strict=True))
    lines = [*_grid(axes), *_roofs(axes, core)]
    for index, bound in shown:
        share = trace.rows[index].count * bound.seconds / total
        lines.append(_dot(trace, index, bound, share, axes))
    return "\n".join(
        [
            f'<svg class="nj-svg" viewBox="0 0 {_WIDE:g} {_HIGH:g}" role="img" '
            f'width="{_WIDE:g}" height="{_HIGH:g}" '
            f'aria-label="Roofline of {escape(core.name)}">',
            *lines,
            "</svg>",
        ]
    )


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = _HIGH - _BOTTOM, _WIDE - _RIGHT
    for power in range(axes.left, axes.right + 1):
        x = axes.x(10.0**power)
        yield f'<path class="nj-grid" d="M{x:.1f} {_TOP}V{bottom}"/>'
        yield _label(x, bottom + 16, _power(power), "middle")
    for power in range(axes.low, axes.high + 1):
        y = axes.y(10.0**power)
        yield f'<path class="nj-grid" d="M{_LEFT} {y:.1f}H{right}"/>'
        yield _label(_LEFT - 8, y + 4, _power(power - 12), "end")
    yield _label((_LEFT + right) / 2, _HIGH - 8, "FLOP for each byte", "middle")
    yield _label(_LEFT - 50, 15, "TFLOP/s at best", "start")


def _roofs(axes: _Axes, core: Core) -> Iterator[str]:
    left, right = 10.0**axes.left, 10.0**axes.right
    peaks: dict[float, list[int]] = {}
    for width, peak in core.flops.items():
        peaks.setdefault(peak, []).append(width)
    highest = max(peaks)
    start = f"{axes.x(left):.1f} {axes.y(left * core.bandwidth):.1f}"
    ridge = highest / core.bandwidth
    tip = f"{axes.x(ridge):.1f} {axes.y(highest):.1f}"
    yield f'<path class="nj-roof" d="M{start}L{tip}"/>'
    for peak, widths in peaks.items():
        x, y = axes.x(peak / core.bandwidth), axes.y(peak)
        yield f'<path class="nj-roof" d="M{x:.1f} {y:.1f}H{axes.x(right):.1f}"/>'
        names = ", ".join(WIDTHS[width] for width in widths)
        words = f"{names}: {peak / 1e12:.3g}"
        yield _label(axes.x(right) + 6, y + 4, words, "start")
    middle = 10 ** ((axes.left + _log(ridge)) / 2)
    words = f"{core.bandwidth / 1e12:.3g} TB/s"
    y = axes.y(middle * core.bandwidth)
    yield _label(axes.x(middle) - 8, y - 6, words, "end")


def _dot(trace: Trace, index: int, bound: Bound, share: float, axes: _Axes) -> str:
    row = trace.rows[index]
    radius = _LEAST + (_MOST - _LEAST) * math.sqrt(share)
    x, y = axes.x(bound.intensity), axes.y(bound.rate)
    words = f"{row.name}: {bound.intensity:.3g} FLOP/byte, {share:.1%} of the time"
    return (
        f'<circle class="nj-dot {color_of(trace, index)}" data-row="{index}" '
        f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{escape(words)}</title>'
        "</circle>"
    )


def _label(x: float, y: float, words: str, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="dim" {where}>{escape(words)}</text>'


def _power(power: int) -> str:
    return f"{10.0**power:g}"


def _log(value: float) -> float:
    return math.log10(value)
