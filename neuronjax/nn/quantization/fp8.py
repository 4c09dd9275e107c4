"""The two fp8 modes: a scale for each column, or one for a whole tensor."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.nn.quantization.scheme import (
    Arrays,
    Scheme,
    Stored,
    columns,
    lanes,
    split_columns,
    unit,
    whole,
)
from neuronjax.primitives.mlp import mlp
from neuronjax.primitives.output_projection import (
    output_projection_cte,
    output_projection_tkg,
)
from neuronjax.primitives.qkv import qkv

_COLUMNS, _ROWS = (None, "tensor"), ("tensor", None)


def _norm(gamma: jax.Array | None) -> str:
    return "NO_NORM" if gamma is None else "RMS_NORM"


def _mlp(x, gamma, stored: Arrays, activation: str, eps: float, **scales: Any):
    weights = stored["gate"], stored["up"], stored["down"]
    (out,) = mlp(
        x,
        *weights,
        normalization_weights_tensor=gamma,
        normalization_type=_norm(gamma),
        activation_fn=activation,
        eps=eps,
        **scales,
    )
    return out


def _encode_row_mlp(gate, up, down, seen) -> dict[str, Stored]:
    stored = {}
    for name, weight, names in (
        ("gate", gate, _COLUMNS),
        ("up", up, _COLUMNS),
        ("down", down, _ROWS),
    ):
        codes, scale = columns(weight)
        stored[name] = Stored(codes, names)
        stored[f"{name}_scale"] = Stored(scale, names[1:])
    return stored


def _row_mlp(x, gamma, stored: Arrays, activation: str, eps: float) -> jax.Array:
    return _mlp(
        x,
        gamma,
        stored,
        activation,
        eps,
        quantization_type="ROW",
        gate_w_scale=lanes(stored["gate_scale"]),
        up_w_scale=lanes(stored["up_scale"]),
        down_w_scale=lanes(stored["down_scale"]),
    )


def _encode_row_attention(weight, out, heads, seen) -> dict[str, Stored]:
    codes, scale = columns(weight)
    out_codes, out_scale = columns(out)
    return dict(
        qkv=Stored(codes, _COLUMNS),
        qkv_scale=Stored(scale, _COLUMNS[1:]),
        out=Stored(out_codes, _ROWS),
        out_scale=Stored(out_scale, _ROWS[1:]),
    )


def _row_qkv(x, gamma, stored: Arrays, options: dict[str, Any]) -> jax.Array:
    return qkv(
        x,
        stored["qkv"],
        quantization_type="ROW",
        qkv_w_scale=stored["qkv_scale"][None],
        fused_norm_type=_norm(gamma),
        gamma_norm_weights=gamma,
        **options,
    )


def _row_out(attention: jax.Array, stored: Arrays) -> jax.Array:
    batch, _, _, seq = attention.shape
    rows = output_projection_tkg(
        jnp.moveaxis(attention, 2, 0),
        stored["out"],
        quantization_type="ROW",
        weight_scale=lanes(stored["out_scale"]),
    )
    return rows.reshape(batch, seq, -1)


def _encode_static_mlp(gate, up, down, seen) -> dict[str, Stored]:
    stored = {}
    for name, weight, names in (
        ("gate", gate, _COLUMNS),
        ("up", up, _COLUMNS),
        ("down", down, _ROWS),
    ):
        codes, scale = whole(weight)
        stored[name] = Stored(codes, names)
        stored[f"{name}_scale"] = Stored(scale, (None,))
    for name in ("gate_up", "down"):
        stored[f"{name}_in"] = Stored(unit(seen[name])[None], (None,))
    return stored


def _static_mlp(x, gamma, stored: Arrays, activation: str, eps: float) -> jax.Array:
    return _mlp(
        x,
        gamma,
        stored,
        activation,
        eps,
        quantization_type="STATIC",
        gate_w_scale=lanes(stored["gate_scale"]),
        up_w_scale=lanes(stored["up_scale"]),
        down_w_scale=lanes(stored["down_scale"]),
        gate_up_in_scale=lanes(stored["gate_up_in"]),
        down_in_scale=lanes(stored["down_in"]),
    )


def _encode_static_attention(weight, out, heads, seen) -> dict[str, Stored]:
    parts = [whole(part) for part in split_columns(weight, heads)]
    codes, scales = (jnp.concatenate(group, -1) for group in zip(*parts, strict=True))
    out_codes, out_scale = whole(out)
    return dict(
        qkv=Stored(codes, _COLUMNS),
        qkv_scale=Stored(scales, (None,)),
        qkv_in=Stored(unit(seen["qkv"])[None], (None,)),
        out=Stored(out_codes, _ROWS),
        out_scale=Stored(out_scale, (None,)),
        out_in=Stored(unit(seen["out"])[None], (None,)),
    )


def _static_qkv(x, gamma, stored: Arrays, options: dict[str, Any]) -> jax.Array:
    return qkv(
        x,
        stored["qkv"],
        quantization_type="STATIC",
        qkv_w_scale=stored["qkv_scale"][None],
        qkv_in_scale=stored["qkv_in"][None],
        fused_norm_type=_norm(gamma),
        gamma_norm_weights=gamma,
        **options,
    ).astype(x.dtype)


def _static_out(attention: jax.Array, stored: Arrays) -> jax.Array:
    return output_projection_cte(
        attention,
        stored["out"],
        quantization_type="STATIC",
        input_scales=lanes(stored["out_in"]),
        weight_scales=lanes(stored["out_scale"]),
    )


ROW = Scheme(
    "row-fp8",
    False,
    _encode_row_mlp,
    _encode_row_attention,
    _row_mlp,
    _row_qkv,
    _row_out,
)
STATIC = Scheme(
    "static-fp8",
    True,
    _encode_static_mlp,
    _encode_static_attention,
    _static_mlp,
    _static_qkv,
    _static_out,
)
