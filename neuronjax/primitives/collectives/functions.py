"""Gathers and reductions over a ring of ranks, with a product or without."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jaxtyping import Array, Float, Shaped

from neuronjax.kernels.shard_common import consecutive_groups
from neuronjax.primitives import contracts
from neuronjax.primitives.collectives import emitters
from neuronjax.primitives.collectives.cores import joined, own_rows
from neuronjax.primitives.collectives.facts import (
    operands_of,
    plan_of,
    ring_facts,
    scatters,
)
from neuronjax.primitives.collectives.plan import RingPlan


@contracts.contracted(ring_facts)
def allgather_compute_matmul(
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    tp_degree: int,
    num_groups: int,
    force_hbm_cc: bool = False,
    *,
    axis: str = "tensor",
    lnc_axis: str | None = None,
    raw: bool = False,
    bidirectional: bool = False,
    nc_version: int = 3,
) -> Float[Array, "all_rows d_out"] | Float[Array, "ranks _ _ _ d_out"]:
    r"""Gathers the rows of all ranks and multiplies them, row block by row block.

    $$\mathrm{result} = \begin{bmatrix} \mathrm{lhs}_0 \\ \vdots \\
      \mathrm{lhs}_{tp-1} \end{bmatrix} \mathrm{rhs}$$

    A permute ring inside `CollectiveMatmul`: each block is multiplied as it comes by,
    while the next is on its way. Forward, a core's program has `channels * (tp - 1)`
    collective permutes and no all-gather; no rank holds the gathered rows. What it
    holds besides the result is about `2 m (K + N)` elements, with `bidirectional` up to
    2.4 times as much, where a gather has `tp m K`: on 8 ranks, one way, at most 0.4 of
    it where `N` is at most `0.6 K`, and more where `N` is over `3 K`. Call it inside
    `shard_map` over `axis`: every argument is what one rank holds.

    Args:
        lhs: `[m, K]`, this rank's rows, whole on each of its cores.
        rhs: `[K, N]`, this rank's columns, likewise.
        tp_degree: ranks of a ring; any number.
        num_groups: how many rings `axis` has: group `g` is the ranks `g * tp_degree` to
            `(g + 1) * tp_degree - 1`.
        force_hbm_cc: what travels goes through HBM. The path is chosen by
            `sharding.ring_plan` and gives the order of the raw axes, nothing else.
        axis: the mesh axis of the ranks, `tp_degree * num_groups` devices. One rank
            alone needs no mesh.
        lnc_axis: the mesh axis of a rank's cores. Each computes its share of the rows.
            Unless `raw`, `shard_map` must check its varying axes, as is its default.
        raw: return the kernel's own axes, each core its part, unjoined.
        bidirectional: chunks travel both ways round, half as far, in as many permutes.
        nc_version: the core's generation, which the number of channels depends on.

    Returns:
        `[tp * m, N]` in the dtype of `lhs`, accumulated in float32; rows in the order
        of the ranks, on every core. Cores exchange their parts in one all-gather over
        `lnc_axis`. With `raw` no exchange, and five axes, `[tp, L, C, m / (L C), N]` on
        the SBUF path, `[tp, C, L, m / (L C), N]` on the HBM path, of which a core of
        several holds its part of `L`. The gradient of `lhs` is `MatmulReduceScatter`,
        that of `rhs` `CollectiveMatmulBwd`, by a ring of the same rows, which XLA may
        merge with this one.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (an even `tp_degree`, one direction) are reported by `neuronjax.can`
            and do not hold here.

    Source:
        aws-neuron/nki-library, `allgather_compute_matmul` of the experimental
        collectives; Wang et al. 2023, Overlap communication with dependent computation
        via decomposition, https://doi.org/10.1145/3567955.3567959.

    Example:
        >>> import jax.numpy as jnp
        >>> lhs, rhs = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.eye(2)
        >>> allgather_compute_matmul(lhs, rhs, tp_degree=1, num_groups=1).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    call = SimpleNamespace(function="allgather_compute_matmul", **locals())
    return _on_ring(call, emitters.collective_matmul_kernel)


