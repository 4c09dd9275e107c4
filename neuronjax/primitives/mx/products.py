"""Products of packed MX operands: the public functions."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from neuronjax.kernels.mx import projections
from neuronjax.kernels.mx.formats import Format
from neuronjax.primitives import contracts
from neuronjax.primitives.mx import product_rules as rules
from neuronjax.primitives.mx.formats import format_of

FP8_X4, FP4_X4 = "float8_e4m3fn_x4", "float4_e2m1fn_x4"

# Compiled as a whole: eager calls would compile each of many small steps.
_matmul = jax.jit(projections.matmul_fwd, static_argnames="kinds")
_gate_up = jax.jit(projections.gate_up_fwd, static_argnames="kinds")
_down = jax.jit(projections.down_fwd, static_argnames=("kind", "size"))


@contracts.contracted(rules.facts)
def mx_matmul(
    stationary: Array,
    moving: Array,
    stationary_scale: UInt8[Array, "p_blocks i"],
    moving_scale: UInt8[Array, "p_blocks j"],
    stationary_dtype: str | DTypeLike = FP8_X4,
    moving_dtype: str | DTypeLike = FP8_X4,
) -> Float[Array, "i j"]:
    r"""Multiplies two packed operands; rows and packed elements are both contracted.

    $$\mathrm{out}_{ij} = \sum_{p, q} S_{piq} M_{pjq}, \qquad
      S_{piq} = \mathrm{element}_q(\mathrm{stationary}_{pi})\, 2^{s_{p/8, i} - 127}$$

    Args:
        stationary: `[P, I]` in uint32 (float4: uint16), four elements to a container.
        moving: `[P, J]`.
        stationary_scale: uint8 `[P/8, I]`; further columns are ignored.
        moving_scale: uint8 `[P/8, J]`; further columns are ignored.
        stationary_dtype: `float8_e4m3fn_x4`, `float8_e5m2_x4` or `float4_e2m1fn_x4`.
        moving_dtype: the same for `moving`.

    Returns:
        float32 `[I, J]`; products are exact and the sums float32. Packed operands are
        constants: there is no derivative.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source:
        aws-neuron/nki-library, `nc_matmul_mx` as its references define it.

    Example:
        >>> import jax.numpy as jnp
        >>> import neuronjax
        >>> x, scale = neuronjax.quantize_to_mx(jnp.ones((8, 8)))
        >>> mx_matmul(x, x, scale, scale).tolist()
        [[32.0, 32.0], [32.0, 32.0]]
    """
    scales = (
        stationary_scale[:, : stationary.shape[1]],
        moving_scale[:, : moving.shape[1]],
    )
    kinds = _kind(stationary_dtype), _kind(moving_dtype)
    arrays = map(jnp.asarray, (stationary, moving, *scales))
    return _matmul(*arrays, kinds)


@contracts.contracted(rules.facts)
def gate_up_proj_mx(
    hidden_qtz: Array,
    hidden_scale: UInt8[Array, "16 tiles rows"],
    weight_qtz: Array,
    weight_scale: UInt8[Array, "16 tiles d_ff"],
    bias: Float[Array, "p tiles 4"] | None,
    H: int,
    I: int,  # noqa: E741  the vendor's name
    BxS: int,
    hidden_dtype: str | DTypeLike = "float8_e5m2_x4",
    weight_dtype: str | DTypeLike = FP4_X4,
) -> Float[Array, "128 tiles rows 4"]:
    """The gate or up projection of packed activations, in the chip's layout.

    Args:
        hidden_qtz: `[128, H/512, T]`, four elements to a container: element `q` of
            `[p, t]` is column `(q, t, p)` of the swizzled activation.
        hidden_scale: uint8 `[16, H/512, T]`.
        weight_qtz: `[128, H/512, I]`.
        weight_scale: uint8 `[16, H/512, I]`.
        bias: `[Ip, ceil(I/512), 4]` with at most 128 rows, in the order of the result;
            None for none.
        H: width of the activation, a multiple of 512.
        I: outputs.
        BxS: rows `T`.
        hidden_dtype: the format of `hidden_qtz`, as in `mx_matmul`.
        weight_dtype: the format of `weight_qtz`.

    Returns:
        float32 `[128, ceil(I/512), T, 4]`: output `512 j + 128 r + c` at
        `[c, j, :, r]`. The rows of a last, partial tile are padded to a multiple of 8
        and split in four; what no output fills is zero (or the bias).

    Raises:
        ValueError: shapes, sizes or dtypes do not fit.

    Source:
        aws-neuron/nki-library, `gate_up_proj_mxfp4_torch_ref`.
    """
    kinds = _kind(hidden_dtype), _kind(weight_dtype)
    packed = map(jnp.asarray, (hidden_qtz, hidden_scale, weight_qtz, weight_scale))
    return _gate_up(*packed, _array(bias), kinds)


@contracts.contracted(rules.facts)
def down_proj_mx(
    inter: Float[Array, "128 tiles rows 4"],
    weight_qtz: Array,
    weight_scale: UInt8[Array, "p_blocks tiles d_model"],
    bias: Float[Array, "1 d_model"] | None,
    H: int,
    I: int,  # noqa: E741  the vendor's name
    BxS: int,
    weight_dtype: str | DTypeLike = FP4_X4,
) -> Float[Array, "rows d_model"]:
    """The down projection: quantizes the intermediate, then multiplies.

    Args:
        inter: `[128, ceil(I/512), T, 4]` as `gate_up_proj_mx` returns it, quantized to
            float8_e4m3fn blocks here. What lies in its padding is never read.
        weight_qtz: `[Ip, ceil(I/512), H]`: `Ip` is 128, or for `I < 512` a quarter of
            `I`, rounded up to whole blocks of 8.
        weight_scale: uint8 `[Ip/8, ceil(I/512), H]`.
        bias: `[1, H]`; None for none.
        H: outputs.
        I: width of the intermediate.
        BxS: rows `T`.
        weight_dtype: the format of `weight_qtz`, as in `mx_matmul`.

    Returns:
        float32 `[T, H]`. The derivative passes straight through the rounding of
        `inter`, and is zero where a value saturates; packed operands are constants.

    Raises:
        ValueError: shapes, sizes or dtypes do not fit.

    Source:
        aws-neuron/nki-library, `down_proj_mxfp4_torch_ref`.
    """
    arrays = map(jnp.asarray, (inter, weight_qtz, weight_scale))
    return _down(*arrays, _array(bias), _kind(weight_dtype), I)


def _array(x: Array | None) -> Array | None:
    return None if x is None else jnp.asarray(x)


def _kind(value: str | DTypeLike) -> Format:
    kind = format_of(value)
    assert kind is not None
    return kind
