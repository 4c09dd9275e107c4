"""What a mode of quantization stores of each weight, and how the macros are called.

A scheme turns the weights of a layer into arrays to store, and the stored arrays into
the arguments of `mlp`, `qkv` and the output projection. Weights may have leading axes:
the stacked layers of a scanned model.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.quantization.fp8 import E4M3, largest, saturate

Arrays = Mapping[str, jax.Array]
Names = tuple[str | None, ...]
MODES = ("row-fp8", "static-fp8", "mxfp8", "mxfp4")
# A scale that every partition reads has this many equal rows.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array to store, and the mesh axes that may split it."""

    value: jax.Array
    names: Names


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How one mode stores weights and calls the macros.

    Attributes:
        mode: its name.
        calibrated: whether it needs the largest magnitudes of the activations.
        encode_mlp: `(gate, up, down, seen)` to what is stored; `seen` has the largest
            magnitude of the input (`"gate_up"`) and between the projections (`"down"`).
        encode_attention: `(qkv, out, heads, seen)` likewise, `heads` being the numbers
            of query and key/value heads; `seen` has `"qkv"` and `"out"`.
        mlp: `(x, gamma, stored, activation, eps)` to the block's output.
        qkv: `(x, gamma, stored, options)` to the fused projection; the options are
            those of rotary embedding and heads.
        out: `(attention, stored)`, heads `[B, N, D, S]`, to `[B, S, H]`.
    """

    mode: str
    calibrated: bool
    encode_mlp: Callable[..., Mapping[str, Stored]]
    encode_attention: Callable[..., Mapping[str, Stored]]
    mlp: Callable[..., jax.Array]
    qkv: Callable[..., jax.Array]
    out: Callable[..., jax.Array]


def columns(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """fp8 codes of `[..., in, out]` and a float32 scale for each column."""
    wide = weight.astype(jnp.float32)
    scale = unit(jnp.max(jnp.abs(wide), -2))
    return saturate(wide / scale[..., None, :]), scale


def whole(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """fp8 codes of `[..., in, out]` and one float32 scale, `[..., 1]`."""
    wide = weight.astype(jnp.float32)
    rows = wide.reshape(*wide.shape[:-2], -1)
    scale = unit(jnp.max(jnp.abs(rows), -1, keepdims=True))
    return saturate(wide / scale[..., None]), scale


def unit(magnitude: jax.Array) -> jax.Array:
    """The float32 scale under which `magnitude` is fp8's largest value; 1 for zero."""
    scale = magnitude.astype(jnp.float32) / largest(E4M3)
    return jnp.where(scale > 0, scale, 1)


def lanes(scale: Any) -> jax.Array:
    """The scale `[n]` as the macros take it, `[128, n]` of equal rows."""
    return jnp.broadcast_to(scale, (LANES, scale.shape[-1]))


def split_columns(weight: jax.Array, heads: tuple[int, int]) -> list[jax.Array]:
    """The query, key and value columns of a fused weight."""
    query, group = heads
    head_dim = weight.shape[-1] // (query + 2 * group)
    return jnp.split(weight, [query * head_dim, (query + group) * head_dim], -1)
