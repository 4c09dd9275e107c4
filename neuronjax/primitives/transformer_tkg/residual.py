"""How the parts of a half layer, spread over ranks and cores, join the residual.

Ranks hold heads and intermediate columns of their own: what they compute is a part of a
sum. The two cores of a rank (`lnc`) each bring their own half of `H`.

    HBM path    h + all_reduce(exchange(part))      all of H over the ranks
    SBUF path   h + exchange(all_reduce(part))      half of H over the ranks
"""

from typing import NamedTuple

import jax
from jax import lax

from neuronjax.kernels.shard_common import Group, all_reduce


class Links(NamedTuple):
    """Who takes part in a layer.

    Attributes:
        ranks: the group whose parts are summed; its axis is `None` for one rank.
        lnc: the mesh axis of the cores of a rank; `None` for one core.
        in_sbuf: sum each core's half first, and exchange the halves then.
    """

    ranks: Group = Group()
    lnc: str | None = None
    in_sbuf: bool = False


def added(h: jax.Array, part: jax.Array, links: Links) -> jax.Array:
    """`h`, `[batch, seq, d_model]`, and the sum of all ranks' parts.

    `part` is `[batch*seq, d_model]`, with two cores a core's own half of its columns.
    Parts are added up over ranks and cores in their own dtype, what the macros round
    to, and then in that of `h`. The sum is typed alike on all ranks of a whole axis.
    """
    if links.in_sbuf:
        whole = _exchanged(all_reduce(part, links.ranks), links)
    else:
        whole = all_reduce(_exchanged(part, links), links.ranks)
    return h + whole.reshape(h.shape).astype(h.dtype)


def own_half(part: jax.Array, links: Links) -> jax.Array:
    """The sum of both cores' parts: `[tokens, d_model]` to a core's own half of it."""
    if links.lnc is None:
        return part
    return lax.psum_scatter(part, links.lnc, scatter_dimension=1, tiled=True)


def _exchanged(half: jax.Array, links: Links) -> jax.Array:
    """Both cores' halves side by side, typed alike on both."""
    if links.lnc is None:
        return half
    return lax.all_gather(half, links.lnc, axis=1, tiled=True, to="invarying")
