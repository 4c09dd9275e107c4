"""Products over a mesh whose wire traffic is a ring: gathered rows, scattered sums."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.primitives.collectives import (
    allgather_compute_matmul,
    matmul_reduce_scatter,
)
from neuronjax.primitives.kinds import described
from neuronjax.sharding.mesh import laid, require_axes


def sharded_allgather_matmul(
    mesh: Mesh,
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    *,
    axis: str = "tensor",
    lnc: str | None = None,
    force_hbm_cc: bool = False,
    bidirectional: bool = False,
) -> Float[Array, "rows d_out"]:
    """`lhs @ rhs`, with the rows of `lhs` and the columns of `rhs` over a mesh axis.

    What crosses the wire, forward: `channels * (tp - 1)` collective permutes of a
    rank's rows, or of its core's share of them, and no all-gather. Backward as many for
    the gradient of `lhs`, whose sums travel in float32, and as many for that of `rhs`,
    by the ring of the forward, which XLA may share. With `lnc` also one all-gather of
    the result over the cores of a rank.

    Args:
        mesh: the devices.
        lhs: `[M, K]`, split by rows.
        rhs: `[K, N]`, split by columns.
        axis: the mesh axis that splits them, of `tp` devices.
        lnc: the mesh axis of a rank's cores, which share its rows.
        force_hbm_cc: as in `allgather_compute_matmul`.
        bidirectional: likewise.

    Returns:
        `[M, N]` in the dtype of `lhs`, split by columns.

    Raises:
        ValueError: `mesh` is none or lacks an axis, an operand is no array, `M` or
            `N` is no multiple of the devices, or an argument breaks a rule of
            `allgather_compute_matmul`.

    Source:
        aws-neuron/nki-library, `allgather_compute_matmul`.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> sharded_allgather_matmul(make_mesh(tensor=1), jnp.ones((2, 3)),
        ...     jnp.ones((3, 1))).tolist()
        [[3.0], [3.0]]
    """
    options = dict(force_hbm_cc=force_hbm_cc, bidirectional=bidirectional)
    specs = P(axis), P(None, axis)
    ring = _Ring("sharded_allgather_matmul", mesh, axis, lnc, options)
    return ring(allgather_compute_matmul, (lhs, rhs), specs, P(None, axis))


def sharded_matmul_reduce_scatter(
    mesh: Mesh,
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "d_in d_out"],
    *,
    axis: str = "tensor",
    lnc: str | None = None,
    force_hbm_cc: bool = False,
    bidirectional: bool = False,
) -> Float[Array, "rows d_out"]:
    """`lhs @ rhs`, with what they contract over a mesh axis, split by rows after it.

    The mirror of `sharded_allgather_matmul`. What crosses the wire, forward:
    `channels * (tp - 1)` collective permutes of float32 sums of a rank's rows of the
    result, or of its core's share, no reduce-scatter and no all-reduce. Backward as
    many permutes of the cotangent's rows, which both gradients may share. With `lnc`
    also one all-gather of the result over the cores of a rank.

    Args:
        mesh: the devices.
        lhs: `[M, K]`, split by columns.
        rhs: `[K, N]`, split by rows.
        axis: the mesh axis that splits them, of `tp` devices.
        lnc: the mesh axis of a rank's cores, which share its rows of the result.
        force_hbm_cc: as in `matmul_reduce_scatter`.
        bidirectional: likewise.

    Returns:
        `[M, N]` in the dtype of `lhs`, split by rows.

    Raises:
        ValueError: `mesh` is none or lacks an axis, an operand is no array, `M` or
            `K` is no multiple of the devices, or an argument breaks a rule of
            `matmul_reduce_scatter`.

    Source:
        aws-neuron/nki-library, `allgather_compute_matmul`: its transpose.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> sharded_matmul_reduce_scatter(make_mesh(tensor=1), jnp.ones((2, 3)),
        ...     jnp.ones((3, 1))).tolist()
        [[3.0], [3.0]]
    """
    options = dict(force_hbm_cc=force_hbm_cc, bidirectional=bidirectional)
    specs = P(None, axis), P(axis)
    ring = _Ring("sharded_matmul_reduce_scatter", mesh, axis, lnc, options)
    return ring(matmul_reduce_scatter, (lhs, rhs), specs, P(axis))


class _Ring:
    """A function over a ring, of arrays that a mesh axis splits."""

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        axis: str,
        lnc: str | None,
        options: dict[str, Any],
    ):
        _require_mesh(name, mesh, axis)
        require_axes(name, mesh, axis=axis, lnc=lnc)
        self.name, self.mesh, self.axis = name, mesh, axis
        self.options = dict(axis=axis, lnc_axis=lnc, **options)

    def __call__(
        self, function: Callable[..., Array], arrays: tuple, specs: tuple, out: P
    ) -> Array:
        """`function` of each rank's parts."""
        ranks = self.mesh.shape[self.axis]
        self._require_even(arrays, specs, ranks)

        def local(lhs: Array, rhs: Array) -> Array:
            return function(lhs, rhs, ranks, 1, **self.options)

        split = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out)
        return split(*laid(self.mesh, arrays, specs))

    def _require_even(self, arrays: tuple, specs: tuple, ranks: int) -> None:
        for name, x, spec in zip(("lhs", "rhs"), arrays, specs, strict=True):
            if not hasattr(x, "dtype"):
                raise ValueError(
                    f"{self.name}: {name} must be an array, got {described(x)}"
                )
            shape, dim = np.shape(x), tuple(spec).index(self.axis)
            if len(shape) != 2 or shape[dim] % ranks:
                raise ValueError(
                    f"{self.name}: {name} must have 2 axes, its axis {dim} a multiple "
                    f"of the {ranks} devices of {self.axis!r}, got shape {shape}"
                )


def _require_mesh(function: str, mesh: Any, axis: Any) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"{function}: mesh must be a jax.sharding.Mesh, got {described(mesh)}"
        )
    if not isinstance(axis, str):
        raise ValueError(
            f"{function}: axis must be the name of a mesh axis, got {axis!r}"
        )
