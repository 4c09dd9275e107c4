"""The feed-forward block from its papers, and operands to try it on."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import neuronjax
from neuronjax.emit import mlp_fused_add_kernel
from neuronjax.primitives.mlp.facts import ARGUMENTS, LIMITS
from neuronjax.primitives.options import NORM_CONFIG

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
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


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
