"""What the leaf of a decode step's experts is given: operands and the config bag."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

Option = Any  # an array, or None; the config bag says which are there


class Operands(NamedTuple):
    """The operands of the macro `ExpertMLPs`, in order. An absent option is None."""

    hidden: jax.Array
    gate_up_w: jax.Array
    down_w: jax.Array
    affinities: Option = None
    index: Option = None
    rank: Option = None
    gate_up_b: Option = None
    down_b: Option = None
    gate_up_scale: Option = None
    down_scale: Option = None
    hidden_scale: Option = None


# The axis of each operand that lies on a tile's partitions.
TILE_AXES = dict(
    hidden=1,
    gate_up_w=1,
    down_w=1,
    affinities=0,
    index=0,
    rank=0,
    gate_up_b=2,
    down_b=1,
    gate_up_scale=2,
    down_scale=1,
    hidden_scale=0,
)
OUT_AXIS = 1


class Options(NamedTuple):
    """The config bag of the macro `ExpertMLPs`.

    Attributes:
        all_experts: every local expert sees every token; else those of `index` do.
        mask: all experts: affinities of experts that `index` does not name are 0.
        block_size: all experts: tokens of affinity 0 are left out, and the others go
            through in blocks of this size; None for all tokens at once.
    """

    all_experts: bool
    scaling: str = "NO_SCALE"
    mask: bool = False
    activation: str = "SiLU"
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    block_size: int | None = None
    out_dtype: str | None = None
    quantization: str = "NONE"
    weight_format: str = ""
    is_tiled: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Options":
        """Reads a config bag; its other entries are hints, which change no value."""
        return cls(**{key: config[key] for key in cls._fields if key in config})

    @property
    def is_scaled(self) -> bool:
        """Whether affinities multiply what an expert gives."""
        return self.scaling == "POST_SCALE"
