"""The projections of a block-scaled feed-forward block, in the chip's own layouts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from neuronjax.kernels.mx.formats import E4M3FN, Container, Format
from neuronjax.kernels.mx.layout import (
    INTERMEDIATE,
    PARTITIONS,
    dequantized,
    from_blocks,
    from_partitions,
    to_blocks,
    to_partitions,
)
from neuronjax.kernels.mx.linear import rounded
from neuronjax.kernels.mx.product import product_fwd
from neuronjax.kernels.mx.quantize import quantize_fwd, to_hardware_scale


def matmul_fwd(
    stationary: Container,
    moving: Container,
    stationary_scale: UInt8[Array, "p_blocks i"],
    moving_scale: UInt8[Array, "p_blocks j"],
    kinds: tuple[Format, Format],
) -> Float[Array, "i j"]:
    """Returns `out[i, j] = sum over p, q of S[p, i, q] * M[p, j, q]`."""
    rows = dequantized(stationary[:, None], stationary_scale[:, None], kinds[0])
    rows = jnp.moveaxis(rows, -1, 0)
    return product_fwd(rows, moving[:, None], moving_scale[:, None], kind=kinds[1])


def gate_up_fwd(
    hidden: Container,
    hidden_scale: UInt8[Array, "16 r rows"],
    weight: Container,
    weight_scale: UInt8[Array, "16 r d_ff"],
    bias: Float[Array, "p tiles 4"] | None,
    kinds: tuple[Format, Format],
) -> Float[Array, "128 tiles rows 4"]:
    """Returns gate or up as the chip holds it: tiles of 512 outputs, in quarters."""
    rows = jnp.moveaxis(dequantized(hidden, hidden_scale, kinds[0]), -1, 0)
    y = product_fwd(rows, weight, weight_scale, kind=kinds[1])
    out = to_partitions(to_blocks(y, INTERMEDIATE))
    if bias is None:
        return out
    missing = PARTITIONS - bias.shape[0]
    bias = jnp.pad(bias, ((0, missing), (0, 0), (0, 0))).astype(out.dtype)
    return out + bias[:, :, None]


def down_fwd(
    inter: Float[Array, "128 tiles rows 4"],
    weight: Container,
    weight_scale: UInt8[Array, "p_blocks tiles d_model"],
    bias: Float[Array, "1 d_model"] | None,
    kind: Format,
    size: int,
) -> Float[Array, "rows d_model"]:
    """Returns the down projection; what lies in the padding is never read."""
    middle = from_blocks(from_partitions(inter), INTERMEDIATE, size)
    y = product_fwd(rounded(middle, INTERMEDIATE), weight, weight_scale, kind=kind)
    return y if bias is None else y + bias.astype(y.dtype)


def swizzled_load_fwd(
    x: Float[Array, "128 k"],
) -> tuple[Container, UInt8[Array, "128 m"]]:
    """Quantizes groups of 512 columns, transposed: `[128, M]` x4 for each group."""
    rows = x.shape[0]
    groups = x.reshape(rows, -1, PARTITIONS, 4).transpose(2, 1, 0, 3)
    packed, scale = quantize_fwd(groups.reshape(PARTITIONS, -1), E4M3FN)
    return packed, to_hardware_scale(scale)
