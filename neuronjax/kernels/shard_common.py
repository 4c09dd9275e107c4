"""What leaves share: casts of fresh arrays, and contractions that any mesh can type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType


def varying(x: jax.Array) -> frozenset:
    """The mesh axes over which `x` differs between devices; empty outside `shard_map`."""
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


def accumulator(*dtypes: np.dtype) -> np.dtype:
    """The dtype of sums over arrays of `dtypes`: at least float32.

    NumPy's lattice, because JAX's refuses to promote where promotion is strict.
    """
    return functools.reduce(np.promote_types, dtypes, np.dtype(np.float32))


def contract(spec: str, *arrays: jax.Array, like: jax.Array) -> jax.Array:
    """`jnp.einsum` with wide accumulation, laid out like `like` on an explicit mesh.

    A weight gradient sums over the batch. When an explicit mesh splits the batch, the
    result's sharding is a choice that has to be named; elsewhere this is an einsum.
    """
    acc = accumulator(like.dtype)
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    out_sharding = sharding if explicit else None
    return jnp.einsum(
        spec, *arrays, preferred_element_type=acc, out_sharding=out_sharding
    )
