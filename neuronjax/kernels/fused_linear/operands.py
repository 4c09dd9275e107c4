"""The operands and the config bag of `FusedLinear`."""

from typing import Any, NamedTuple

import jax

from neuronjax.kernels.dtypes import is_differentiable


class Operands(NamedTuple):
    """The operands; `None` for an absent one."""

    x: jax.Array
    w: jax.Array
    w_scale: jax.Array | None = None
    bias: jax.Array | None = None
    residual: jax.Array | None = None
    gamma: jax.Array | None = None
    beta: jax.Array | None = None

    def live(self) -> tuple[str, ...]:
        """Those that have a derivative: given, and no fp8."""
        return tuple(
            key
            for key, operand in self._asdict().items()
            if operand is not None and is_differentiable(operand.dtype)
        )


class Options(NamedTuple):
    """The config bag.

    Attributes:
        norm: `"none"`, `"rms"`, `"rms_skip_gamma"` or `"layer"`.
        activation: a name of `ActFnType`, or `None`.
        eps: added to the mean square or the variance.
        returned: whether the pre-activation is an output, for the backward.
    """

    norm: str
    activation: str | None
    eps: float
    returned: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Options":
        """The options that a config bag holds; hints are left out."""
        return cls(**{key: config[key] for key in cls._fields if key in config})

    @property
    def stats(self) -> int:
        """How many statistics of the norm are outputs."""
        return dict(none=0, layer=2).get(self.norm, 1)
