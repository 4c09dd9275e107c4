"""What leaves share: casts of fresh arrays, and contractions that any mesh can type."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from neuronjax.kernels.dtypes import accumulator


def varying(x: jax.Array) -> frozenset:
    """The mesh axes over which `x` differs; empty outside `shard_map`."""
    return frozenset(getattr(jax.typeof(x).mat, "varying", ()))


def uniform(*arrays: jax.Array) -> list[jax.Array]:
    """Casts arrays to the union of their varying mesh axes.

    The transpose of the cast is a sum over those axes: that makes the gradient of a
    replicated operand right. Axes are sorted so that every host builds one program.
    """
    axes = [varying(x) for x in arrays]
    union = frozenset().union(*axes)
    missing = [tuple(sorted(union - own, key=str)) for own in axes]
    return [
        lax.pcast(x, more, to="varying") if more else x
        for x, more in zip(arrays, missing, strict=True)
    ]


def contract(spec: str, *arrays: jax.Array, like: jax.Array) -> jax.Array:
    """`jnp.einsum` with wide accumulation, laid out like `like` on an explicit mesh.

    A weight gradient sums over the batch. When an explicit mesh splits the batch, the
    result's sharding is a choice that has to be named; elsewhere this is an einsum.
    """
    acc = accumulator(like.dtype, *(x.dtype for x in arrays))
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    out_sharding = sharding if explicit else None
    return jnp.einsum(
        spec, *arrays, preferred_element_type=acc, out_sharding=out_sharding
    )
