"""The enums of aws-neuron/nki-library; every function takes a member or its name."""

import enum
from typing import TypeVar


class ActFnType(enum.Enum):
    """The activation between the projections of an MLP."""

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3


class NormType(enum.Enum):
    """The norm that is fused in front of a projection."""

    NO_NORM = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    RMS_NORM_SKIP_GAMMA = 3


class QuantizationType(enum.Enum):
    """How weights and activations are quantized."""

    NONE = 0
    STATIC = 1
    ROW = 2
    MX = 3
    STATIC_MX = 4
    ROW_MX = 5


# What the config bag of a macro calls each norm.
NORM_CONFIG = {
    NormType.NO_NORM: "none",
    NormType.RMS_NORM: "rms",
    NormType.LAYER_NORM: "layer",
    NormType.RMS_NORM_SKIP_GAMMA: "rms_skip_gamma",
}

Member = TypeVar("Member", bound=enum.Enum)


def member(kind: type[Member], value: Member | str) -> Member | None:
    """The member of `kind` that `value` is or names; None when there is none."""
    if isinstance(value, kind):
        return value
    return kind.__members__.get(value) if isinstance(value, str) else None


def members(kind: type[enum.Enum]) -> str:
    """The names of `kind`, for a message."""
    return ", ".join(kind.__members__)
