"""Gathers along columns, for small tensors: one all-gather each."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from neuronjax.primitives import contracts
from neuronjax.primitives.collectives import emitters
from neuronjax.primitives.collectives.facts import columns_facts
from neuronjax.primitives.mesh_axes import group_of
from neuronjax.primitives.tile import PARTITIONS


@contracts.contracted(columns_facts)
def allgather_sb2sb(
    inp: Shaped[Array, "rows columns"],
    replica_groups: list[list[int]],
    tp_degree: int,
    *,
    axis: str = "tensor",
) -> Shaped[Array, "rows all_columns"]:
    r"""Gathers the columns of all ranks: a copy.

    $$\mathrm{out} = \begin{bmatrix} \mathrm{inp}_0 & \cdots &
      \mathrm{inp}_{tp-1} \end{bmatrix}$$

    One all-gather, `SB2SBAllGather`. Call it inside `shard_map` over `axis`.

    Args:
        inp: `[H, W]`, this rank's columns; any dtype.
        replica_groups: the ranks of each group, by their position on `axis`; the order
            in a list is that of the result.
        tp_degree: ranks of a group.
        axis: the mesh axis of the ranks, as many devices as `replica_groups` names. One
            rank alone needs no mesh.

    Returns:
        `[H, W * tp_degree]` in the dtype of `inp`, the same on all ranks of a group,
        though JAX types it as varying over `axis`. The gradient is `SB2SBAllGatherBwd`,
        one reduce-scatter.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limit (`H` 128) is reported by `neuronjax.can` and does not hold here.

    Source:
        aws-neuron/nki-library, `allgather_sb2sb` of the experimental collectives.

    Example:
        >>> import jax.numpy as jnp
        >>> allgather_sb2sb(jnp.array([[1.0, 2.0]]), [[0]], tp_degree=1).tolist()
        [[1.0, 2.0]]
    """
    return _gathered(jnp.asarray(inp), replica_groups, axis)


@contracts.contracted(columns_facts)
def allgather_sb2sb_tiled(
    inp: Shaped[Array, "rows columns"],
    replica_groups: list[list[int]],
    tp_degree: int,
    *,
    axis: str = "tensor",
    lnc_axis: str | None = None,
) -> Shaped[Array, "rows all_columns"]:
    """`allgather_sb2sb` of any number of rows, in tiles of 128 that cores may share.

    Tiles change no value. Cores that can share them evenly gather their own, and
    exchange them in one more all-gather, over `lnc_axis`; others gather all.

    Args:
        inp: `[M, W]`, this rank's columns, whole on each of its cores; any dtype.
        replica_groups: as in `allgather_sb2sb`.
        tp_degree: likewise.
        axis: likewise.
        lnc_axis: the mesh axis of a rank's cores, whose `shard_map` must check its
            varying axes, as is its default.

    Returns:
        `[M, W * tp_degree]`, as `allgather_sb2sb`, on every core.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`M` at most 128 or a multiple of it, tiles that its cores share
            evenly) are reported by `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, `allgather_sb2sb_tiled` of the experimental
        collectives.

    Example:
        >>> import jax.numpy as jnp
        >>> allgather_sb2sb_tiled(jnp.ones((256, 2)), [[0]], tp_degree=1).shape
        (256, 2)
    """
    inp, cores = jnp.asarray(inp), 1 if lnc_axis is None else lax.axis_size(lnc_axis)
    rows = inp.shape[0]
    if lnc_axis is None or rows <= PARTITIONS or rows % (PARTITIONS * cores):
        return _gathered(inp, replica_groups, axis)
    tiles = inp.reshape(cores, rows // cores, inp.shape[1])
    own = lax.dynamic_index_in_dim(tiles, lax.axis_index(lnc_axis), keepdims=False)
    out = _gathered(own, replica_groups, axis)
    return lax.all_gather(out, lnc_axis, tiled=True, to="invarying")


def _gathered(x: jax.Array, replica_groups: list[list[int]], axis: str) -> jax.Array:
    group = group_of(axis, replica_groups)
    return emitters.sb2sb_all_gather_kernel(x, axis=group.axis, groups=group.members)
