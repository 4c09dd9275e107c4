"""The rules of `blockwise_mm_bwd`: its options and what they need."""

from types import SimpleNamespace

import numpy as np
from jax import lax

from neuronjax.primitives.blockwise_mm.arguments import arguments
from neuronjax.primitives.blockwise_mm.facts import BWD, EMITTERS
from neuronjax.primitives.blockwise_mm.rules import row
from neuronjax.primitives.blockwise_mm.spec import ClampLimits
from neuronjax.primitives.contracts import told
from neuronjax.primitives.kinds import is_count, is_number
from neuronjax.primitives.options import (
    AffinityOption,
    KernelTypeOption,
    ShardOption,
    member,
    members,
)

_ONLY = (BWD,)
_ENUMS = dict(
    shard_option=ShardOption,
    affinity_option=AffinityOption,
    kernel_type_option=KernelTypeOption,
)


def _odd_option(c: SimpleNamespace) -> str:
    for name, kind in _ENUMS.items():
        if member(kind, getattr(c, name)) is None:
            got = repr(getattr(c, name))
            return f"{name} must be one of {members(kind)}, got {got}"
    return ""


def _odd_limits(c: SimpleNamespace) -> str:
    given = c.clamp_limits
    if given is None:
        return ""
    if not isinstance(given, ClampLimits):
        return f"clamp_limits must be a ClampLimits or None, got {given!r}"
    for name, value in vars(given).items():
        if not is_number(value, None) or (value is not None and np.isnan(value)):
            return f"{name} must be a number or None, got {value!r}"
    return ""


row(
    "bwd_options",
    "{odd_option}",
    told("odd_option", _odd_option),
    functions=_ONLY,
    example=arguments(shard_option="SHARD_ON_TOKENS"),
    stage=-1,
)
row(
    "clamp_limits",
    "{odd_limits}",
    told("odd_limits", _odd_limits),
    functions=_ONLY,
    example=arguments(clamp_limits=(1.0, -1.0)),
    stage=-1,
)
row(
    "axis",
    "axis must be the name of a mesh axis or None, got {axis!r}",
    lambda c: not isinstance(c.axis, str | None),
    functions=(BWD, *EMITTERS),
    example=arguments(axis=0),
    stage=-1,
)


def cores_of(axis: str) -> int | None:
    """How many cores a mesh axis has; None outside of `jax.shard_map` over it."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


row(
    "axis_bound",
    "axis = {axis!r} is no mesh axis here: it is one inside jax.shard_map over it",
    lambda c: c.axis is not None and cores_of(c.axis) is None,
    functions=(BWD, *EMITTERS),
    example=lambda function: arguments(
        axis="lnc", **({} if function == BWD else dict(shard="hidden"))
    )(function),
)
row(
    "one_core",
    "shard_option = BASELINE_LNC1 is that of one core, and axis = {axis!r} has more",
    lambda c: (
        c.axis is not None
        and member(ShardOption, c.shard_option) is ShardOption.BASELINE_LNC1
    ),
    functions=_ONLY,
    example=arguments(axis="lnc", shard_option="BASELINE_LNC1"),
)
row(
    "bwd_dropping",
    "kernel_type_option = DROPPING has one block an expert: N = E = {E}, got N = {N}",
    lambda c: c.dropping and c.N != c.E,
    functions=_ONLY,
    example=arguments(kernel_type_option="DROPPING"),
)
row(
    "bwd_down",
    "affinity_option = AFFINITY_ON_I has no down_proj_act_checkpoint: it must be None",
    lambda c: c.on_I and c.down_proj_act_checkpoint is not None,
    functions=_ONLY,
    example=arguments(affinity_option="AFFINITY_ON_I"),
)
row(
    "bwd_tile",
    "block_tile_size must be a positive integer that divides block_size = "
    "{block_size}, or None, got {block_tile_size!r}",
    lambda c: (
        c.block_tile_size is not None
        and (not is_count(c.block_tile_size) or c.B % int(c.block_tile_size) != 0)
    ),
    functions=_ONLY,
    example=arguments(block_tile_size=3),
)
