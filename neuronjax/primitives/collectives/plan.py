"""How a ring is laid out: path, channels and rows of a core, as data."""

import dataclasses
import math
from typing import Any

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import channel_count
from neuronjax.primitives.kinds import described, is_count, is_flag
from neuronjax.primitives.options import FLOATS
from neuronjax.primitives.tile import BUDGETS

MIB = 1 << 20
RHS_BYTES = 16 * MIB


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """What one ring over `ranks` ranks does; a pure function of a call's arguments.

    Attributes:
        ranks: ranks of the ring.
        cores: cores of a rank, each with its own rows and its own ring.
        channels: rings of a core, each with its own rows.
        rows: rows of one channel of one core.
        path: `"sbuf"` when what travels stays on chip, `"hbm"` otherwise. It gives the
            order of the raw result's axes and changes no value.
        rhs_on_chip: whether `rhs` stays on chip; False without one.
        buffers_bytes: two buffers of what travels through a core.
        rhs_bytes: two buffers of `rhs`; 0 without one.
        why: what decided the path.
    """

    ranks: int
    cores: int
    channels: int
    rows: int
    path: str
    rhs_on_chip: bool
    buffers_bytes: int
    rhs_bytes: int
    why: str

    @property
    def permutes(self) -> int:
        """Collective permutes of a core's program, forward."""
        return self.channels * (self.ranks - 1)

    @property
    def core_axis(self) -> int:
        """Where the cores stand in `view`."""
        return 0 if self.path == "sbuf" else 1

    @property
    def view(self) -> tuple[int, int, int]:
        """A rank's rows: `(cores, channels, rows)`, on the HBM path channels first."""
        if self.path == "sbuf":
            return self.cores, self.channels, self.rows
        return self.channels, self.cores, self.rows


def ring_plan(
    lhs: Any,
    rhs: Any | None,
    tp_degree: int,
    *,
    cores: int = 1,
    force_hbm_cc: bool = False,
    nc_version: int = 3,
    scatters: bool = False,
) -> RingPlan:
    """The plan that the functions over a ring follow; nothing is measured or stored.

    `rhs` stays on chip when two buffers of it take at most 16 MiB. What travels stays
    on chip unless `force_hbm_cc`, when two buffers of a core's part take at most what
    is left of SBUF: 24 MiB, from version 4 on 32 MiB. A rank of two cores has 2
    channels for 4, 8, 16 or 32 ranks (32 before version 3: 4), 4 for 64 or 128 and 1
    for any other number; a rank of any other number of cores has 1.

    Args:
        lhs: what a rank holds, an array or a `jax.ShapeDtypeStruct`: `[m, K]`, with
            `scatters` `[tp_degree * m, K]`.
        rhs: `[K, N]`, or None where nothing is multiplied.
        tp_degree: ranks of the ring.
        cores: cores of a rank.
        force_hbm_cc: what travels goes through HBM.
        nc_version: the core's generation.
        scatters: the plan of `matmul_reduce_scatter` and `fine_grained_reduce_scatter`:
            sums travel, in the accumulator's dtype.

    Returns:
        A `RingPlan`.

    Raises:
        ValueError: a count is not a positive integer, a flag is none, an operand has
            not two axes, `K` differs, what is added is no float, or the rows are no
            multiple of what shares them.

    Example:
        >>> import jax
        >>> lhs = jax.ShapeDtypeStruct((1024, 4096), "bfloat16")
        >>> rhs = jax.ShapeDtypeStruct((4096, 1024), "bfloat16")
        >>> plan = ring_plan(lhs, rhs, 4, cores=2)
        >>> plan.path, plan.view, plan.permutes
        ('sbuf', (2, 2, 256), 6)
        >>> plan.why
        '8 MiB of buffers fit the 8 MiB left of 24 MiB'
    """
    counts = dict(tp_degree=tp_degree, cores=cores, nc_version=nc_version)
    for name, value in counts.items():
        if not is_count(value):
            raise ValueError(
                f"ring_plan: {name} must be a positive integer, got {value!r}"
            )
    for name, value in dict(force_hbm_cc=force_hbm_cc, scatters=scatters).items():
        if not is_flag(value):
            raise ValueError(f"ring_plan: {name} must be a bool, got {value!r}")
    _require_operands(lhs, rhs, scatters)
    plan = planned(
        lhs,
        rhs,
        int(tp_degree),
        int(cores),
        force_hbm_cc=bool(force_hbm_cc),
        nc_version=int(nc_version),
        scatters=bool(scatters),
    )
    shares = math.prod((plan.cores, plan.channels, plan.ranks if scatters else 1))
    if lhs.shape[0] % shares:
        raise ValueError(
            f"ring_plan: the rows of lhs must be a multiple of {shares}, its ranks, "
            f"cores and channels, got {lhs.shape}"
        )
    return plan


def _require_operands(lhs: Any, rhs: Any | None, scatters: bool) -> None:
    for name, x in dict(lhs=lhs, rhs=rhs).items():
        if x is None and name == "rhs":
            continue
        if not hasattr(x, "dtype"):
            raise ValueError(f"ring_plan: {name} must be an array, got {described(x)}")
        if len(x.shape) != 2:
            raise ValueError(f"ring_plan: {name} must have 2 axes, got {x.shape}")
        if (scatters or rhs is not None) and x.dtype not in FLOATS:
            raise ValueError(
                f"ring_plan: {name} must be bfloat16, float16, float32 or float64, got "
                f"{x.dtype}"
            )
    if rhs is not None and lhs.shape[1] != rhs.shape[0]:
        raise ValueError(
            f"ring_plan: K of lhs {lhs.shape} and of rhs {rhs.shape} must be equal"
        )


def planned(
    lhs: Any,
    rhs: Any | None,
    ranks: int,
    cores: int,
    *,
    force_hbm_cc: bool,
    nc_version: int,
    scatters: bool,
) -> RingPlan:
    """`ring_plan` of arguments that hold; rows that do not divide are rounded down."""
    rows, width = lhs.shape
    rows, dtype = rows // (ranks if scatters else 1), lhs.dtype
    if scatters:
        dtype = accumulator(*(x.dtype for x in (lhs, rhs) if x is not None))
        width = width if rhs is None else rhs.shape[1]
    travels = 2 * (rows // cores) * width * dtype.itemsize
    rhs_bytes = 0
    if rhs is not None:
        rhs_bytes = 2 * math.prod(rhs.shape) * rhs.dtype.itemsize
    rhs_on_chip = rhs is not None and rhs_bytes <= RHS_BYTES
    sbuf = BUDGETS[f"gen{min(max(nc_version, 2), 4)}"].sbuf_bytes
    left = sbuf - (rhs_bytes if rhs_on_chip else 0)
    fits = travels <= left
    why = f"{_mib(travels)} of buffers {'fit' if fits else 'exceed'} the {_mib(left)}"
    why = "force_hbm_cc" if force_hbm_cc else f"{why} left of {_mib(sbuf)}"
    channels = channel_count(ranks, cores, nc_version)
    return RingPlan(
        ranks=ranks,
        cores=cores,
        channels=channels,
        rows=rows // (cores * channels),
        path="sbuf" if fits and not force_hbm_cc else "hbm",
        rhs_on_chip=rhs_on_chip,
        buffers_bytes=travels,
        rhs_bytes=rhs_bytes,
        why=why,
    )


def _mib(size: int) -> str:
    return f"{size / MIB:.3g} MiB"
