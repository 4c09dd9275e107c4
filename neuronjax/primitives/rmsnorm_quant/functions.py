"""The public function of RMSNorm with fp8 results, and its packed rows."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.quantization import fp8
from neuronjax.primitives import contracts
from neuronjax.primitives.options import NormType, QuantizationType, member
from neuronjax.primitives.rmsnorm_quant.macro import rmsnorm_quant_kernel
from neuronjax.primitives.rmsnorm_quant.rules import public_facts


@dataclasses.dataclass(frozen=True)
class RmsNormQuantKernelArgs:
    """The settings of `rmsnorm_quant`.

    Attributes:
        lower_bound: despite its name an upper bound: magnitudes of the normalised
            values are clipped to it where it is above 1e-6; for `ROW` only.
        norm_type: `RMS_NORM`, or `NO_NORM` to quantize only.
        quantization_type: `ROW`, a scale for each row, or `STATIC`, one that is given.
        eps: added to the mean square, inside the root, finite and not negative; in the
            units of `hidden**2`.
    """

    lower_bound: float = 0.0
    norm_type: NormType | str = NormType.RMS_NORM
    quantization_type: QuantizationType | str = QuantizationType.ROW
    eps: float = 1e-6


@contracts.contracted(public_facts)
def rmsnorm_quant(
    hidden: Float[Array, "*batch d_model"],
    ln_w: Float[Array, "... d_model"] | None,
    kargs: RmsNormQuantKernelArgs = RmsNormQuantKernelArgs(),
    input_dequant_scale: Float[Array, "128 1"] | None = None,
    *,
    packed: bool | None = None,
) -> Array | tuple[Array, Array]:
    r"""Normalises rows by their root mean square and quantizes them to fp8 e4m3.

    $$n = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot g, \qquad
      s = \max(\max |n| / 240,\ 10^{-6}), \qquad q = \mathrm{fp8}(n / s)$$

    so that `n ~ q * s`. Values saturate at +-240 and round to nearest, ties to even; a
    NaN stays NaN and, like an infinity, does not enter the scale of its row. A row of
    zeros has codes 0 and scale 1e-6. The scale is float32: a float64 row beyond its
    range has the largest finite scale, and saturates. Where the sum of a row's squares
    exceeds the range of its statistics (3.4e38 in float32, so from elements of about
    1.8e19 on), the row normalises to zeros.

    Args:
        hidden: `[..., H]`, at least two axes, any floating dtype of 16 bits or more.
        ln_w: the gain `g`, `[H]` or `[1, H]`; None with `NO_NORM`.
        kargs: norm, quantization, `eps` and the clip bound.
        input_dequant_scale: for `STATIC` the scale `s`: `[128, 1]`, one positive value
            on every partition. Under jit the first is read and not checked: a scale of
            0 gives saturated codes, and NaN for a value of 0.
        packed: for `ROW`: True (the default) returns the rows packed, False codes and
            scales apart.

    Returns:
        For `ROW` `[..., H + 4]` float8_e4m3: the codes, then the four little-endian
        bytes of the row's float32 scale, which `unpack_rows` takes apart; or, not
        packed, codes `[..., H]` and scales `[..., 1]`. For `STATIC` codes `[..., H]`.
        Statistics are float32, or float64 for float64.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`B` 2, `S` 32768, `H` 16384, or 65536 rows) are reported by
            `neuronjax.can` and do not hold here.
        NotImplementedError: it is differentiated: fp8 codes carry no derivative.

    Source:
        aws-neuron/nki-library, `core/rmsnorm/rmsnorm_quant.py`; Zhang and Sennrich
        2019, https://arxiv.org/abs/1910.07467, equation 4.

    Example:
        >>> import jax.numpy as jnp
        >>> kargs = RmsNormQuantKernelArgs(norm_type="NO_NORM")
        >>> rows = jnp.array([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 5.0, 8.0]])
        >>> codes, scale = rmsnorm_quant(rows, None, kargs, packed=False)
        >>> (codes.astype(jnp.float32) * scale).tolist()[1]
        [1.0, 2.0, 4.800..., 8.0]
    """
    kind = member(QuantizationType, kargs.quantization_type)
    if packed is None:
        packed = kind is QuantizationType.ROW
    outs = rmsnorm_quant_kernel(
        hidden,
        ln_w,
        input_dequant_scale,
        norm=kargs.norm_type,
        eps=float(kargs.eps),
        lower_bound=float(kargs.lower_bound),
        packed=packed,
    )
    return outs if len(outs) > 1 else outs[0]


def _codes_facts(call: SimpleNamespace) -> dict[str, Any]:
    codes = getattr(call, "codes", getattr(call, "packed", None))
    shape, dtype = getattr(codes, "shape", ()), getattr(codes, "dtype", None)
    scale = getattr(call, "scale", None)
    return dict(
        shape=shape,
        dtype=dtype,
        rows=(*shape[:-1], 1),
        scale_shape=getattr(scale, "shape", ()),
        scale_dtype=getattr(scale, "dtype", None),
    )


@contracts.contracted(_codes_facts)
def pack_rows(
    codes: Float[Array, "*rows d_model"], scale: Float[Array, "*rows 1"]
) -> Float[Array, "*rows d_packed"]:
    """Appends the bytes of each row's scale to its codes.

    Args:
        codes: `[..., H]` float8_e4m3.
        scale: `[..., 1]` float32.

    Returns:
        `[..., H + 4]` float8_e4m3.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return fp8.pack_rows(jnp.asarray(codes), jnp.asarray(scale))


