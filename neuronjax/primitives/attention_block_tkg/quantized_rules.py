"""The rules of quantized decode block calls: kinds, scales, fp8 caches."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention_block_tkg.facts import SCALES
from neuronjax.primitives.attention_block_tkg.rows import (
    are_given,
    arguments,
    fp8,
    projecting,
    repeats,
    row,
    zeros,
)
from neuronjax.primitives.known import known
from neuronjax.primitives.options import QuantizationType, members


def _odd_value(c: SimpleNamespace) -> float | None:
    """The first known scale that is not the one positive value it should be."""
    for held in map(known, (c.k_scale, c.v_scale)):
        if held is None or not held.size:
            continue
        wrong = held[~((held > 0) & np.isfinite(held)) | (held != held.ravel()[0])]
        if wrong.size:
            return float(wrong[0])
    return None


_DECODE_KINDS = ("NONE", "STATIC", "ROW")

row(
    "quantization",
    f"quantization_type_qkv and quantization_type_out must be one of "
    f"{', '.join(_DECODE_KINDS)}, of {members(QuantizationType)}, got "
    "{quantization_type_qkv} and {quantization_type_out}",
    lambda c: any(
        getattr(kind, "name", None) not in _DECODE_KINDS
        for kind in (c.qkv_kind, c.out_kind)
    ),
    example=arguments(quantization_type_qkv="MX"),
    stage=1,
)
row(
    "scale_dtype",
    "scales must be float32, got {odd_scale}",
    lambda c: c.odd_scale,
    example=fp8(k_scale=np.ones((1, 1), jnp.bfloat16)),
    stage=1,
)
row(
    "cache_dtype",
    "{odd_cache}",
    lambda c: c.odd_cache,
    example=fp8(V_cache=zeros(1, 6, 4)),
)
row(
    "kv_scales",
    "k_scale and v_scale must be given together",
    lambda c: len(set(are_given(c, "k_scale", "v_scale"))) > 1,
    example=arguments(k_scale=np.ones((1, 1), np.float32)),
    stage=1,
)
row(
    "kv_scale_shape",
    "k_scale and v_scale must have shape (1, 1) or (128, 1), got {shapes[k_scale]} and "
    "{shapes[v_scale]}",
    lambda c: (
        c.fp8 and not all(repeats(c.shapes[name], 1) for name in ("k_scale", "v_scale"))
    ),
    example=fp8(k_scale=np.ones((4,), np.float32)),
)
row(
    "kv_scale_values",
    "k_scale and v_scale must hold one positive and finite value each, got {odd_value}",
    lambda c: c.fp8 and vars(c).setdefault("odd_value", _odd_value(c)) is not None,
    example=fp8(k_scale=-np.ones((1, 1), np.float32)),
)
row(
    "qkv_scales",
    "weight_dequant_scale_qkv must be given exactly for quantization_type_qkv STATIC "
    "and ROW, input_dequant_scale_qkv exactly for STATIC, got {qkv_kind.name}",
    lambda c: (
        are_given(c, *SCALES["qkv"])
        != [c.qkv_kind.name != "NONE", c.qkv_kind.name == "STATIC"]
    ),
    example=arguments(quantization_type_qkv="ROW"),
)
row(
    "qkv_scale_shape",
    "weight_dequant_scale_qkv must have 1 or 128 rows of {qkv_columns} columns (ROW: "
    "one a column of W_qkv, STATIC: 3, for query, key and value), and "
    "input_dequant_scale_qkv shape (1, 1) or (128, 1), got "
    "{shapes[weight_dequant_scale_qkv]} and {shapes[input_dequant_scale_qkv]}",
    lambda c: (
        vars(c).setdefault(
            "qkv_columns", c.W_qkv.shape[1] if c.qkv_kind.name == "ROW" else 3
        )
        and any(
            c.shapes[name] is not None and not repeats(c.shapes[name], columns)
            for name, columns in zip(SCALES["qkv"], (c.qkv_columns, 1), strict=True)
        )
    ),
    example=arguments(
        quantization_type_qkv="STATIC",
        weight_dequant_scale_qkv=np.ones((128, 1), np.float32),
        input_dequant_scale_qkv=np.ones((128, 1), np.float32),
    ),
)
row(
    "out_scales",
    "weight_dequant_scale_out must be given exactly for quantization_type_out STATIC "
    "and ROW, input_dequant_scale_out exactly for STATIC, got {out_kind.name}",
    lambda c: (
        c.W_out is not None
        and are_given(c, *SCALES["out"])
        != [c.out_kind.name != "NONE", c.out_kind.name == "STATIC"]
    ),
    example=projecting(quantization_type_out="STATIC"),
)
row(
    "out_scale_shape",
    "weight_dequant_scale_out must have shape (1, 1) or (128, 1), for ROW (1, H) or "
    "(128, H), H = {H}, and input_dequant_scale_out (1, 1) or (128, 1), got "
    "{shapes[weight_dequant_scale_out]} and {shapes[input_dequant_scale_out]}",
    lambda c: any(
        c.shapes[name] is not None and not repeats(c.shapes[name], columns)
        for name, columns in zip(
            SCALES["out"],
            (c.out_width if c.out_kind.name == "ROW" else 1, 1),
            strict=True,
        )
    ),
    example=projecting(
        quantization_type_out="ROW",
        weight_dequant_scale_out=np.ones((8,), np.float32),
    ),
)
