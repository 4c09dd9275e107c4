"""The second half of a decode layer: a dense block, or a mixture of experts.

Each is one layer's weights as a pytree, called with the residual `[batch, seq,
d_model]`; it gives `[batch*seq, d_model]`: over ranks and cores that hold intermediate
columns of their own, a part of a sum. The norm is the block's own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from neuronjax.primitives.mlp import mlp_kernel, quant_mlp_kernel
from neuronjax.primitives.moe_block_tkg import moe_block_tkg


class Scales(NamedTuple):
    """The scales of row-quantized weights, one value a column, float32.

    Attributes:
        gate: `[rows, d_ff]`, all rows alike.
        up: `[rows, d_ff]`.
        down: `[rows, d_model]`.
    """

    gate: Any
    up: Any
    down: Any


def _static() -> Any:
    return dataclasses.field(metadata=dict(static=True), kw_only=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseFeedForward:
    """`down(silu(gate(n)) * up(n))` with `n = rms_norm(h) * gamma`: one macro `MLP`.

    Attributes:
        gamma: `[1, d_model]`.
        gate: `[d_model, d_ff]`.
        up: `[d_model, d_ff]`.
        down: `[d_ff, d_model]`.
        scales: those of fp8 weights, or `None`. Activations are not quantized.
        eps: added to the mean square.
        clamp_bound: with scales, magnitudes of `n` and of what `down` meets are clipped
            to it; 0 clips none.
    """

    gamma: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    scales: Scales | None = None
    eps: float = _static()
    clamp_bound: float = _static()

    def __call__(self, h: jax.Array) -> jax.Array:
        weights = h, self.gate, self.up, self.down
        norm: dict[str, Any] = dict(gamma=self.gamma, norm="rms", eps=self.eps)
        if self.scales is None:
            out = mlp_kernel(*weights, **norm)
        else:
            gate, up, down = (x[:1] for x in self.scales)
            out = quant_mlp_kernel(
                *weights,
                jnp.concatenate([gate, up]),
                down,
                activation_clipping_bound=self.clamp_bound,
                force_tkg_mode=True,
                **norm,
            )
        return out.reshape(-1, out.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertsFeedForward:
    """A mixture of experts: `moe_block_tkg`.

    All ranks hold the router and the norm alike, and of every expert their own
    intermediate columns.

    Attributes:
        weights: array arguments of `moe_block_tkg`, by name.
        options: its other arguments, as sorted pairs: `options(...)` makes them.
    """

    weights: Mapping[str, jax.Array]
    options: tuple[tuple[str, Any], ...] = _static()

    def __call__(self, h: jax.Array) -> jax.Array:
        options = dict(self.options) | dict(skip_router_logits=True)
        (out,) = moe_block_tkg(h, **self.weights, **options)
        return out


def options(**given: Any) -> tuple[tuple[str, Any], ...]:
    """Static arguments of `moe_block_tkg`, as `ExpertsFeedForward` holds them."""
    return tuple(sorted(given.items()))
