"""The K-replication plan of a convolution, for a user to read."""

from neuronjax.kernels.conv.plan import ReplicationPlan, replication_plan
from neuronjax.primitives.kinds import described, is_count


def conv1d_plan(
    taps: int, channels_in: int, channels_out: int = 128, *, cores: int = 1
) -> ReplicationPlan:
    """How the array computes `conv1d`: which taps and channels share one pass.

    The array contracts over 128 rows. Up to 32 channels leave room for four taps, each
    on 32 rows of its own, up to 64 for two; rows without a channel hold zeros. More
    than 128 channels come in tiles, each with a number of taps of its own. The passes
    of a band of at most 128 output channels are added up in its accumulator. Cores
    share the output channels, so that none waits for another.

    `emit.conv1d_kernel(form="stacked")` multiplies as the plan says, and `neuronjax
    draw conv` shows it.

    Args:
        taps: `K` of the filter.
        channels_in: `C_in`.
        channels_out: `C_out`.
        cores: cores that share the output channels; `lnc_shard` is two.

    Returns:
        A `ReplicationPlan`: `passes`, the `columns` of each core, how many `matmuls`
        these are for one tile of positions, which part of the rows is `occupied`, and
        the `layout()` of every row.

    Raises:
        ValueError: a size is not a positive integer.

    Source:
        aws-neuron/nki-library, `conv1d` of its experimental kernels.

    Example:
        >>> plan = conv1d_plan(taps=7, channels_in=16, channels_out=384, cores=2)
        >>> [(one.first_tap, one.taps, one.row_stride) for one in plan.passes]
        [(0, 4, 32), (4, 3, 32)]
        >>> plan.columns
        (((0, 128), (128, 64)), ((192, 128), (320, 64)))
        >>> plan.matmuls, plan.occupied
        (8, 0.4375)
    """
    sizes = dict(
        taps=taps, channels_in=channels_in, channels_out=channels_out, cores=cores
    )
    for name, value in sizes.items():
        if not is_count(value):
            raise ValueError(
                f"conv1d_plan: {name} must be a positive integer, got "
                f"{described(value)}"
            )
    return replication_plan(*map(int, sizes.values()))
