"""A bad setting is one clear error where the layer is made."""

import functools
import re

import jax.numpy as jnp
import pytest
from flax import nnx

from neuronjax import nn

RNGS = dict(rngs=nnx.Rngs(0))
MAKE = {
    "RMSNorm": functools.partial(nn.RMSNorm, d_model=8, **RNGS),
    "LayerNorm": functools.partial(nn.LayerNorm, d_model=8, **RNGS),
    "RMSNormQuant": functools.partial(nn.RMSNormQuant, d_model=8, **RNGS),
    "RotaryEmbedding": functools.partial(nn.RotaryEmbedding, head_dim=4),
    "QKV": functools.partial(
        nn.QKV, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, **RNGS
    ),
    "OutputProjection": functools.partial(
        nn.OutputProjection, num_heads=2, head_dim=4, d_model=8, **RNGS
    ),
    "Attention": functools.partial(
        nn.Attention, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, **RNGS
    ),
    "AttentionBlock": functools.partial(
        nn.AttentionBlock, d_model=8, num_heads=2, head_dim=4, **RNGS
    ),
    "MLP": functools.partial(nn.MLP, d_model=8, d_ff=6, **RNGS),
    "FusedLinear": functools.partial(nn.FusedLinear, d_in=8, d_out=6, **RNGS),
    "Router": functools.partial(
        nn.Router, d_model=8, num_experts=4, experts_per_token=2, **RNGS
    ),
    "MoE": functools.partial(
        nn.MoE, d_model=8, d_ff=6, num_experts=4, experts_per_token=2, **RNGS
    ),
    "Conv1D": functools.partial(
        nn.Conv1D, channels_in=3, channels_out=4, taps=2, **RNGS
    ),
    "DepthwiseConv1D": functools.partial(
        nn.DepthwiseConv1D, channels=3, taps=2, **RNGS
    ),
    "CrossEntropy": nn.CrossEntropy,
    "LinearCrossEntropy": functools.partial(
        nn.LinearCrossEntropy, d_model=8, vocab=5, **RNGS
    ),
    "ColumnParallel": functools.partial(nn.ColumnParallel, d_in=8, d_out=6, **RNGS),
    "RowParallel": functools.partial(nn.RowParallel, d_in=8, d_out=6, **RNGS),
    "DecoderStack": functools.partial(
        nn.DecoderStack,
        d_model=8,
        d_ff=6,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        **RNGS,
    ),
}
ACTIVATIONS = "SiLU, GELU, GELU_Tanh_Approx, Swish"
SIZE, FROM_ZERO = "a positive integer", "finite and at least 0"
NORMS = "NO_NORM, RMS_NORM, LAYER_NORM, RMS_NORM_SKIP_GAMMA"
# Layer, bad settings, what is said to be wrong, what was expected.
WRONG = [
    ("RMSNorm", dict(eps=-1e-6), "eps", FROM_ZERO),
    ("RMSNorm", dict(param_dtype="int32"), "param_dtype", "a floating dtype"),
    ("LayerNorm", dict(eps=float("nan")), "eps", FROM_ZERO),
    ("RMSNormQuant", dict(quantization_type="MX"), "", "one of 'ROW', 'STATIC'"),
    ("RotaryEmbedding", dict(head_dim=5), "", "even"),
    ("RotaryEmbedding", dict(theta=0), "", "finite and above 0"),
    ("QKV", dict(num_heads=3, num_kv_heads=2), "", "a multiple of num_kv_heads = 2"),
    ("QKV", dict(norm_type="RMS"), "", NORMS),
    ("QKV", dict(output_layout="NBdS"), "", "one of 'BSD', 'NBSd'"),
    (
        "Attention",
        dict(num_heads=3, num_kv_heads=2),
        "",
        "a multiple of num_kv_heads = 2",
    ),
    ("Attention", dict(sliding_window=0), "", SIZE),
    ("Attention", dict(sliding_window=2, causal=False), "", "None without causal"),
    ("Attention", dict(logits_soft_cap=0.0), "", "finite and above 0"),
    ("Attention", dict(dropout_rate=1.0), "", "at least 0 and below 1"),
    ("AttentionBlock", dict(qk_norm="q"), "", "one of 'pre_rope', 'post_rope', None"),
    ("AttentionBlock", dict(head_dim=3), "", "even"),
    ("MLP", dict(activation="ReLU"), "", ACTIVATIONS),
    ("FusedLinear", dict(activation="ReLU"), "", f"{ACTIVATIONS} or None"),
    ("FusedLinear", dict(norm_type="RMS"), "", NORMS),
    ("Router", dict(experts_per_token=5), "", "at most num_experts = 4"),
    ("Router", dict(act_fn="TANH"), "", "SIGMOID, SOFTMAX"),
    ("MoE", dict(experts_per_token=5), "", "at most num_experts = 4"),
    ("MoE", dict(checkpoint="all"), "", "one of 'store', 'recompute'"),
    ("MoE", dict(shared_d_ff=-1), "", SIZE),
    ("MoE", dict(block_size=0), "", SIZE),
    ("Conv1D", dict(padding=1), "", "two integers from 0 on"),
    ("Conv1D", dict(stride=0), "", SIZE),
    ("DepthwiseConv1D", dict(padding=(-1, 0)), "", "two integers from 0 on"),
    ("CrossEntropy", dict(reduction="avg"), "", "one of 'mean', 'sum', 'none'"),
    ("CrossEntropy", dict(label_smoothing=1.5), "", "from 0 to 1"),
    ("LinearCrossEntropy", dict(z_loss=-1.0), "", FROM_ZERO),
    ("LinearCrossEntropy", dict(block_size=0), "", SIZE),
    ("ColumnParallel", dict(axis=None), "", "the name of a mesh axis"),
    ("RowParallel", dict(num_groups=0), "", SIZE),
    ("DecoderStack", dict(norm_eps=-1), "", FROM_ZERO),
]


@pytest.mark.parametrize(("layer", "settings", "name", "expected"), WRONG)
def test_a_bad_setting_is_refused(layer, settings, name, expected):
    name = name or next(iter(settings))
    wanted = f"nn.{layer}: {name} must be {expected}, got {settings[name]!r}"
    with pytest.raises(ValueError, match="^" + re.escape(wanted) + "$"):
        MAKE[layer](**settings)


def test_settings_that_exclude_each_other_are_refused():
    wanted = "nn.Router: norm_topk_prob must be False without router_pre_norm, got True"
    with pytest.raises(ValueError, match=wanted):
        MAKE["Router"](router_pre_norm=False)
    wanted = "nn.RowParallel: lnc_axis must be the name of another mesh axis or None"
    with pytest.raises(ValueError, match=wanted):
        MAKE["RowParallel"](lnc_axis="tensor")


SIZES = [
    (layer, name)
    for layer, make in MAKE.items()
    for name in getattr(make, "keywords", {})
    if name != "rngs"
]


@pytest.mark.parametrize(("layer", "name"), SIZES)
@pytest.mark.parametrize("size", [0, -2, 2.0, True, None])
def test_a_size_is_a_positive_integer(layer, name, size):
    wanted = f"nn.{layer}: {name} must be a positive integer, got {size!r}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MAKE[layer](**{name: size})


@pytest.mark.parametrize("layer", [n for n in MAKE if n != "CrossEntropy"])
@pytest.mark.parametrize("dtype", ["int32", "float3", jnp.int8])
def test_a_computation_has_a_floating_dtype(layer, dtype):
    wanted = f"nn.{layer}: dtype must be a floating dtype, got "
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MAKE[layer](dtype=dtype)
