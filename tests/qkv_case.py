"""Operands, options and the float64 reference of the tests of QKV."""

import jax
import numpy as np

import neuronjax
from neuronjax import MemrefTile
from neuronjax.primitives import registry
from tests.arrays import array

FAMILY = registry.resolve_family("QKV")
# The order of the macro's operands.
ORDER = (
    "input fused_qkv_weights gamma_norm_weights layer_norm_bias bias mlp_prev "
    "attention_prev cos_cache sin_cache"
).split()
NORMS = ["NO_NORM", "RMS_NORM", "LAYER_NORM", "RMS_NORM_SKIP_GAMMA"]


def operands(shape=(2, 3, 6), heads=(2, 1, 4), dtype="float32", scale=1.0, seed=0):
    """Every array operand of `qkv`, by its argument name."""
    rng = np.random.default_rng(seed)
    batch, seq, width = shape
    columns = (heads[0] + 2 * heads[1]) * heads[2]
    shapes = dict(
        input=shape,
        fused_qkv_weights=(width, columns),
        bias=(1, columns),
        gamma_norm_weights=(1, width),
        layer_norm_bias=(1, width),
        mlp_prev=shape,
        attention_prev=shape,
        cos_cache=(batch, seq, heads[2]),
        sin_cache=(batch, seq, heads[2]),
    )
    return {k: array(scale * rng.standard_normal(s), dtype) for k, s in shapes.items()}


def call(x, heads, norm="RMS_NORM", layout="BSD", add=True, rope=True, eps=1e-6):
    """The arrays that a combination of options uses, and the options."""
    names = ["input", "fused_qkv_weights", "bias"]
    names += ["gamma_norm_weights"] if norm in ("RMS_NORM", "LAYER_NORM") else []
    names += ["layer_norm_bias"] if norm == "LAYER_NORM" else []
    names += ["mlp_prev", "attention_prev"] if add else []
    names += ["cos_cache", "sin_cache"] if rope else []
    options = dict(
        fused_norm_type=norm,
        output_layout=layout,
        fused_residual_add=add,
        fused_rope=rope,
        norm_eps=eps,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        d_head=heads[2],
    )
    return {name: x[name] for name in names}, options


def reference(arrays, options, hidden_actual=None, codes=lambda rows: rows):
    """The equations of the module's docstring, one row at a time, in float64.

    `codes` is what a quantization makes of the normed rows.
    """
    a = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    nq, nkv, d = (options[k] for k in ("num_q_heads", "num_kv_heads", "d_head"))
    x = a["input"] + a.get("mlp_prev", 0) + a.get("attention_prev", 0)
    norm, eps = options["fused_norm_type"], options["norm_eps"]
    rows = x
    if norm == "LAYER_NORM":
        rows = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    elif norm != "NO_NORM":
        mean = (x**2).sum(-1, keepdims=True) / (hidden_actual or x.shape[-1])
        rows = x / np.sqrt(mean + eps)
    rows = rows * a.get("gamma_norm_weights", 1) + a.get("layer_norm_bias", 0)
    y = codes(rows) @ a["fused_qkv_weights"] + a.get("bias", 0)
    heads = y.reshape(*y.shape[:2], nq + 2 * nkv, d)
    if "cos_cache" in a:
        for b, s, n in np.ndindex(*heads.shape[:3]):
            if n < nq + nkv:
                head, half = heads[b, s, n].copy(), d // 2
                turned = np.concatenate([-head[half:], head[:half]])
                cos, sin = a["cos_cache"][b, s], a["sin_cache"][b, s]
                heads[b, s, n] = head * cos + turned * sin
    if options["output_layout"] == "NBSd":
        return heads.transpose(2, 0, 1, 3), x
    return heads.reshape(y.shape), x


def jitted(options):
    return jax.jit(lambda arrays: neuronjax.qkv_cte(**arrays, **options))


def tiles_of(arrays):
    axes = dict(input=2, fused_qkv_weights=0, cos_cache=2, sin_cache=2, mlp_prev=2)
    axes |= dict(attention_prev=2)
    return {k: MemrefTile.from_tensor(v, axes.get(k, 1)) for k, v in arrays.items()}


RENAMED = dict(
    input="hidden",
    fused_qkv_weights="qkv_w",
    bias="qkv_bias",
    gamma_norm_weights="norm_w",
    layer_norm_bias="norm_bias",
    mlp_prev="mlp_out",
    attention_prev="attn_out",
    fused_norm_type="norm_type",
    norm_eps="eps",
)


def emitter_arguments(arrays, options):
    dropped = ("fused_residual_add", "fused_rope")
    options = {k: v for k, v in options.items() if k not in dropped}
    return {RENAMED.get(k, k): v for k, v in (arrays | options).items()}
