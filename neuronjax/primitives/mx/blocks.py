"""Quantizing to MX blocks and back: the public functions."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from neuronjax.kernels.mx import formats as codes
from neuronjax.kernels.mx import layout, projections, quantize
from neuronjax.kernels.mx.formats import Format
from neuronjax.primitives import contracts
from neuronjax.primitives.mx import rules
from neuronjax.primitives.mx.formats import format_of

FP8_X4 = "float8_e4m3fn_x4"

# Compiled as a whole: eager calls would compile each of many small steps.
_quantize = jax.jit(quantize.quantize_fwd, static_argnames="kind")
_dequantize = jax.jit(quantize.dequantize_fwd, static_argnames="kind")
_pack_weight = jax.jit(layout.pack_weight, static_argnames=("order", "kind", "closest"))
_load = jax.jit(projections.swizzled_load_fwd)


@functools.partial(jax.jit, static_argnames="kind")
def _unpack(packed: Array, kind: Format) -> Array:
    return codes.decode(codes.unpack(packed, kind), kind)


@functools.partial(jax.jit, static_argnames="kind")
def _pack(values: Array, kind: Format) -> Array:
    return codes.pack(codes.encode(values, kind), kind)


@contracts.contracted(rules.matrix_facts("data"))
def quantize_to_mx(
    data: Float[Array, "p f"], out_x4_dtype: str | DTypeLike = FP8_X4
) -> tuple[Array, UInt8[Array, "p_blocks f_packed"]]:
    r"""Quantizes blocks of 8 rows by 4 columns, each with one power of two.

    $$e = \max_{\mathrm{block}} \mathrm{exponent\ field}(x), \qquad
      \mathrm{scale} = \mathrm{clip}(e - e_{\max}, 0, 255), \qquad
      q = \mathrm{round}(\mathrm{clip}(x \, 2^{127 - (e - e_{\max})}, \pm \max))$$

    The scale is the floor of the logarithm: a value whose mantissa is beyond the
    format's largest (1.75, in float4 1.5) at the top exponent saturates. Rounding is
    to nearest, ties to even.

    - A block of zeros has zero codes and scale 0.
    - An infinity saturates to the largest code; its block's scale is the largest, so
      that it dequantizes to infinity again (in float4 to 1.5 * 2**127).
    - A NaN keeps a NaN code. float4 has none: there the block's scale is 255, which
      reads as NaN for the whole block.
    - Where the largest magnitude of a block is below 2**-118 (float8_e4m3fn; in
      general `e < e_max`), the stored scale ends at 0 while the codes do not, as the
      vendor's do: such blocks do not dequantize back.

    Args:
        data: `[P, F]`, any floating dtype, cast to float32 first.
        out_x4_dtype: `float8_e4m3fn_x4` (largest 448), `float8_e5m2_x4` (57344) or
            `float4_e2m1fn_x4` (6); the name without `_x4` or the NumPy dtype will do.

    Returns:
        `(packed, scale)`: `[P, F/4]`, four codes to a uint32 (float4: uint16), the
        first lowest; and uint8 `[P/8, F/4]`, the power `2**(scale - 127)`. Integers
        have no derivative.

    Raises:
        ValueError: `data` is no floating matrix, `P` is no multiple of 8, `F` none of
            4, or there is no such format.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3; aws-neuron/
        nki-library, `core/quantization`.

    Example:
        >>> import jax.numpy as jnp
        >>> packed, scale = quantize_to_mx(jnp.ones((8, 4)))
        >>> [hex(x) for x in packed[0].tolist()], scale.tolist()
        (['0x78787878'], [[119]])
    """
    kind = format_of(out_x4_dtype)
    assert kind is not None
    return _quantize(jnp.asarray(data), kind)


@contracts.contracted(rules.matrix_facts("src"))
def quantize_mx(
    src: Float[Array, "p f"], out_x4_dtype: str | DTypeLike = FP8_X4
) -> tuple[Array, UInt8[Array, "p f_packed"]]:
    """Quantizes as `quantize_to_mx` does, with the scales as the chip holds them.

    Of each 32 rows of scales, the first four hold those of its four blocks and the
    other 28 are zero.

    Args:
        src: `[P, F]`, any floating dtype, cast to float32 first.
        out_x4_dtype: `float8_e4m3fn_x4` or `float8_e5m2_x4`.

    Returns:
        `(data, scale)`: `[P, F/4]` in uint32, and uint8 `[P, F/4]`.

    Raises:
        ValueError: `P` is no multiple of 32, `F` none of 4, or the format is not one
            of 8 bits. That `P` is at most 128 is a limit of the chip, which
            `neuronjax.can` reports.

    Source:
        aws-neuron/nki-library, `core/quantization`.
    """
    packed, scale = quantize_to_mx(src, out_x4_dtype)
    return packed, quantize.to_hardware_scale(scale)


@contracts.contracted(rules.packed_facts)
def dequantize_mx(
    packed: Array,
    scale: UInt8[Array, "p_blocks f_packed"],
    x4_dtype: str | DTypeLike = FP8_X4,
) -> Float[Array, "p f"]:
    """The values of packed codes and their scales: `value * 2**(scale - 127)`.

    Args:
        packed: `[P, F/4]` in uint32 (float4: uint16).
        scale: uint8 `[P/8, F/4]`; 255 is NaN.
        x4_dtype: the format of `packed`, as in `quantize_to_mx`.

    Returns:
        float32 `[P, F]`. A magnitude below `2**-126` may be flushed to zero.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.2.

    Example:
        >>> import jax.numpy as jnp
        >>> packed, scale = quantize_to_mx(jnp.full((8, 4), 1.1))
        >>> dequantize_mx(packed, scale)[0].tolist()
        [1.125, 1.125, 1.125, 1.125]
    """
    kind = format_of(x4_dtype)
    assert kind is not None
    return _dequantize(jnp.asarray(packed), jnp.asarray(scale), kind)


@contracts.contracted(rules.packed_facts)
def unpack_mx(packed: Array, x4_dtype: str | DTypeLike = FP8_X4) -> Float[Array, "p f"]:
    """The values of packed codes, without their scales.

    Args:
        packed: `[P, F/4]` in uint32 (float4: uint16).
        x4_dtype: the format of `packed`, as in `quantize_to_mx`.

    Returns:
        float32 `[P, F]`: element `j` of a container is its bits `8j` to `8j + 7`
        (float4: `4j` to `4j + 3`).

    Raises:
        ValueError: shape or dtype do not fit.

    Source:
        aws-neuron/nki-library, `core/quantization`.
    """
    kind = format_of(x4_dtype)
    assert kind is not None
    return _unpack(jnp.asarray(packed), kind)


@contracts.contracted(rules.matrix_facts("values"))
def pack_mx(values: Float[Array, "p f"], x4_dtype: str | DTypeLike = FP8_X4) -> Array:
    """Rounds values to codes, without scales, and packs four to a container.

    The inverse of `unpack_mx`. Rounds to nearest, ties to even; magnitudes beyond the
    format's largest saturate, infinities too. NaN is kept; in float4, which has none,
    it becomes the largest value.

    Args:
        values: `[P, F]`, any floating dtype, cast to float32 first.
        x4_dtype: the format, as in `quantize_to_mx`.

    Returns:
        `[P, F/4]` in uint32 (float4: uint16).

    Raises:
        ValueError: `values` is no floating matrix, or `F` is no multiple of 4.

    Source:
        aws-neuron/nki-library, `core/quantization`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = pack_mx(jnp.array([[448.0, 465.0, 1000.0, jnp.nan]]))
        >>> unpack_mx(x).tolist()
        [[448.0, 448.0, 448.0, nan]]
    """
    kind = format_of(x4_dtype)
    assert kind is not None
    return _pack(jnp.asarray(values), kind)


@contracts.contracted(rules.weight_facts)
def quantize_mx_weight(
    weight: Float[Array, "k n"],
    order: str,
    x4_dtype: str | DTypeLike = "float4_e2m1fn_x4",
    *,
    closest: bool = False,
) -> tuple[Array, UInt8[Array, "p_blocks r n"]]:
    """Quantizes and packs the weight of a projection in the layout that it reads.

    Args:
        weight: `[K, N]`, any floating dtype, cast to float32 first.
        order: how rows fill blocks. `"hidden"`: gate and up weights, rows in the order
            of swizzled activations, `k = (q, t, p)`. `"intermediate"`: the down weight,
            tiles of 512 rows in four quarters. `"contiguous"` and `"interleaved"`: the
            layouts `MX_CONTIGUOUS` (container `p` holds rows `4p` to `4p + 3`) and
            `MX_INTERLEAVED` (rows `2p`, `2p + 1`, `K/2 + 2p`, `K/2 + 2p + 1`).
        x4_dtype: the format, as in `quantize_to_mx`.
        closest: in each block take the power of two with the smaller squared error, of
            that of `quantize_to_mx`, under which the largest values may saturate, and
            the next one.

    Returns:
        `(packed, scale)`: `[P, R, N]` and uint8 `[P/8, R, N]`. `P, R` is 128 and
        `K/512` for `"hidden"`, 128 (fewer for `K < 512`) and `ceil(K/512)` for
        `"intermediate"`; for the others `R` is left out and `P = K/4`.

    Raises:
        ValueError: `weight` is no floating matrix, or `K` does not fill the blocks.

    Source:
        aws-neuron/nki-library, `core/mlp` and `QKVWeightLayout`.
    """
    kind = format_of(x4_dtype)
    assert kind is not None
    packed, scale = _pack_weight(jnp.asarray(weight), order, kind, closest=closest)
    if order in (layout.CONTIGUOUS, layout.INTERLEAVED):
        return packed[:, 0], scale[:, 0]
    return packed, scale


@contracts.contracted(rules.load_facts)
def mxfp_load_performance_wrapper(
    tensor: Float[Array, "128 k"],
) -> tuple[Array, UInt8[Array, "128 m"]]:
    """Loads `[128, K]` in groups of 512 columns, transposed and quantized.

    Each group is viewed as `[128, 128, 4]`, its first two axes are exchanged, and
    blocks of 8 by 4 are quantized to float8_e4m3fn; the groups follow each other
    along the columns.

    Args:
        tensor: `[128, K]`, any floating dtype.

    Returns:
        `(data, scale)`: uint32 `[128, K/4]`, and uint8 `[128, K/4]` as `quantize_mx`
        lays it out.

    Raises:
        ValueError: `tensor` is not `[128, K]`, or `K` is no multiple of 512.

    Source:
        aws-neuron/nki-library, the swizzled load of its MX tests.
    """
    return _load(jnp.asarray(tensor))
