"""Linear layers over the ranks of a mesh axis, each product inside a ring."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import require_dtypes, require_ring, require_sizes
from neuronjax.primitives.collectives import (
    allgather_compute_matmul,
    matmul_reduce_scatter,
)
from neuronjax.primitives.mesh_axes import bound_size


class _Ring(nnx.Module):
    """A weight whose product with rows is a ring over the ranks of a mesh axis."""

    _divides_columns: bool  # of the weight, or its rows

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        axis: str = "tensor",
        num_groups: int = 1,
        lnc_axis: str | None = None,
        bidirectional: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        layer = type(self).__name__
        require_sizes(layer, d_in=d_in, d_out=d_out, num_groups=num_groups)
        require_ring(layer, axis, lnc_axis)
        require_dtypes(layer, dtype, param_dtype)
        init = nnx.initializers.lecun_normal()
        names = (None, axis) if self._divides_columns else (axis, None)
        self.kernel = parameter(init, (d_in, d_out), names, rngs, param_dtype)
        self.axis, self.num_groups, self.lnc_axis = axis, num_groups, lnc_axis
        self.bidirectional, self.dtype = bidirectional, dtype

    def _product(self, function: Any, x: Array) -> Array:
        """`function(x, kernel)` over the ring, mapped over leading axes."""
        x = x if self.dtype is None else x.astype(self.dtype)
        kernel, size = at_dtype(self.kernel, self.dtype), bound_size(self.axis)
        ring: dict[str, Any] = dict(tp_degree=1, num_groups=1)
        if size is not None:
            ring = dict(
                tp_degree=size // self.num_groups,
                num_groups=self.num_groups,
                lnc_axis=self.lnc_axis,
                bidirectional=self.bidirectional,
            )

        def call(rows: Array) -> Array:
            return function(rows, kernel, axis=self.axis, **ring)

        for _ in range(x.ndim - 2):
            call = jax.vmap(call)
        return call(x)


class ColumnParallel(_Ring):
    r"""The twin of `neuronjax.allgather_compute_matmul`: rows gathered on their way.

    $$y = \begin{bmatrix} x_0 \\ \vdots \\ x_{tp-1} \end{bmatrix} W_r$$

    Inside `shard_map` over `axis`: each rank has its own rows of the input, and of
    `kernel [d_in, d_out]` the columns that the partition names `(None, axis)` give it;
    it returns all rows of these columns. Outside of it one rank has all: the product
    alone. `RowParallel` is the way back.

    Args:
        d_in: width of the input.
        d_out: width of the output, of all ranks together.
        axis: the mesh axis of the ranks.
        num_groups: how many rings the axis has.
        lnc_axis: the mesh axis of a rank's cores.
        bidirectional: rows travel both ways round, half as far.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameter.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Source:
        Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.3;
        Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2, for
        rows that are divided too.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> layer = ColumnParallel(4, 6, rngs=nnx.Rngs(0))
        >>> graph, state = nnx.split(layer)
        >>> mesh = jax.make_mesh(
        ...     (1,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:1])
        >>> call = jax.shard_map(
        ...     lambda state, x: nnx.merge(graph, state)(x), mesh=mesh,
        ...     in_specs=(nnx.get_partition_spec(state), P("tensor")),
        ...     out_specs=P(None, "tensor"))
        >>> jax.jit(call)(state, jnp.ones((8, 4))).shape
        (8, 6)
    """

    _divides_columns = True

    def __call__(
        self, x: Float[Array, "*batch rows d_in"]
    ) -> Float[Array, "*batch all_rows columns"]:
        """All ranks' rows of `x` times this rank's columns."""
        return self._product(allgather_compute_matmul, x)


class RowParallel(_Ring):
    r"""The twin of `neuronjax.matmul_reduce_scatter`: sums travel to their owner.

    $$y_r = \left( \sum_s x_s W_s \right)_{\mathrm{rows\ of\ } r}$$

    Inside `shard_map` over `axis`: each rank has its own columns of the input, all
    rows, and of `kernel [d_in, d_out]` the rows that the partition names
    `(axis, None)` give it; it returns its own rows of the sum. Outside of it one rank
    has all: the product alone.

    Args:
        d_in: width of the input, of all ranks together.
        d_out: width of the output.
        axis: the mesh axis of the ranks.
        num_groups: how many rings the axis has.
        lnc_axis: the mesh axis of a rank's cores.
        bidirectional: sums travel both ways round, half as far.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameter.
        rngs: where the initial values come from.

    Raises:
        ValueError: a setting is out of range; when called, what the function refuses.

    Source:
        As `ColumnParallel`: its transpose.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> RowParallel(6, 4, rngs=nnx.Rngs(0))(jnp.ones((8, 6))).shape
        (8, 4)
    """

    _divides_columns = False

    def __call__(
        self, x: Float[Array, "*batch all_rows columns"]
    ) -> Float[Array, "*batch rows d_out"]:
        """This rank's rows of what all ranks' products add up to."""
        return self._product(matmul_reduce_scatter, x)
