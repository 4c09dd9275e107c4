"""The block-scaled modes: a power of two for 32 values, four values to a container.

Widths fill the chip's tiles: 512 for the residual stream, 128 for the heads. Others are
padded with zeros, which the stored weights hold too.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.nn.quantization.scheme import Arrays, Scheme, Stored
from neuronjax.primitives.mlp import mlp
from neuronjax.primitives.mx import quantize_mx_weight
from neuronjax.primitives.output_projection import output_projection_cte
from neuronjax.primitives.qkv import qkv

TILE, HEADS = 512, 128
# Below one tile the width between the MLP's projections fills whole blocks.
BLOCK = 32


def _padded(x: jax.Array, size: int, axis: int = -1) -> jax.Array:
    """Zeros behind `x` up to `size` along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _inner(d_ff: int) -> int:
    return _up(d_ff, TILE if d_ff > TILE else BLOCK)


def _pack(name: str, weight: jax.Array, order: str, kind: str) -> dict[str, Stored]:
    """The containers and scales of `[..., in, out]`, which no mesh axis splits."""
    fun = functools.partial(
        quantize_mx_weight, order=order, x4_dtype=kind, closest=True
    )
    for _ in weight.shape[:-2]:
        fun = jax.vmap(fun)
    packed, scale = fun(weight.astype(jnp.float32))
    whole = (None,) * (packed.ndim - weight.ndim + 2)
    return {name: Stored(packed, whole), f"{name}_scale": Stored(scale, whole)}


def _encode_mlp(kind: str, gate, up, down, seen) -> dict[str, Stored]:
    width, inner = _up(gate.shape[-2], TILE), _inner(gate.shape[-1])
    gate, up = (_padded(_padded(w, width, -2), inner) for w in (gate, up))
    down = _padded(_padded(down, inner, -2), width)
    return (
        _pack("gate", gate, "hidden", kind)
        | _pack("up", up, "hidden", kind)
        | _pack("down", down, "intermediate", kind)
    )


def _mlp(x, gamma, stored: Arrays, activation: str, eps: float) -> jax.Array:
    d_model = x.shape[-1]
    width = _up(d_model, TILE)
    if gamma is not None:
        # The mean square is taken over the padded width; gain and eps make up for it.
        share = d_model / width
        gamma, eps = _padded(gamma * math.sqrt(share), width), eps * share
    (out,) = mlp(
        _padded(x, width),
        stored["gate"],
        stored["up"],
        stored["down"],
        normalization_weights_tensor=gamma,
        normalization_type="NO_NORM" if gamma is None else "RMS_NORM",
        activation_fn=activation,
        eps=eps,
        quantization_type="MX",
        gate_w_scale=stored["gate_scale"],
        up_w_scale=stored["up_scale"],
        down_w_scale=stored["down_scale"],
        use_tkg_gate_up_proj_column_tiling=False,
        use_tkg_down_proj_column_tiling=False,
    )
    return out[..., :d_model]


def _encode_attention(kind: str, weight, out, heads, seen) -> dict[str, Stored]:
    weight = _padded(weight, _up(weight.shape[-2], TILE), -2)
    head_dim = out.shape[-2] // heads[0]
    rows = _up(out.shape[-2], math.lcm(HEADS, head_dim))
    return _pack("qkv", weight, "contiguous", kind) | _pack(
        "out", _padded(out, rows, -2), "contiguous", kind
    )


def _qkv(x, gamma, stored: Arrays, options: dict[str, Any]) -> jax.Array:
    width = _up(x.shape[-1], TILE)
    return qkv(
        _padded(x, width),
        stored["qkv"],
        quantization_type="MX",
        qkv_w_scale=stored["qkv_scale"],
        weight_layout="MX_CONTIGUOUS",
        hidden_actual=x.shape[-1],
        fused_norm_type="NO_NORM" if gamma is None else "RMS_NORM",
        gamma_norm_weights=None if gamma is None else _padded(gamma, width),
        **options,
    ).astype(x.dtype)


def _out(attention: jax.Array, stored: Arrays) -> jax.Array:
    heads = 4 * stored["out"].shape[-2] // attention.shape[2]
    return output_projection_cte(
        _padded(attention, heads, 1),
        stored["out"],
        quantization_type="MX",
        weight_scales=stored["out_scale"],
        output_dtype=attention.dtype,
    )


def _scheme(mode: str, kind: str) -> Scheme:
    encode_mlp = functools.partial(_encode_mlp, kind)
    encode_attention = functools.partial(_encode_attention, kind)
    return Scheme(mode, False, encode_mlp, encode_attention, _mlp, _qkv, _out)


MXFP8 = _scheme("mxfp8", "float8_e4m3fn_x4")
MXFP4 = _scheme("mxfp4", "float4_e2m1fn_x4")
