"""How the cores of a rank share its rows, and join what each made of its own."""

import jax
from jax import lax

from neuronjax.primitives.collectives.plan import RingPlan


def own_rows(
    x: jax.Array, plan: RingPlan, lnc_axis: str | None, lead: tuple[int, ...] = ()
) -> jax.Array:
    """This core's rows of `x`, which both cores of a rank hold whole.

    Args:
        x: `[*lead * cores * channels * rows, width]`.
        plan: which rows they are.
        lnc_axis: the mesh axis of the cores; None for one core, which has them all.
        lead: the axes of the ranks in front of a rank's rows.
    """
    if lnc_axis is None:
        return x
    width = x.shape[-1]
    view = x.reshape(*lead, *plan.view, width)
    core, axis = lax.axis_index(lnc_axis), len(lead) + plan.core_axis
    own = lax.dynamic_index_in_dim(view, core, axis, keepdims=False)
    return lax.collapse(own, 0, -1)


def joined(
    x: jax.Array,
    plan: RingPlan,
    lnc_axis: str | None,
    raw: bool,
    lead: tuple[int, ...] = (),
) -> jax.Array:
    """The rows of every core, on every core; `raw` keeps this core's own, unjoined.

    One all-gather over `lnc_axis` joins them; its result is typed alike on all cores.

    Args:
        x: `[*lead * channels * rows, width]`, what this core has.
        plan: which rows they are.
        lnc_axis: the mesh axis of the cores; None for one core.
        raw: the kernel's own axes, `[*lead, *plan.view, width]` with one core.
        lead: the axes of the ranks in front of a rank's rows.
    """
    axis, width = len(lead) + plan.core_axis, x.shape[-1]
    parts = x.reshape(*lead, plan.channels, plan.rows, width)
    parts = lax.expand_dims(parts, (axis,))
    if raw:
        return parts
    if lnc_axis is not None:
        parts = lax.all_gather(parts, lnc_axis, axis=axis, tiled=True, to="invarying")
    return lax.collapse(parts, 0, -1)
