"""What the macros of QKV trace: the leaf that a config asks for, and its outputs."""

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.qkv import plain, projection, quantized, quantized_plain

UNTILED, TILED, BACKWARD = "QKV", "TiledNativeKernelQKV", "QKVBwd"
QUANTIZED = "QKV (row fp8)"
BLOCK_SCALED = "QKV (block-scaled fp8)"
GRADIENTS = tuple("hidden w gamma beta bias mlp_prev attn_prev cos sin".split())


def leaf(*operands, name, is_tiled, **config):
    """The leaf of a config, on its operands: quantized ones where it says so."""
    config |= dict(name=name, is_tiled=is_tiled)
    if "quantization" in config:
        return quantized.qkv_quantized_fwd(*operands, **config)
    whole_or_tiles = projection.qkv_tiled_fwd if is_tiled else projection.qkv_fwd
    del config["is_tiled"]
    return whole_or_tiles(*operands, **config)


def plain_leaf(*operands, **config):
    """The same, straight from the equations."""
    if "quantization" in config:
        return quantized_plain.qkv_quantized_plain(*operands, **config)
    return plain.qkv_plain(*operands, **config)


def output_names(*, norm, fused_add, kv_dtype=None, **_):
    """The names of the outputs that a config gives."""
    stored = () if fused_add == "none" else ("fused_hidden",)
    statistics = {"none": (), "layer": ("mean", "rstd")}.get(norm, ("rstd",))
    caches = () if kv_dtype is None else ("k_cache", "v_cache")
    return ("out", *stored, *statistics, *caches)


def live_operands(operands, config):
    """The operands that have a gradient: a quantized weight is a constant."""
    constant = {"w"} if config.get("quantization", "NONE") != "NONE" else set()
    return tuple(
        key
        for key, x in zip(GRADIENTS, operands, strict=False)
        if x is not None and key not in constant
    )


def no_gradient(x: jax.Array | None):
    """Zeros for a constant; nothing for what is absent, integer or fp8."""
    if x is None:
        return None
    return jnp.zeros_like(x) if is_differentiable(x.dtype) else None


def backward_leaf(*args, live, **config):
    """The gradients of the operands `live`."""
    is_quantized = "quantization" in config
    bwd = quantized.qkv_quantized_bwd if is_quantized else projection.qkv_bwd
    return tuple(grad for grad in bwd(*args, **config) if grad is not None)


def plain_backward_leaf(*args, name, live, **config):
    """The same, straight from the equations."""
    if "quantization" in config:
        return _quantized_plain_backward(args, live, config)
    grads = plain.qkv_bwd_plain(*args, name=name, **config)
    return tuple(grad for grad in grads if grad is not None)


def _quantized_plain_backward(args, live, config):
    """The derivative of the plain form, by the operands that have one."""
    count = quantized.OPERANDS
    operands, rest = args[:count], args[count:]
    outs, cotangents = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    where = [GRADIENTS.index(key) for key in live]
    floats = [i for i, out in enumerate(outs) if is_differentiable(out.dtype)]

    def run(*moved):
        new = dict(zip(where, moved, strict=True))
        given = [new.get(i, x) for i, x in enumerate(operands)]
        found = quantized_plain.qkv_quantized_plain(*given, name=UNTILED, **config)
        return [found[i] for i in floats]

    seeds = [
        jnp.zeros_like(outs[i]) if cotangents[i] is None else cotangents[i]
        for i in floats
    ]
    return jax.vjp(run, *[operands[i] for i in where])[1](seeds)
