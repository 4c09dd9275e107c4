"""Casts of fresh arrays, and contractions that any mesh can type."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from neuronjax.kernels.dtypes import accumulator

Carry = TypeVar("Carry")


def varying(x: jax.Array) -> frozenset:
    """The mesh axes over which `x` differs; empty outside `shard_map`."""
    return frozenset(getattr(jax.typeof(x).mat, "varying", ()))


def uniform(
    *arrays: jax.Array, but: str | None = None, over: str | None = None
) -> list[jax.Array]:
    """Casts arrays to the union of their varying mesh axes, without the axis `but`.

    They vary over the axis `over` as well, where that is an axis of a mesh. The
    transpose of the cast is a sum over those axes: that makes the gradient of a
    replicated operand right. Axes are sorted so that every host builds one program.
    """
    axes = [varying(x) for x in arrays]
    if over is not None:
        axes.append(varying(lax.axis_index(over)))  # empty for an axis of `vmap`
    union = frozenset().union(*axes) - {but}
    missing = [tuple(sorted(union - varying(x), key=str)) for x in arrays]
    return [
        lax.pcast(x, more, to="varying") if more else x
        for x, more in zip(arrays, missing, strict=True)
    ]


def settled(body: Callable[[Carry], Carry], first: Carry, *operands: Any) -> Carry:
    """The first carry of a loop, cast to the varying mesh axes that `body` gives it.

    Args:
        body: one turn of the loop.
        first: fresh arrays, which differ over no axis.
        *operands: what `body` reads; where none of it varies, nothing is traced.
    """
    if not any(varying(x) for x in jax.tree.leaves(operands)):
        return first

    def more(x, found):
        missing = found.mat.varying - varying(x)
        return lax.pcast(x, tuple(sorted(missing, key=str)), to="varying")

    while True:
        leaves, tree = jax.tree.flatten(first)
        found = jax.make_jaxpr(body)(first).out_avals
        cast = [
            more(x, aval) if aval.mat.varying - varying(x) else x
            for x, aval in zip(leaves, found, strict=True)
        ]
        if all(a is b for a, b in zip(cast, leaves, strict=True)):
            return first
        first = jax.tree.unflatten(tree, cast)


def laid_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` as an explicit mesh divides `like`; elsewhere `x` itself.

    The gradient of an operand that all devices hold comes out divided like the operands
    that it met there.
    """
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty or jax.typeof(x).sharding.spec == sharding.spec:
        return x
    return jax.sharding.reshard(x, sharding)


def contract(spec: str, *arrays: jax.Array, like: jax.Array) -> jax.Array:
    """`jnp.einsum` with wide accumulation, laid out like `like` on an explicit mesh.

    A weight gradient sums over the batch. When an explicit mesh splits the batch, the
    result's sharding is a choice that has to be named; elsewhere this is an einsum.
    """
    acc = accumulator(like.dtype, *(x.dtype for x in arrays))
    found = [jax.typeof(x).sharding for x in (like, *arrays)]
    explicit = [s for s in found if AxisType.Explicit in s.mesh.axis_types]
    out_sharding = explicit[0] if explicit else None
    if explicit and found[0] is not explicit[0]:
        # A constant lies on no mesh: whole.
        out_sharding = NamedSharding(explicit[0].mesh, PartitionSpec())
    return jnp.einsum(
        spec, *arrays, preferred_element_type=acc, out_sharding=out_sharding
    )
