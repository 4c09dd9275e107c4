"""A convolution as the matmuls of its K-replication plan, and their transposes.

The windows of a pass are its rows: the input, shifted by a tap, above the input shifted
by the next one. The filters of these taps lie above each other in the same way, and one
matmul contracts both at once. Passes are added, as the accumulator of a column adds
them.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.conv.plan import Pass, ReplicationPlan, replication_plan
from neuronjax.kernels.conv.window import Window
from neuronjax.kernels.shard_common import contract


def stacked_fwd(
    x: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    *,
    window: Window,
    cores: int,
) -> Float[Array, "batch d_out out"]:
    """The sums of the convolution: each core its columns, one matmul a pass."""
    plan = replication_plan(*filters.shape, cores=cores)
    windows = stacked_windows(x, plan, window)
    outs = []
    for weights in stacked_filters(filters, plan):
        pairs = zip(weights, windows, strict=True)
        products = [jnp.einsum("ro,brl->bol", w, rows) for w, rows in pairs]
        outs.append(functools.reduce(operator.add, products))
    return jnp.concatenate(outs, 1)


def stacked_bwd(
    d_sums: Float[Array, "batch d_out out"],
    x: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    *,
    window: Window,
    cores: int,
) -> tuple[Float[Array, "batch d_in length"], Float[Array, "taps d_in d_out"]]:
    """The cotangents of `x` and `filters`: the transposes of the matmuls, added."""
    plan = replication_plan(*filters.shape, cores=cores)
    windows, pull_x = jax.vjp(lambda x: stacked_windows(x, plan, window), x)
    weights, pull_filters = jax.vjp(lambda w: stacked_filters(w, plan), filters)
    d_weights, d_windows = [], [jnp.zeros_like(rows) for rows in windows]
    for core, bands in zip(weights, _shares(plan), strict=True):
        d_own = d_sums[:, slice(*bands)]
        d_weights.append(
            [
                contract("brl,bol->ro", rows, d_own, like=w)
                for rows, w in zip(windows, core, strict=True)
            ]
        )
        for i, w in enumerate(core):
            d_windows[i] += contract("ro,bol->brl", w, d_own, like=windows[i])
    return pull_x(d_windows)[0], pull_filters(d_weights)[0]


def stacked_windows(
    x: Float[Array, "batch d_in length"], plan: ReplicationPlan, window: Window
) -> list[Array]:
    """For each pass the rows that it contracts, `[batch, rows, out]`."""
    padded, results = window.padded(x), window.results(x.shape[-1], plan.taps)

    def rows(one: Pass) -> Array:
        channels = padded[:, one.first_channel : one.first_channel + one.channels]
        taps = range(one.first_tap, one.first_tap + one.taps)
        bands = [window.tap(channels, tap, results) for tap in taps]
        zeros = ((0, 0), (0, one.gap), (0, 0))
        return jnp.concatenate([jnp.pad(band, zeros) for band in bands], 1)

    return [rows(one) for one in plan.passes]


def stacked_filters(
    filters: Float[Array, "taps d_in d_out"], plan: ReplicationPlan
) -> list[list[Array]]:
    """For each core, and each pass, the weights on these rows, `[rows, columns]`."""

    def rows(one: Pass, columns: tuple[int, int]) -> Array:
        taps = filters[
            one.first_tap : one.first_tap + one.taps,
            one.first_channel : one.first_channel + one.channels,
            slice(*columns),
        ]
        taps = jnp.pad(taps, ((0, 0), (0, one.gap), (0, 0)))
        return taps.reshape(one.rows, taps.shape[-1])

    shares = _shares(plan)
    return [[rows(one, columns) for one in plan.passes] for columns in shares]


def _shares(plan: ReplicationPlan) -> list[tuple[int, int]]:
    """The columns of each core that has any, `(first, end)`: no band needs another."""
    return [(bands[0][0], sum(bands[-1])) for bands in plan.columns if bands]
