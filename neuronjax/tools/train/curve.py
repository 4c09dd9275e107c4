"""The loss curve of a run, in the terminal and as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

from neuronjax.tools.drawing import write_figure
from neuronjax.tools.train.log import Record

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_curve(
    losses: Sequence[float], *, width: int = 64, height: int = 8
) -> list[str]:
    """The losses as columns of blocks, the mean of some steps in each.

    Args:
        losses: one a step.
        width: columns at most.
        height: lines.

    Returns:
        Lines of equal length, the highest loss on top.

    Example:
        >>> for line in terminal_curve([4.0, 3.0, 2.0, 1.0], width=4, height=2):
        ...     print(line)
        4.00 ┤█▃
        1.00 ┤██▆▁
    """
    if not losses:
        return []
    means = _columns(losses, width)
    low, high = min(means), max(means)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    levels = [1 + round((mean - low) * scale) for mean in means]
    lines = []
    for row in reversed(range(height)):
        mark = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(row, "")
        blocks = "".join(_EIGHTHS[min(max(n - 8 * row, 0), 8)] for n in levels)
        lines.append(f"{mark:>4} {'┤' if mark else '│'}{blocks}".rstrip())
    return lines


def _columns(losses: Sequence[float], width: int) -> list[float]:
    """The losses in at most `width` equal parts, each by its mean."""
    count = min(width, len(losses))
    cuts = [round(i * len(losses) / count) for i in range(count + 1)]
    parts = [losses[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return [math.fsum(part) / len(part) for part in parts]


def save_curve(records: Sequence[Record], file: str | Path) -> None:
    """Writes the loss of each step, and of the scored text, as a picture.

    Args:
        records: the steps.
        file: its path, such as `loss.png` or `loss.svg`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure_of = require_matplotlib()
    figure = figure_of(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [r.step for r in records]
    axes.plot(steps, [r.loss for r in records], lw=1, label="learnt windows")
    scored = [(r.step, r.validation) for r in records if r.validation is not None]
    if scored:
        axes.plot(*zip(*scored, strict=True), "o-", ms=4, label="text kept aside")
    axes.axhline(math.log(256), color="gray", lw=0.8, ls=":", label="all bytes alike")
    axes.set(xlabel="step", ylabel="nats a byte", title="Loss")
    axes.set_ylim(bottom=0)
    axes.legend()
    write_figure(figure, file)


def require_matplotlib():
    """matplotlib's `Figure`, which draws without a screen.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a loss curve needs matplotlib: pip install 'neuronjax[train]'"
        ) from error
    return Figure
