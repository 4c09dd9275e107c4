"""What the leaves of the blockwise experts are given: operands and the config bag."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import accumulator, promoted

Option = Any  # an array, or None; the config bag says which are there
Limits = tuple[float | None, float | None]


class Operands(NamedTuple):
    """The operands of the macro `BlockwiseMM`, in order. An absent option is None."""

    hidden: jax.Array
    affinity: jax.Array
    gate_up_w: jax.Array
    down_w: jax.Array
    token_id: jax.Array
    block_expert: jax.Array
    gate_up_b: Option = None
    down_b: Option = None
    gate_up_scale: Option = None
    down_scale: Option = None
    conditions: Option = None


class Options(NamedTuple):
    """The config bag of the macro `BlockwiseMM`.

    Attributes:
        checkpoint: `"store"`: the backward reads what the forward stored;
            `"recompute"`: it computes that again.
        returned: the forward returns what it stores; differentiated, it must.
        shard: how cores that cooperate over the mesh axis `axis` divide the work:
            `"hidden"` and `"intermediate"` divide the weights along H and I; with
            `"columns"` the backward gives each core's own columns of H.
    """

    block_size: int
    scaling: str = "POST_SCALE"
    activation: str = "SiLU"
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    skip_token: bool = False
    accumulate: bool = True
    checkpoint: str = "store"
    returned: bool = True
    on_intermediate: bool = False
    compute_dtype: str | None = None
    quantization: str = "NONE"
    weight_format: str = ""
    num_static: int = 0
    shard: str | None = None
    axis: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Options":
        """Reads a config bag; its other entries are hints, which change no value."""
        return cls(**{key: config[key] for key in cls._fields if key in config})

    @property
    def gate_limits(self) -> Limits:
        return self.gate_clamp_lower_limit, self.gate_clamp_upper_limit

    @property
    def up_limits(self) -> Limits:
        return self.up_clamp_lower_limit, self.up_clamp_upper_limit

    @property
    def stored(self) -> tuple[str, ...]:
        """The outputs of the forward beside `out`."""
        if not self.returned:
            return ()
        return ("gate_up",) if self.on_intermediate else ("gate_up", "down")


def factor_dtype(ops: Operands, opts: Options) -> jnp.dtype:
    """The dtype of the products' factors."""
    if opts.compute_dtype is not None:
        return jnp.dtype(opts.compute_dtype)
    if opts.quantization == "MX":
        return ops.hidden.dtype
    return promoted(ops.hidden.dtype, ops.gate_up_w.dtype, ops.down_w.dtype)


def sum_dtype(ops: Operands) -> jnp.dtype:
    """The dtype of sums."""
    floats = (x for x in ops if x is not None and jnp.issubdtype(x.dtype, jnp.floating))
    return accumulator(*(x.dtype for x in floats))
