"""A linear map with a block-scaled weight; activations are rounded to blocks first.

    y = round(x) @ dequantized(weight)

`round` is to float8_e4m3fn blocks along the contraction. Its derivative is the
straight-through one, zero where a value saturates; weight and scale are constants.
"""

from jaxtyping import Array, Float, UInt8

from neuronjax.kernels.mx.formats import E4M3FN, Container, Format
from neuronjax.kernels.mx.layout import BLOCK, from_blocks, grouped, to_blocks
from neuronjax.kernels.mx.product import product_bwd, product_fwd
from neuronjax.kernels.mx.quantize import round_blocks, straight_through


def rounded(x: Float[Array, "*rows k"], order: str) -> Float[Array, "*rows 4 p r"]:
    """Lays `x` out in blocks and rounds it: the left factor of `product_fwd`."""
    blocks = to_blocks(x, order)
    return round_blocks(grouped(blocks), axes=BLOCK, kind=E4M3FN).reshape(blocks.shape)


def rounded_bwd(
    dblocks: Float[Array, "*rows 4 p r"], x: Float[Array, "*rows k"], order: str
) -> Float[Array, "*rows k"]:
    """The cotangent of `x` of `rounded`."""
    blocks = grouped(to_blocks(x, order))
    dx = straight_through(grouped(dblocks), blocks, BLOCK)
    return from_blocks(dx.reshape(dblocks.shape), order, x.shape[-1])


def mx_linear_fwd(
    x: Float[Array, "*rows k"],
    packed: Container,
    scale: UInt8[Array, "p_blocks r n"],
    *,
    kind: Format,
    order: str,
) -> Float[Array, "*rows n"]:
    """Returns `y`, in the accumulator's dtype."""
    return product_fwd(rounded(x, order), packed, scale, kind=kind)


def mx_linear_bwd(
    dy: Float[Array, "*rows n"],
    x: Float[Array, "*rows k"],
    packed: Container,
    scale: UInt8[Array, "p_blocks r n"],
    *,
    kind: Format,
    order: str,
) -> Float[Array, "*rows k"]:
    """Returns the cotangent of `x`."""
    return rounded_bwd(product_bwd(dy, packed, scale, kind=kind), x, order)
