"""The feed-forward block from its papers, and operands to try it on."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import neuronjax
from neuronjax.emit import mlp_fused_add_kernel
from neuronjax.primitives.mlp.facts import ARGUMENTS, LIMITS
from neuronjax.primitives.options import NORM_CONFIG
from tests.arrays import array

EPS = 1e-3
CLAMPS = dict(
    gate_clamp_upper_limit=0.4,
    gate_clamp_lower_limit=-0.3,
    up_clamp_upper_limit=0.5,
    up_clamp_lower_limit=-0.6,
)
NORMS = tuple(kind.name for kind in NORM_CONFIG)
ADDS = ("none", "prologue", "stored", "epilogue")
ACTIVATIONS = ("SiLU", "GELU", "GELU_Tanh_Approx", "Swish")
# Each norm with each form of addition, with and without a gate; the rest takes turns.
COMBINATIONS = [
    (norm, add, skip, ACTIVATIONS[i % 4], i % 3 == 0, i % 2 == 0)
    for i, (norm, add, skip) in enumerate(itertools.product(NORMS, ADDS, (False, True)))
]
PLAIN = ("NO_NORM", "none", False, "SiLU", False, False)
FULL = ("RMS_NORM", "stored", False, "SiLU", False, True)
EPILOGUE = ("LAYER_NORM", "epilogue", False, "GELU", False, True)


def act(x, kind):
    """Hendrycks and Gimpel 2016, section 2; Ramachandran et al. 2017 for SiLU."""
    if kind == "GELU":
        return x * (1 + jax.scipy.special.erf(x / math.sqrt(2))) / 2
    if kind == "GELU_Tanh_Approx":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return x * (1 + jnp.tanh(inner)) / 2
    return x / (1 + jnp.exp(-(1.702 if kind == "Swish" else 1.0) * x))


def norm(x, kind, gamma, beta):
    if kind == "NO_NORM":
        return x
    if kind == "LAYER_NORM":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    x = x if gamma is None else x * gamma
    return x if beta is None else x + beta


def clamp(x, call, which):
    upper, lower = (
        call.get(f"{which}_clamp_{side}_limit") for side in ("upper", "lower")
    )
    x = x if upper is None else jnp.minimum(x, upper)
    return x if lower is None else jnp.maximum(x, lower)


def equations(call, residual=None):
    """Shazeer 2020, equation 5, and what `mlp` adds: `[out]` or `[out, added]`."""
    x0 = call["hidden_tensor"]
    if "fused_add_tensor" in call:
        x0 = x0 + call["fused_add_tensor"]
    get = call.get
    kind = get("normalization_type", "NO_NORM")
    gain, offset = get("normalization_weights_tensor"), get("normalization_bias_tensor")
    x = norm(x0, kind, gain, offset)
    u = x @ call["up_proj_weights_tensor"] + get("up_proj_bias_tensor", 0.0)
    u, kind = clamp(u, call, "up"), get("activation_fn", "SiLU")
    if get("skip_gate_proj"):
        middle = act(u, kind)
    else:
        g = x @ call["gate_proj_weights_tensor"] + get("gate_proj_bias_tensor", 0.0)
        middle = act(clamp(g, call, "gate"), kind) * u
    y = middle @ call["down_proj_weights_tensor"] + get("down_proj_bias_tensor", 0.0)
    y = y if residual is None else y + residual
    return [y, x0] if get("store_fused_add_result") else [y]


def draw(*shape, seed=0, dtype="float64"):
    return array(np.random.default_rng(seed).normal(size=shape), dtype)


def call_of(combination, lead=(2, 3), d_model=12, d_ff=7, dtype="float64"):
    """Arrays and settings of `mlp` for one of `COMBINATIONS`, and a residual."""
    norm, add, skip, activation, clamps, biases = combination
    shapes = dict(
        hidden_tensor=(*lead, d_model),
        gate_proj_weights_tensor=(d_model, d_ff),
        up_proj_weights_tensor=(d_model, d_ff),
        down_proj_weights_tensor=(d_ff, d_model),
    )
    if norm in ("RMS_NORM", "LAYER_NORM"):
        shapes["normalization_weights_tensor"] = (1, d_model)
    if norm == "LAYER_NORM" and biases:
        shapes["normalization_bias_tensor"] = (1, d_model)
    if biases:
        shapes |= dict(
            up_proj_bias_tensor=(1, d_ff), down_proj_bias_tensor=(1, d_model)
        )
        shapes |= {} if skip else dict(gate_proj_bias_tensor=(1, d_ff))
    if add in ("prologue", "stored"):
        shapes["fused_add_tensor"] = (*lead, d_model)
    arrays = {
        key: draw(*shape, seed=i, dtype=dtype)
        / (shape[0] ** 0.5 if "proj_weights" in key else 1)
        for i, (key, shape) in enumerate(shapes.items())
    }
    limits = {k: v for k, v in CLAMPS.items() if not (skip and k.startswith("gate"))}
    settings = dict(
        normalization_type=norm,
        activation_fn=activation,
        skip_gate_proj=skip,
        store_fused_add_result=add == "stored",
        eps=EPS,
        **(limits if clamps else {}),
    )
    residual = draw(*lead, d_model, seed=99, dtype=dtype) if add == "epilogue" else None
    return arrays, settings, residual


def emitted(arrays, settings, residual):
    """The call by `mlp`, or with a residual by `mlp_fused_add_kernel`."""
    if residual is None:
        return neuronjax.mlp(**arrays, **settings)
    ours = ARGUMENTS["mlp_fused_add_kernel"] | {key: key for key in (*LIMITS, "eps")}
    theirs = ARGUMENTS["mlp"] | {key: key for key in (*LIMITS, "eps")}
    renamed = {theirs[key]: name for key, name in ours.items() if key in theirs}
    given = {renamed[k]: v for k, v in (arrays | settings).items() if k in renamed}
    out = mlp_fused_add_kernel(
        **given, mlp_out=jnp.full_like(residual, jnp.nan), attn_out=residual
    )
    return [out]


def ids(combination):
    return "-".join(map(str, combination))


def fp8(x, kind=ml_dtypes.float8_e4m3, limit=240.0):
    """The nearest fp8 values, held in float64; beyond `limit` the limit."""
    return np.clip(x, -limit, limit).astype(kind).astype(np.float64)


def quantized_equations(call, prefill):
    """The quantized block in float64 NumPy, from the equations of `mlp`'s docstring."""
    get = lambda key: _float64(call.get(key))  # noqa: E731
    is_row = call["quantization_type"] == "ROW"
    sg, su, sd, s_in, s_down = (
        scale[:1]
        for scale in map(
            get,
            ("gate_w_scale", "up_w_scale", "down_w_scale")
            + ("gate_up_in_scale", "down_in_scale"),
        )
    )
    x0 = _dequantized_rows(call["hidden_tensor"], is_row, s_in)
    if call.get("fused_add_tensor") is not None:
        x0 = x0 + get("fused_add_tensor")
    kind = call.get("normalization_type", "NO_NORM")
    with jax.enable_x64(True):
        gains = get("normalization_weights_tensor"), get("normalization_bias_tensor")
        given = [None if g.size == 0 else jnp.asarray(g) for g in gains]
        x = np.asarray(norm(jnp.asarray(x0), kind, *given))

        def product(which, scale):
            z = x @ get(f"{which}_proj_weights_tensor") * scale
            z = z + (get(f"{which}_proj_bias_tensor") if _has(call, which) else 0)
            return clamp(jnp.asarray(z), call, which)

        middle = product("up", su)
        activation = call.get("activation_fn", "SiLU")
        if call.get("skip_gate_proj"):
            middle = np.asarray(act(middle, activation))
        else:
            middle = np.asarray(act(product("gate", sg), activation) * middle)
    bound = call.get("quant_clipping_bound", 0.0)
    if prefill and is_row:
        middle = np.clip(middle, -bound, bound) if bound else middle
        s = np.maximum(np.abs(middle).max(-1, keepdims=True) / 240, 1e-6)
        middle = fp8(middle / s) * s
    elif prefill:
        middle = fp8(middle / s_down) * s_down
    y = middle @ get("down_proj_weights_tensor") * sd
    y = y + (get("down_proj_bias_tensor") if _has(call, "down") else 0)
    return [y, x0] if call.get("store_fused_add_result") else [y]


