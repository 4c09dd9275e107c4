"""The projection of QKV with a block-scaled weight: what the QKV leaf multiplies by.

The weight is `[H/4, I]` containers with scales `[H/32, I]`; `order` says which rows of
the logical `[H, I]` a container holds. The normed activations are rounded to
float8_e4m3fn blocks first; weight and scales are constants.
"""

import jax
from jax import lax

from neuronjax.kernels.mx.formats import FORMATS
from neuronjax.kernels.mx.layout import CONTIGUOUS, INTERLEAVED, unpack_weight
from neuronjax.kernels.mx.linear import mx_linear_bwd, mx_linear_fwd
from neuronjax.kernels.mx.plain import rounded_plain

# What the config says of a block-scaled weight.
BLOCK_OPTIONS = ("weight_format", "weight_layout")
ORDERS = {"MX_CONTIGUOUS": CONTIGUOUS, "MX_INTERLEAVED": INTERLEAVED}


def mx_columns_fwd(
    normed: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    *,
    weight_format: str,
    weight_layout: str,
) -> jax.Array:
    """The columns `[batch, seq, I]`, wide, without bias."""
    kind, order = FORMATS[weight_format], ORDERS[weight_layout]
    return mx_linear_fwd(normed, w[:, None], scale[:, None], kind=kind, order=order)


def mx_columns_bwd(
    normed: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    *,
    weight_format: str,
    weight_layout: str,
) -> jax.Array:
    """The cotangent of the normed activations."""
    kind, order = FORMATS[weight_format], ORDERS[weight_layout]
    packed = w[:, None], scale[:, None]
    return mx_linear_bwd(dy, normed, *packed, kind=kind, order=order)


def mx_columns_plain(
    normed: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    *,
    weight_format: str,
    weight_layout: str,
) -> jax.Array:
    """The same with the weight as a whole matrix."""
    kind, order = FORMATS[weight_format], ORDERS[weight_layout]
    packed = w[:, None], scale[:, None]
    dense = unpack_weight(*packed, order, kind, normed.shape[-1])
    return rounded_plain(normed, order) @ lax.stop_gradient(dense).astype(normed.dtype)