@contracts.contracted(_codes_facts)
def unpack_rows(
    packed: Float[Array, "*rows d_packed"],
) -> tuple[Float[Array, "*rows d_model"], Float[Array, "*rows 1"]]:
    """Takes packed rows apart: the inverse of `pack_rows`.

    Args:
        packed: `[..., H + 4]` float8_e4m3, as `rmsnorm_quant` returns them.

    Returns:
        Codes `[..., H]` and float32 scales `[..., 1]`.

    Raises:
        ValueError: `packed` is not float8_e4m3 with more than four columns.

    Example:
        >>> import jax.numpy as jnp
        >>> codes = jnp.array([[1.0, -240.0]]).astype(jnp.float8_e4m3)
        >>> codes, scale = unpack_rows(pack_rows(codes, jnp.array([[0.5]])))
        >>> (codes.astype(jnp.float32) * scale).tolist()
        [[0.5, -120.0]]
    """
    return fp8.unpack_rows(jnp.asarray(packed))


contracts.add(
    contracts.Contract(
        "pack_rows.codes",
        ("pack_rows",),
        "{function}: codes must be float8_e4m3 of shape [..., H], got {dtype} of shape "
        "{shape}",
        lambda c: c.dtype != fp8.E4M3 or not c.shape,
        example=lambda function: dict(codes=jnp.zeros((2, 3)), scale=jnp.ones((2, 1))),
    ),
    contracts.Contract(
        "pack_rows.scale",
        ("pack_rows",),
        "{function}: scale must be float32 of shape {rows}, got {scale_dtype} of shape "
        "{scale_shape}",
        lambda c: c.scale_dtype != jnp.float32 or c.scale_shape != c.rows,
        example=lambda function: dict(
            codes=jnp.zeros((2, 3), fp8.E4M3), scale=jnp.ones((2,))
        ),
    ),
    contracts.Contract(
        "unpack_rows.packed",
        ("unpack_rows",),
        "{function}: packed must be float8_e4m3 of shape [..., H + 4], got {dtype} of "
        "shape {shape}",
        lambda c: c.dtype != fp8.E4M3 or not c.shape or c.shape[-1] < 5,
        example=lambda function: dict(packed=jnp.zeros((2, 4), fp8.E4M3)),
    ),
)
