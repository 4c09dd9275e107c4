"""What the config bag of `NeuronReduceMacro` says, and where the reduced axes lie."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from neuronjax.kernels.shard_common import laid_like


class Options(NamedTuple):
    """The config bag.

    Attributes:
        op: `"norm"`, or one of the reductions.
        norm: `"rms"`, `"rms_skip_gamma"`, `"layer"`, `"l2"`; `None` for none.
        axis: the reduced axes, sorted; not negative, or the last one as -1.
        keepdims: whether a reduction leaves axes of size 1.
        eps: added under the root.
        offset: added to the gain of a root-mean-square norm.
        cast_before_scale: round to the input's dtype before that gain.
        hidden_actual: elements that count in its mean.
    """

    op: str = "norm"
    norm: str | None = "rms"
    axis: tuple[int, ...] = (-1,)
    keepdims: bool = False
    eps: float = 1e-6
    offset: float = 0.0
    cast_before_scale: bool = False
    hidden_actual: int | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Options":
        """The options that a config bag holds; hints are left out."""
        return cls(**{key: config[key] for key in cls._fields if key in config})

    @property
    def divisor(self) -> int | None:
        """The divisor of the sum of squares; `None` for the number of elements."""
        return 1 if self.norm == "l2" else self.hidden_actual


def lined(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """`x` with `axes` as one last axis: `[*others, n]`."""
    if axes in ((-1,), (x.ndim - 1,)):
        return x
    first = x.ndim - len(axes)
    rows = jnp.moveaxis(x, axes, range(first, x.ndim))
    sharding = jax.typeof(rows).sharding
    if any(sharding.spec[first + 1 :]):
        # An explicit mesh divides only the outermost of axes that become one.
        whole = PartitionSpec(*sharding.spec[:first], *[None] * len(axes))
        rows = jax.sharding.reshard(rows, NamedSharding(sharding.mesh, whole))
    return lax.collapse(rows, first, x.ndim)


def unlined(rows: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The inverse of `lined`, for an `x` of that shape."""
    if axes in ((-1,), (x.ndim - 1,)):
        return rows
    sizes = [x.shape[axis] for axis in axes]
    last = range(x.ndim - len(axes), x.ndim)
    y = jnp.moveaxis(rows.reshape(*rows.shape[:-1], *sizes), last, axes)
    return laid_like(y, x)