@contracts.contracted(ring_facts)
def matmul_reduce_scatter(
    lhs: Float[Array, "all_rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    tp_degree: int,
    num_groups: int,
    force_hbm_cc: bool = False,
    *,
    axis: str = "tensor",
    lnc_axis: str | None = None,
    raw: bool = False,
    bidirectional: bool = False,
    nc_version: int = 3,
) -> Float[Array, "rows d_out"] | Float[Array, "_ _ _ d_out"]:
    r"""Multiplies, adds over the ranks, and leaves each rank its own rows.

    $$\mathrm{result}_r = \left( \sum_s \mathrm{lhs}_s \, \mathrm{rhs}_s \right)_{
      \mathrm{rows\ of\ } r}$$

    The mirror of `allgather_compute_matmul`, and the gradient of its `lhs`: sums travel
    round the ring to their owner and take up one product at each rank. Forward, a
    core's program has `channels * (tp - 1)` collective permutes, no reduce-scatter and
    no all-reduce. Call it inside `shard_map` over `axis`.

    Args:
        lhs: `[tp_degree * m, K]`, this rank's columns, whole on each of its cores.
        rhs: `[K, N]`, this rank's rows, likewise.
        tp_degree: as in `allgather_compute_matmul`.
        num_groups: likewise.
        force_hbm_cc: likewise.
        axis: likewise.
        lnc_axis: likewise.
        raw: likewise.
        bidirectional: sums travel both ways round, half as far.
        nc_version: as in `allgather_compute_matmul`.

    Returns:
        `[m, N]` in the dtype of `lhs`, on every core; sums travel in float32 and are
        rounded once. With `raw` `[L, C, m / (L C), N]` on the SBUF path, `[C, L, ...]`
        on the HBM path, of which a core of several holds its part of `L`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits are those of `allgather_compute_matmul`.

    Source:
        As `allgather_compute_matmul`: its transpose.

    Example:
        >>> import jax.numpy as jnp
        >>> lhs, rhs = jnp.array([[1.0, 2.0]]), jnp.ones((2, 1))
        >>> matmul_reduce_scatter(lhs, rhs, tp_degree=1, num_groups=1).tolist()
        [[3.0]]
    """
    call = SimpleNamespace(function="matmul_reduce_scatter", **locals())
    return _on_ring(call, emitters.matmul_reduce_scatter_kernel)


@contracts.contracted(ring_facts)
def fine_grained_allgather(
    lhs: Shaped[Array, "rows d_in"],
    tp_degree: int,
    num_groups: int = 1,
    force_hbm_cc: bool = False,
    *,
    axis: str = "tensor",
    lnc_axis: str | None = None,
    raw: bool = False,
    bidirectional: bool = False,
    nc_version: int = 3,
) -> Shaped[Array, "all_rows d_in"] | Shaped[Array, "ranks _ _ _ d_in"]:
    r"""Gathers the rows of all ranks, chunk by chunk: a copy.

    $$\mathrm{result} = \begin{bmatrix} \mathrm{lhs}_0 \\ \vdots \\
      \mathrm{lhs}_{tp-1} \end{bmatrix}$$

    The ring of `allgather_compute_matmul` without its product: `channels * (tp - 1)`
    collective permutes. Call it inside `shard_map` over `axis`.

    Args:
        lhs: `[m, K]`, this rank's rows, whole on each of its cores; any dtype.
        tp_degree: as in `allgather_compute_matmul`.
        num_groups: likewise.
        force_hbm_cc: likewise.
        axis: likewise.
        lnc_axis: likewise.
        raw: likewise.
        bidirectional: likewise.
        nc_version: likewise.

    Returns:
        `[tp * m, K]` in the dtype of `lhs`, the same on all ranks of a group, though
        JAX types what came round a ring as varying over `axis`. With `raw` the axes of
        `allgather_compute_matmul`. The gradient is `FineGrainedReduceScatter`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits are those of `allgather_compute_matmul`.

    Source:
        aws-neuron/nki-library, `fine_grained_allgather` of the experimental
        collectives.

    Example:
        >>> import jax.numpy as jnp
        >>> fine_grained_allgather(jnp.array([[1.0, 2.0]]), tp_degree=1).tolist()
        [[1.0, 2.0]]
    """
    call = SimpleNamespace(function="fine_grained_allgather", **locals())
    return _on_ring(call, emitters.fine_grained_all_gather_kernel)


@contracts.contracted(ring_facts)
def fine_grained_reduce_scatter(
    lhs: Float[Array, "all_rows d_in"],
    tp_degree: int,
    num_groups: int = 1,
    force_hbm_cc: bool = False,
    *,
    axis: str = "tensor",
    lnc_axis: str | None = None,
    raw: bool = False,
    bidirectional: bool = False,
    nc_version: int = 3,
) -> Float[Array, "rows d_in"] | Float[Array, "_ _ _ d_in"]:
    r"""Adds over the ranks and leaves each rank its own rows.

    $$\mathrm{result}_r = \left( \sum_s \mathrm{lhs}_s \right)_{
      \mathrm{rows\ of\ } r}$$

    The mirror of `fine_grained_allgather`, and its gradient: `channels * (tp - 1)`
    collective permutes. Call it inside `shard_map` over `axis`.

    Args:
        lhs: `[tp_degree * m, K]`, whole on each core of this rank.
        tp_degree: as in `allgather_compute_matmul`.
        num_groups: likewise.
        force_hbm_cc: likewise.
        axis: likewise.
        lnc_axis: likewise.
        raw: likewise.
        bidirectional: sums travel both ways round, half as far.
        nc_version: as in `allgather_compute_matmul`.

    Returns:
        `[m, K]` in the dtype of `lhs`, on every core; sums travel in float32 and are
        rounded once. With `raw` the axes of `matmul_reduce_scatter`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits are those of `allgather_compute_matmul`.

    Source:
        As `fine_grained_allgather`: its transpose.

    Example:
        >>> import jax.numpy as jnp
        >>> fine_grained_reduce_scatter(jnp.array([[1.0, 2.0]]), tp_degree=1).tolist()
        [[1.0, 2.0]]
    """
    call = SimpleNamespace(function="fine_grained_reduce_scatter", **locals())
    return _on_ring(call, emitters.fine_grained_reduce_scatter_kernel)


def _on_ring(call: SimpleNamespace, emitter: Callable[..., Array]) -> Array:
    """What an emitter makes of a core's own rows, joined."""
    plan, ranks = plan_of(call), (int(call.tp_degree),)
    # Rows of all ranks are given to a sum, and come out of a gather.
    given, made = (ranks, ()) if scatters(call) else ((), ranks)
    lhs, *rhs = operands_of(call).values()
    own = own_rows(lhs, plan, call.lnc_axis, given)
    out = emitter(own, *rhs, **_ring(call, plan))
    return joined(out, plan, call.lnc_axis, call.raw, made)


def _ring(call: SimpleNamespace, plan: RingPlan) -> dict[str, Any]:
    """How the emitter is told the ring."""
    ranks, count = int(call.tp_degree), int(call.num_groups)
    return dict(
        axis=None if ranks * count == 1 else call.axis,
        groups=None if count == 1 else consecutive_groups(ranks, count),
        channels=plan.channels,
        bidirectional=bool(call.bidirectional),
        path=plan.path,
    )
