"""The public functions of the output projection: prefill and decode."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.known import require_divisors
from neuronjax.primitives.options import QuantizationType, refuses
from neuronjax.primitives.output_projection.macro import output_projection_kernel
from neuronjax.primitives.output_projection.rules import facts


@contracts.contracted(facts("BNDS"))
def output_projection_cte(
    attention: Float[Array, "batch num_heads head_dim seq"],
    weight: Float[Array, "rows d_model"],
    bias: Float[Array, "1 d_model"] | None = None,
    quantization_type: QuantizationType | str = QuantizationType.NONE,
    input_scales: Array | None = None,
    weight_scales: Array | None = None,
    output_dtype: DTypeLike | None = None,
) -> Float[Array, "batch seq d_model"]:
    r"""Projects the heads of a prefill: `[B, N, D, S]` to `[B, S, H]`.

    $$\mathrm{out}_{bs} = \sum_{nd} \mathrm{attention}_{bnds} W_{nD+d} + \mathrm{bias}$$

    With a quantized weight $\mathrm{out} = c(a)\, W \cdot s + \mathrm{bias}$:

    - `ROW`: $c(a) = a$ and `s` is `weight_scales`, one value a column;
    - `STATIC`: $c(a) = \mathrm{fp8}(\mathrm{clip}(a / s_{in}, \pm 240))$ and `s` is
      `weight_scales * input_scales`;
    - `STATIC_MX`: the same with a clip at 448 and rows stored interleaved: the weight
      is a `[N*D/4, H, 4]`, whose last axis holds four rows;
    - `MX`: $c(a)$ rounds blocks of 32 along `N*D` to float8_e4m3fn with one power of
      two each, and so are the weight's blocks of 32 rows: four consecutive rows share
      a container, and `s` is inside the sum.

    A weight in a wider dtype than fp8 is the vendor's reference: activations are
    clipped and not rounded. Differentiation: a rounding passes straight through,
    beyond a clip the derivative is zero; a quantized weight and all scales are
    constants.

    Args:
        attention: `[B, N, D, S]`, any floating dtype of at least 16 bits; for MX also
            quantized, `[B, 1, N*D/4, S]` in uint32.
        weight: `[N*D, H]`; row `n*D + d` belongs to channel `d` of head `n`. For MX
            `[N*D/4, H]`: float4_e2m1fn in uint16 or float8_e4m3fn in uint32.
        bias: `[1, H]`, added in float32, after the scales.
        quantization_type: `NONE`, `STATIC`, `ROW`, `STATIC_MX` or `MX`.
        input_scales: float32, `[1, 1]`, for both `STATIC` kinds; positive.
        weight_scales: float32, `[1, 1]`, for `ROW` `[1, H]`. A scale may have 128 rows
            instead, all alike: the first is read. MX: uint8 `[N*D/32, H]`, and
            `input_scales` `[B, N*D/32, S]` with a quantized `attention` only.
        output_dtype: dtype of the result; that of `attention` unless named, for MX
            bfloat16.

    Returns:
        `[B, S, H]`; sums are float32.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`D` 128, `N` 17, `H` 20705, `B*S` 131072) are reported by
            `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, `core/output_projection/output_projection_cte.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> heads = jnp.array([[1.0], [2.0]]).reshape(1, 2, 1, 1)
        >>> output_projection_cte(heads, jnp.array([[1.0, 0.0], [10.0, 1.0]]))
        Array([[[21.,  2.]]], dtype=float32)
    """
    require_divisors("output_projection_cte", input_scales=input_scales)
    return output_projection_kernel(
        attention,
        weight,
        bias,
        weight_scales,
        input_scales,
        quantization_type=quantization_type,
        form="BNDS",
        output_dtype=output_dtype,
    )


@refuses(sbm=None)
@contracts.contracted(facts("DBNS"))
def output_projection_tkg(
    attention: Float[Array, "head_dim batch num_heads seq"],
    weight: Float[Array, "rows d_model"],
    bias: Float[Array, "1 d_model"] | None = None,
    quantization_type: QuantizationType | str = QuantizationType.NONE,
    weight_scale: Array | None = None,
    input_scale: Array | None = None,
    TRANSPOSE_OUT: bool = False,
    OUT_IN_SB: bool = False,
    sbm: None = None,
    lnc: int | None = None,
) -> Array:
    """Projects the heads of a decode step: `[D, B, N, S]` to `[B*S, H]`.

    Args:
        attention: `[D, B, N, S]`, the head dimension first.
        weight: `[N*D, H]`, as in `output_projection_cte`.
        bias: `[1, H]`, added in float32, after the scales.
        quantization_type: `NONE`, `STATIC` or `ROW`, as in `output_projection_cte`.
        weight_scale: as in `output_projection_cte`.
        input_scale: as in `output_projection_cte`.
        TRANSPOSE_OUT: return `[128, L, H/(128*L), B*S]`: column
            `h = l*(H/L) + p*(H/(128*L)) + c` lies at `[p, l, c]`.
        OUT_IN_SB: where the output lies; changes no value.
        sbm: the vendor's buffer manager; must be `None`.
        lnc: `L`, the cores of a logical core, with `TRANSPOSE_OUT`. Unless named it is
            2 when `H` is a multiple of 256, else 1.

    Returns:
        `[B*S, H]`, row `b*S + s`, or the transposed layout, in the dtype of
        `attention`; sums are float32.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.
        NotImplementedError: a buffer manager is given.

    Source:
        aws-neuron/nki-library, `core/output_projection/output_projection_tkg.py`.
    """
    require_divisors("output_projection_tkg", input_scale=input_scale)
    return output_projection_kernel(
        attention,
        weight,
        bias,
        weight_scale,
        input_scale,
        quantization_type=quantization_type,
        form="DBNS",
        transpose_out=TRANSPOSE_OUT,
        lnc=lnc,
        out_in_sb=OUT_IN_SB,
    )
