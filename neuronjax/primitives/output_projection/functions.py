"""The public functions of the output projection: prefill and decode."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.options import QuantizationType, refuses
from neuronjax.primitives.output_projection.macro import output_projection_kernel
from neuronjax.primitives.output_projection.rules import facts

_INSTEAD = "unquantized weights [N*D, H] are"


@refuses(
    _INSTEAD,
    quantization_type=QuantizationType.NONE,
    input_scales=None,
    weight_scales=None,
)
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

    Args:
        attention: `[B, N, D, S]`, any floating dtype of at least 16 bits.
        weight: `[N*D, H]`; row `n*D + d` belongs to channel `d` of head `n`.
        bias: `[1, H]`, added in float32.
        quantization_type: `NONE`; the others are not built yet.
        input_scales: not built yet.
        weight_scales: not built yet.
        output_dtype: dtype of the result; that of `attention` unless named.

    Returns:
        `[B, S, H]`; sums are float32.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`D` 128, `N` 17, `H` 20705, `B*S` 131072) are reported by
            `neuronjax.can` and do not hold here.
        NotImplementedError: an option is not built yet.

    Source:
        aws-neuron/nki-library, `core/output_projection/output_projection_cte.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> heads = jnp.array([[1.0], [2.0]]).reshape(1, 2, 1, 1)
        >>> output_projection_cte(heads, jnp.array([[1.0, 0.0], [10.0, 1.0]]))
        Array([[[21.,  2.]]], dtype=float32)
    """
    return output_projection_kernel(
        attention, weight, bias, form="BNDS", output_dtype=output_dtype
    )


@refuses(
    _INSTEAD,
    quantization_type=QuantizationType.NONE,
    weight_scale=None,
    input_scale=None,
    sbm=None,
)
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
        bias: `[1, H]`, added in float32.
        quantization_type: `NONE`; the others are not built yet.
        weight_scale: not built yet.
        input_scale: not built yet.
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
        NotImplementedError: an option is not built yet.

    Source:
        aws-neuron/nki-library, `core/output_projection/output_projection_tkg.py`.
    """
    return output_projection_kernel(
        attention,
        weight,
        bias,
        form="DBNS",
        transpose_out=TRANSPOSE_OUT,
        lnc=lnc,
        out_in_sb=OUT_IN_SB,
    )
