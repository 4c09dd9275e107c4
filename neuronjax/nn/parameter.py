"""How layers make their parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from neuronjax.primitives.options import NormType, member


def parameter(
    init: Callable[..., jax.Array],
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    rngs: nnx.Rngs,
    dtype: Any,
) -> nnx.Param:
    """A parameter whose axes carry the mesh axes that may split them.

    The names are there for `nnx.get_partition_spec`. Nothing is placed while the layer
    is built: a mesh need not have these axes.
    """
    value = init(rngs.params(), shape, dtype)
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


def norm_parameters(
    norm_type: NormType | str, width: int, rngs: nnx.Rngs, dtype: Any
) -> tuple[nnx.Param | None, nnx.Param | None]:
    """The gain and the offset of a fused norm, `[width]`, those that it has."""
    kind = member(NormType, norm_type)
    rows = (width,), (None,), rngs, dtype
    gain = offset = None
    if kind in (NormType.RMS_NORM, NormType.LAYER_NORM):
        gain = parameter(nnx.initializers.ones_init(), *rows)
    if kind is NormType.LAYER_NORM:
        offset = parameter(nnx.initializers.zeros_init(), *rows)
    return gain, offset


def at_dtype(weight: nnx.Param, dtype: Any) -> jax.Array:
    """The parameter's value, in the computation's dtype if there is one."""
    value = jnp.asarray(weight[...])
    return value if dtype is None else value.astype(dtype)