def _has(call, which):
    return call.get(f"{which}_proj_bias_tensor") is not None


def _float64(x):
    return np.zeros((0, 0)) if x is None else np.asarray(x).astype(np.float64)


def _dequantized_rows(hidden, is_row, scale):
    hidden = np.asarray(hidden)
    if hidden.dtype.itemsize > 1:
        return hidden.astype(np.float64)
    if not is_row:
        return hidden.astype(np.float64) * scale
    raw = np.ascontiguousarray(hidden.view(np.uint8)[..., -4:])
    return hidden[..., :-4].astype(np.float64) * raw.view("<f4").astype(np.float64)


def quantized_call(kind, combination=PLAIN, codes="float8_e4m3", **sizes):
    """`call_of` with fp8 weights and scales: arrays, settings and a residual."""
    arrays, settings, residual = call_of(combination, **sizes)
    d_model, d_ff = arrays["up_proj_weights_tensor"].shape
    columns = dict(gate=d_ff, up=d_ff, down=d_model)
    rng = np.random.default_rng(5)
    for which, width in columns.items():
        key = f"{which}_proj_weights_tensor"
        arrays[key] = (60 * arrays[key]).astype(codes)
        scale = rng.uniform(0.5, 2, (1, width if kind == "ROW" else 1)) / 60
        arrays[f"{which}_w_scale"] = jnp.tile(jnp.asarray(scale, jnp.float32), (128, 1))
    if kind != "ROW":
        for key, scale in (("gate_up_in_scale", 1 / 64), ("down_in_scale", 1 / 128)):
            arrays[key] = jnp.full((128, 1), scale, jnp.float32)
    return arrays, settings | dict(quantization_type=kind), residual
