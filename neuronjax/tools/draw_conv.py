"""Pictures of K-replication: what lies on the rows of the array in each pass."""

import dataclasses
from typing import Any

import numpy as np

from neuronjax.kernels.conv.plan import PARTITIONS, ReplicationPlan
from neuronjax.primitives.conv.plan import conv1d_plan
from neuronjax.tools.drawing import COLORS, EMPTY, Drawing

MOST_PASSES = 512
ROWS = 4  # of the array, for a character
_LEGEND = (
    f"a character is {ROWS} rows of the {PARTITIONS}: the last digit of the tap there, "
    "· for zeros"
)


@dataclasses.dataclass(frozen=True)
class ConvPicture(Drawing):
    """The passes of a convolution.

    Attributes:
        plan: what is drawn.
    """

    plan: ReplicationPlan

    @property
    def title(self) -> str:
        """The sizes in words."""
        plan, passes = self.plan, len(self.plan.passes)
        cores = len(plan.columns)
        words = f"conv1d: {plan.taps} taps, {plan.channels_in} channels to "
        words += f"{plan.channels_out}: {passes} pass{'es' * (passes != 1)}, "
        words += f"{plan.occupied:.0%} of the rows"
        return words + f", {cores} cores" * (cores > 1)

    def __rich__(self):
        """The picture that `rich` prints."""
        from rich.text import Text  # a picture only: `import neuronjax` stays quick

        names = [self._label(number) for number in range(len(self.plan.passes))]
        wide = max(map(len, names)) + 2
        lines = [Text(self.title, "bold"), Text(_LEGEND, "dim")]
        for name, rows in zip(names, self.plan.layout()[..., 0], strict=True):
            line = Text(name.ljust(wide), "dim")
            for band in rows.reshape(-1, ROWS):
                tap = band.max()
                line.append(
                    *(("·", "dim") if tap < 0 else (str(tap % 10), _color(tap)))
                )
            lines.append(line)
        for core, bands in enumerate(self.plan.columns):
            shown = ", ".join(f"{first}..{first + size - 1}" for first, size in bands)
            lines.append(Text(f"core {core}: output channels {shown or 'none'}", "dim"))
        return Text("\n").join(lines)

    def _label(self, number: int) -> str:
        one = self.plan.passes[number]
        taps = f"{one.first_tap}..{one.first_tap + one.taps - 1}"
        last = one.first_channel + one.channels - 1
        return f"pass {number}  taps {taps}  channels {one.first_channel}..{last}"

    def draw(self, axes: Any) -> None:
        """Draws the rows into `axes` of matplotlib, a column for each pass."""
        from matplotlib.colors import to_rgb

        taps = self.plan.layout()[..., 0].T
        colors = np.array([to_rgb(color) for color in (*COLORS, EMPTY)])
        index = np.where(taps < 0, len(COLORS), taps % len(COLORS))
        axes.imshow(colors[index], aspect="auto", interpolation="none")
        for number, one in enumerate(self.plan.passes if len(taps[0]) <= 64 else ()):
            for tap in range(one.taps):
                row = tap * one.row_stride + one.channels / 2 - 0.5
                axes.text(number, row, one.first_tap + tap, ha="center", va="center")
        axes.set(xlabel="pass", ylabel="row of the array")
        axes.set_title(self.title, loc="left", fontsize="medium", wrap=True)

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the image."""
        return min(4 + 0.4 * len(self.plan.passes), 20), 5


def conv_picture(
    taps: int, channels_in: int, channels_out: int = 128, *, cores: int = 1
) -> ConvPicture:
    """What lies on the rows of the array in each pass of a `conv1d`.

    Args:
        taps: `K` of the filter.
        channels_in: `C_in`.
        channels_out: `C_out`.
        cores: cores that share the output channels.

    Returns:
        The picture of `conv1d_plan`.

    Raises:
        ValueError: a size is not positive, or there are more passes than a picture can
            show.

    Example:
        >>> print(conv_picture(6, 16, 32))
        conv1d: 6 taps, 16 channels to 32: 2 passes, 38% of the rows
        a character is 4 rows of the 128: the last digit of the tap there, · for zeros
        pass 0  taps 0..3  channels 0..15  0000····1111····2222····3333····
        pass 1  taps 4..5  channels 0..15  4444····5555····················
        core 0: output channels 0..31
    """
    plan = conv1d_plan(taps, channels_in, channels_out, cores=cores)
    if len(plan.passes) > MOST_PASSES:
        raise ValueError(
            f"draw: a picture shows at most {MOST_PASSES} passes, got "
            f"{len(plan.passes)} for taps = {taps} and channels_in = {channels_in}"
        )
    return ConvPicture(plan)


def _color(tap: int) -> str:
    return COLORS[tap % len(COLORS)]
