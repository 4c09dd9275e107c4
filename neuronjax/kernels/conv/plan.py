"""K-replication: which taps and channels share one pass through the array.

A pass contracts over 128 rows. Few channels leave most of them empty, so several taps
lie above each other, each on its own band of rows. The thresholds are the chip's:

| channels of the tile | taps stacked | rows from tap to tap |
|---|---|---|
| up to 32 | up to 4 | 32 |
| 33 to 64 | up to 2 | 64 |
| more | 1 | as many as channels |
"""

import dataclasses

import numpy as np

PARTITIONS = 128


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass: the taps that it stacks, of one tile of channels.

    Attributes:
        first_channel: of the tile.
        channels: of the tile, at most 128.
        first_tap: of the stack.
        taps: how many are stacked.
        row_stride: rows from a tap's first channel to the next one's.
    """

    first_channel: int
    channels: int
    first_tap: int
    taps: int
    row_stride: int

    @property
    def rows(self) -> int:
        """Rows of the array that the pass loads, those of zeros included."""
        return self.taps * self.row_stride

    @property
    def gap(self) -> int:
        """Rows of zeros behind the channels of a tap."""
        return self.row_stride - self.channels


@dataclasses.dataclass(frozen=True)
class ReplicationPlan:
    """How the array computes a convolution; a pure function of its sizes.

    Attributes:
        taps: of the filter, `K`.
        channels_in: what is summed over, beside the taps.
        channels_out: columns of the result.
        passes: what is summed, one matmul a band of columns each.
        columns: for each core its bands, `(first, size)` of at most 128 columns.
    """

    taps: int
    channels_in: int
    channels_out: int
    passes: tuple[Pass, ...]
    columns: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def matmuls(self) -> int:
        """Matmuls of all cores for one tile of positions."""
        return len(self.passes) * sum(map(len, self.columns))

    @property
    def occupied(self) -> float:
        """The part of the array's rows that hold a channel of a tap, over passes."""
        held = self.taps * self.channels_in
        return held / (PARTITIONS * len(self.passes))

    def layout(self) -> np.ndarray:
        """`[passes, 128, 2]`: the tap and the channel on each row; -1 where none is."""
        rows = np.full((len(self.passes), PARTITIONS, 2), -1, np.int64)
        for number, one in enumerate(self.passes):
            for tap, channel in np.ndindex(one.taps, one.channels):
                row = tap * one.row_stride + channel
                rows[number, row] = one.first_tap + tap, one.first_channel + channel
        return rows


def replication_plan(
    taps: int, channels_in: int, channels_out: int, cores: int = 1
) -> ReplicationPlan:
    """The plan of a convolution whose result's channels `cores` cores share."""
    passes = [
        Pass(channel, channels, tap, min(stack, taps - tap), stride)
        for channel, channels in _bands(0, channels_in)
        for stack, stride in [_stacked(channels, taps)]
        for tap in range(0, taps, stack)
    ]
    share = -(-channels_out // cores)
    columns = tuple(
        tuple(_bands(first, min(first + share, channels_out)))
        for first in (core * share for core in range(cores))
    )
    return ReplicationPlan(taps, channels_in, channels_out, tuple(passes), columns)


def _stacked(channels: int, taps: int) -> tuple[int, int]:
    """Taps that are stacked, and the rows from one to the next."""
    if channels > 64:
        return 1, channels
    stride = 32 if channels <= 32 else 64
    return min(taps, PARTITIONS // stride), stride


def _bands(first: int, end: int) -> list[tuple[int, int]]:
    """`[first, end)` in bands of at most 128: where each begins, and its size."""
    starts = range(first, end, PARTITIONS)
    return [(start, min(PARTITIONS, end - start)) for start in starts]
