"""Pictures of the permute ring: what each rank works on, and when rows are written.

No schedule is written here: the library's own ring is run on the numbers of the ranks
for what each works on, and traced for when each permute is sent.
"""

import colorsys
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from neuronjax.kernels.shard_common import Group, arriving
from neuronjax.tools.drawing import Drawing

MOST_RANKS, MOST_CHANNELS = 128, 16
_MOST_NUMBERS = 512  # in one table of an image
_ARROWS = {(): " ", (1,): "→", (-1,): "←", (-1, 1): "↔"}
_WAYS = {1: "#555555", -1: "#cc6677"}
_RING = Group("ring")
_LEGEND = (
    "→ ← while this chunk is used, one travels to the next rank, to the one before"
)
_WRITTEN = "the step that writes each block of rows"


class Permute(NamedTuple):
    """One exchange, on every rank at once.

    Attributes:
        sent: the step before whose product it is sent.
        used: the step that multiplies what it brings.
        direction: +1 to the next rank, -1 to the one before.
    """

    sent: int
    used: int
    direction: int


@dataclasses.dataclass(frozen=True)
class RingPicture(Drawing):
    """The time line of a ring.

    Attributes:
        title: the ring in words.
        owners: `[ranks, channels, steps]`, the rank whose chunk is used.
        permutes: the exchanges of one channel, in the order in which they are sent.
    """

    title: str
    owners: np.ndarray
    permutes: tuple[Permute, ...]

    @property
    def arrival(self) -> np.ndarray:
        """`[ranks * channels, ranks]`: when a rank writes each block of result rows.

        Blocks are in the order of the result: by rank, and in it by channel.
        """
        ranks, channels, steps = self.owners.shape
        found = np.zeros((ranks, channels, ranks), np.int64)
        for rank, channel, step in np.ndindex(ranks, channels, steps):
            found[self.owners[rank, channel, step], channel, rank] = step
        return found.reshape(ranks * channels, ranks)

    def in_flight(self, step: int) -> tuple[int, ...]:
        """The directions in which chunks travel during the product of `step`."""
        on_the_way = (p for p in self.permutes if p.sent <= step < p.used)
        return tuple(sorted({permute.direction for permute in on_the_way}))

    def __rich__(self):
        """The picture that `rich` prints."""
        from rich.text import Text  # a picture only: `import neuronjax` stays quick

        ranks, channels, steps = self.owners.shape
        names = _names(ranks, channels)
        margin, wide = max(map(len, names)) + 7, len(str(ranks - 1)) + 3
        lines = [Text(self.title, "bold"), Text(_LEGEND, "dim"), Text()]
        lines += [_numbers("step", range(steps), margin, wide)]
        arrows = [_ARROWS[self.in_flight(step)] for step in range(steps)]
        for name, used in zip(names, self.owners.reshape(-1, steps), strict=True):
            line = Text(f"rank {name}".ljust(margin), "dim")
            for owner, arrow in zip(used, arrows, strict=True):
                line.append(str(owner).rjust(wide - 2), _color(owner, ranks))
                line.append(f"{arrow} ", "dim")
            lines.append(line)
        lines += [Text(), Text(_WRITTEN, "bold")]
        lines += [_numbers("rank", range(ranks), margin, wide)]
        for row, (name, written) in enumerate(zip(names, self.arrival, strict=True)):
            cells = "".join(str(step).rjust(wide - 2) + "  " for step in written)
            lines.append(Text(f"rows {name}".ljust(margin), "dim"))
            lines[-1].append(cells, _color(row // channels, ranks))
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)

    def draw(self, axes: Any) -> None:
        """Draws the time line into `axes` of matplotlib."""
        ranks, channels, steps = self.owners.shape
        places = np.arange(ranks)[:, None] + _offsets(channels)
        height = 0.5 / channels
        self._draw_chunks(axes, places, height)
        for way in sorted({permute.direction for permute in self.permutes}):
            self._draw_permutes(axes, way, places, height)
        _ticks(axes.xaxis, range(steps), "step")
        _ticks(axes.yaxis, range(ranks), "rank")
        axes.set(xlim=(-0.5, steps - 0.5), ylim=(ranks - 0.4, -0.6))
        axes.set_title(self.title, loc="left", fontsize="medium", wrap=True)

    def _draw_chunks(self, axes: Any, places: np.ndarray, height: float) -> None:
        """A box for every use of a chunk, in the colour of its rank."""
        from matplotlib.collections import PolyCollection

        ranks, channels, steps = self.owners.shape
        corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (0.25, height / 2)
        y, x = np.meshgrid(places.ravel(), np.arange(steps), indexing="ij")
        centres = np.stack([x.ravel(), y.ravel()], 1)
        owners = self.owners.ravel()
        colors = [_color(owner, ranks) for owner in owners]
        boxes = PolyCollection(
            [*(centres[:, None] + corners)], facecolors=colors, zorder=2
        )
        axes.add_collection(boxes)
        if owners.size <= _MOST_NUMBERS:
            options: dict[str, Any] = dict(ha="center", va="center", zorder=3)
            for owner, centre in zip(owners, centres, strict=True):
                axes.text(*centre, owner, fontsize=8 - min(channels, 4), **options)

    def _draw_permutes(self, axes, way: int, places: np.ndarray, height: float) -> None:
        """Arrows from what a rank sends to its use; what leaves comes in again."""
        turn = way * len(places)
        first, last = places + way * height / 2, places + way * (1 - height / 2)
        # Each arrow a second time, a whole turn earlier, for the rank at the other end.
        y = np.concatenate([first, first - turn]).ravel()
        dy = np.concatenate([last, last - turn]).ravel() - y
        sent, used = np.array([p[:2] for p in self.permutes if p[2] == way]).T
        x, dx = sent + 0.1, used - sent - 0.2
        axes.quiver(
            *(np.repeat(x, y.size), np.tile(y, x.size)),
            *(np.repeat(dx, y.size), np.tile(dy, x.size)),
            angles="xy",
            scale_units="xy",
            scale=1,
            width=0.003,
            color=_WAYS[way],
        )

    def draw_arrival(self, axes: Any) -> None:
        """Draws when each block of the result's rows is written."""
        written = self.arrival
        ranks, channels, steps = self.owners.shape
        axes.imshow(written, aspect="auto", cmap="viridis_r", interpolation="none")
        for block, rank in np.ndindex(
            *(written.shape if written.size <= _MOST_NUMBERS else (0, 0))
        ):
            step = written[block, rank]
            color = "white" if step > steps / 2 else "black"
            options: dict[str, Any] = dict(ha="center", va="center", fontsize=7)
            axes.text(rank, block, step, color=color, **options)
        names = _names(ranks, channels)
        _ticks(axes.xaxis, range(ranks), "rank")
        _ticks(axes.yaxis, names, "rows of the result, by their rank")
        axes.set_title(_WRITTEN, loc="left", fontsize="medium")

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the image."""
        ranks, channels, steps = self.owners.shape
        return min(5 + 0.8 * steps, 24), min(2 + 0.3 * ranks * channels, 24)

    def fill(self, figure: Any) -> None:
        """Draws the time line, and beside it when rows are written."""
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        self.draw(left)
        self.draw_arrival(right)


def ring_picture(
    ranks: int, *, bidirectional: bool = False, channels: int = 1
) -> RingPicture:
    """The time line of a product of gathered rows with a matrix, computed by a ring.

    Args:
        ranks: devices of the ring.
        bidirectional: whether chunks travel both ways.
        channels: rings side by side, each with its share of every rank's rows.

    Returns:
        The picture.

    Raises:
        ValueError: more ranks or channels than a picture can show, or none.

    Example:
        >>> print(ring_picture(3))
        ring of 3 ranks, one way: 2 permutes
        → ← while this chunk is used, one travels to the next rank, to the one before
        <BLANKLINE>
           step  0   1   2
        rank 0   0→  2→  1
        rank 1   1→  0→  2
        rank 2   2→  1→  0
        <BLANKLINE>
        the step that writes each block of rows
           rank  0   1   2
        rows 0   0   1   2
        rows 1   2   0   1
        rows 2   1   2   0
    """
    for name, given, most in (
        ("ranks", ranks, MOST_RANKS),
        ("channels", channels, MOST_CHANNELS),
    ):
        if not 1 <= given <= most:
            raise ValueError(f"draw: {name} must be in [1, {most}], got {given}")
    per_channel = [_owners(ranks, c, bidirectional) for c in range(channels)]
    permutes = _permutes(ranks, bidirectional)
    words = f"ring of {ranks} ranks, {'both ways' if bidirectional else 'one way'}"
    words += f", {channels} channels" * (channels > 1)
    count = channels * len(permutes)
    words += f": {count} permute{'s' * (count != 1)}"
    return RingPicture(words, np.stack(per_channel, 1), permutes)


def _owners(ranks: int, channel: int, bidirectional: bool) -> np.ndarray:
    """`[ranks, steps]`: the rank that the ring names, of the chunk that it brings."""
    options: dict[str, Any] = dict(channel=channel, bidirectional=bidirectional)

    def visits(own):
        arrived = arriving(own, _RING, **options)
        return jnp.stack([jnp.asarray(rank, jnp.int32) for rank, _ in arrived])

    ids = jnp.arange(ranks, dtype=jnp.int32)
    return np.asarray(jax.vmap(visits, axis_name=_RING.axis)(ids))


def _permutes(ranks: int, bidirectional: bool) -> tuple[Permute, ...]:
    """The ring's permutes, where they stand in its trace between the uses of chunks."""

    def visits(own):
        arrived = arriving(own, _RING, bidirectional=bidirectional)
        return [checkpoint_name(chunk, "used") for _, chunk in arrived]

    spec = PartitionSpec(_RING.axis)
    mesh = AbstractMesh((ranks,), (str(_RING.axis),), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(visits, mesh=mesh, in_specs=spec, out_specs=spec)
    (inner,) = jax.make_jaxpr(mapped)(jnp.zeros(ranks, jnp.float32)).eqns
    sent, used, step = {}, {}, 0
    for eqn in inner.params["jaxpr"].eqns:
        if eqn.primitive.name == "ppermute":
            (_, target), *_ = sorted(eqn.params["perm"])
            sent[eqn.outvars[0]] = step, 1 if target == 1 % ranks else -1
        elif eqn.primitive.name == "name":
            used[eqn.invars[0]] = step
            step += 1
    return tuple(Permute(at, used[x], way) for x, (at, way) in sent.items())


def _names(ranks: int, channels: int) -> list[str]:
    """Each rank, with channels its channels."""
    wide = len(str(ranks - 1))
    if channels == 1:
        return [f"{rank:>{wide}}" for rank in range(ranks)]
    pairs = np.ndindex(ranks, channels)
    return [f"{rank:>{wide}}, channel {channel}" for rank, channel in pairs]


def _numbers(word: str, numbers: range, margin: int, wide: int):
    from rich.text import Text

    cells = "".join(str(n).rjust(wide - 2) + "  " for n in numbers)
    return Text(f"{word.rjust(margin - 1)} {cells}", "dim")


def _offsets(channels: int) -> np.ndarray:
    """Where the channels stand in the row of their rank."""
    return (np.arange(channels) - (channels - 1) / 2) * 0.6 / channels


def _ticks(axis: Any, names: Any, label: str) -> None:
    step = -(-len(names) // 32)
    axis.set_ticks(range(0, len(names), step), list(names)[::step], fontsize=7)
    axis.set_label_text(label)


def _color(rank: int, ranks: int) -> str:
    """Neighbours have neighbouring hues."""
    red, green, blue = colorsys.hsv_to_rgb(rank / ranks, 0.45, 0.9)
    return "#" + "".join(f"{round(255 * x):02x}" for x in (red, green, blue))
