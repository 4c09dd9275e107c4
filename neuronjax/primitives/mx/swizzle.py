"""The column order of block-scaled activations, and back: public functions."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from neuronjax.kernels.mx import layout
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract

FUNCTIONS = ("swizzle_hidden", "unswizzle_hidden")


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    shape = tuple(getattr(call.x, "shape", ()))
    return dict(shape=shape, width=shape[-1] if shape else 0)


contracts.add(
    Contract(
        "mx.swizzle_width",
        FUNCTIONS,
        "{function}: the last axis of x must be a multiple of 512, got shape {shape}",
        lambda c: c.width == 0 or c.width % layout.TILE,
        example=lambda function: dict(x=np.zeros((2, 500), np.float32)),
        stage=1,
    )
)


@contracts.contracted(_facts)
def swizzle_hidden(
    x: Shaped[Array, "*rows d_model"],
) -> Shaped[Array, "*rows d_model"]:
    r"""Puts columns into the order that block-scaled projections read: `(q, t, p)`.

    $$y_{(q \, H/512 + t) \, 128 + p} = x_{512 t + 4 p + q}$$

    Four neighbours of `x` then share a container, and 32 a block.

    Args:
        x: `[..., H]` of any dtype, `H` a multiple of 512: activations, or a norm's gain
            or offset. Rows of a weight are swizzled by transposing it twice.

    Returns:
        `[..., H]`.

    Raises:
        ValueError: `H` is no multiple of 512.

    Source:
        aws-neuron/nki-library, `core/mlp`: the layout of block-scaled activations.

    Example:
        >>> import jax.numpy as jnp
        >>> swizzle_hidden(jnp.arange(512))[:3].tolist()
        [0, 4, 8]
    """
    return layout.swizzle_hidden(jnp.asarray(x))


@contracts.contracted(_facts)
def unswizzle_hidden(
    x: Shaped[Array, "*rows d_model"],
) -> Shaped[Array, "*rows d_model"]:
    r"""Puts columns back into their own order: the inverse of `swizzle_hidden`.

    $$y_{512 t + 4 p + q} = x_{(q \, H/512 + t) \, 128 + p}$$

    Args:
        x: `[..., H]` of any dtype, `H` a multiple of 512.

    Returns:
        `[..., H]`.

    Raises:
        ValueError: `H` is no multiple of 512.

    Source:
        aws-neuron/nki-library, `core/mlp`: the layout of block-scaled activations.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(512)
        >>> bool((unswizzle_hidden(swizzle_hidden(x)) == x).all())
        True
    """
    return layout.unswizzle_hidden(jnp.asarray(x))
