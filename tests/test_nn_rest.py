"""Layers of the linear family, the convolutions and the loss: exact twins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import nn


def _draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _stirred(layer):
    """The layer with parameters that are neither one nor zero."""
    state = nnx.state(layer)
    leaves, tree = jax.tree.flatten(state)
    moved = [x + _draw(*x.shape, seed=i, dtype=x.dtype) for i, x in enumerate(leaves)]
    nnx.update(layer, jax.tree.unflatten(tree, moved))
    return layer


@pytest.mark.parametrize("norm", ["NO_NORM", "RMS_NORM", "LAYER_NORM"])
def test_fused_linear_is_the_twin_of_the_function(norm):
    layer = _stirred(
        nn.FusedLinear(
            6, 5, scale=True, norm_type=norm, activation="GELU", rngs=nnx.Rngs(0)
        )
    )
    x, residual = _draw(2, 3, 6), _draw(2, 3, 5, seed=1)
    wanted = neuronjax.fused_linear(
        x,
        layer.kernel[...],
        layer.bias[...],
        residual,
        w_scale=layer.scale[...],
        norm_type=norm,
        gamma=None if norm == "NO_NORM" else layer.gamma[...],
        beta=layer.beta[...] if norm == "LAYER_NORM" else None,
        activation_fn="GELU",
    )
    np.testing.assert_array_equal(layer(x, residual), wanted)
    seen = neuronjax.trace(lambda x: layer(x, residual), x)
    assert (seen.names, seen.count("FusedLinear")) == (("FusedLinear",), 1)


def test_fused_linear_has_only_the_parameters_that_it_uses():
    bare = nn.FusedLinear(6, 5, bias=False, rngs=nnx.Rngs(0))
    assert list(nnx.to_pure_dict(nnx.state(bare))) == ["kernel"]
    np.testing.assert_allclose(bare(jnp.eye(6)), bare.kernel[...], rtol=1e-6)


def test_convolutions_are_the_twins_of_the_functions():
    x = _draw(2, 3, 9)
    options: dict[str, Any] = dict(stride=2, padding=(2, 1), dilation=2)
    layer = _stirred(nn.Conv1D(3, 4, 3, **options, activation="SiLU", rngs=nnx.Rngs(0)))
    weights = layer.filters[...], layer.bias[...]
    wanted = neuronjax.conv1d(x, *weights, **options, activation_fn="SiLU")
    np.testing.assert_array_equal(layer(x), wanted)
    bare = nn.Conv1D(3, 4, 3, bias=False, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(bare(x), neuronjax.conv1d(x, bare.filters[...]))


def test_a_causal_depthwise_layer_is_the_twin_of_the_function():
    layer = nn.DepthwiseConv1D(3, 4, stride=2, padding=(3, 0), rngs=nnx.Rngs(0))
    x = _draw(2, 3, 1, 9)
    wanted = neuronjax.depthwise_conv1d_implicit_gemm(
        x,
        layer.filters[...],
        ((0, 0), (3, 0)),
        (1, 2),
        feature_group_count=3,
    )
    np.testing.assert_array_equal(layer(x), wanted)
    later = layer(x.at[..., 5:].set(0))
    np.testing.assert_array_equal(later[..., :3], wanted[..., :3])


def test_depthwise_filters_start_at_the_scale_of_their_taps():
    layer = nn.DepthwiseConv1D(512, 4, rngs=nnx.Rngs(0))
    assert abs(float(jnp.std(layer.filters[...])) - 0.5) < 0.03


def test_the_loss_is_the_twin_of_the_function():
    options: dict[str, Any] = dict(ignore_index=-1, label_smoothing=0.1, z_loss=1e-3)
    layer = nn.LinearCrossEntropy(6, 11, **options, rngs=nnx.Rngs(0))
    x, targets = _draw(2, 3, 6), jnp.array([[0, 10, -1], [4, 5, 6]], jnp.int32)
    weights = jnp.abs(_draw(2, 3, seed=1))
    call = lambda x, w: neuronjax.linear_cross_entropy(  # noqa: E731
        x, w, targets, weights=weights, **options
    )
    wanted = jax.value_and_grad(call, (0, 1))(x, layer.kernel[...])
    got, grads = nnx.value_and_grad(
        lambda layer, x: layer(x, targets, weights), argnums=(0, 1)
    )(layer, x)
    np.testing.assert_allclose(got, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(grads[1], wanted[1][0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        grads[0]["kernel"][...], wanted[1][1], rtol=1e-5, atol=1e-7
    )
    logits = np.asarray(x) @ np.asarray(layer.kernel[...])
    np.testing.assert_allclose(layer.logits(x), logits, rtol=1e-5, atol=1e-6)


LAYERS = {
    "linear": (lambda **o: nn.FusedLinear(4, 6, **o), (2, 4)),
    "conv": (lambda **o: nn.Conv1D(4, 6, 3, **o), (2, 4, 5)),
    "depthwise": (lambda **o: nn.DepthwiseConv1D(4, 3, **o), (2, 4, 1, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_dtype_of_the_computation(kind):
    make, shape = LAYERS[kind]
    x = _draw(*shape)
    for dtype in (jnp.bfloat16, jnp.float16):
        layer = make(dtype=dtype, rngs=nnx.Rngs(0))
        assert layer(x).dtype == dtype
        grads = nnx.grad(lambda m: m(x).astype(jnp.float32).sum())(layer)
        kinds = {g.dtype for g in jax.tree.leaves(grads)}
        assert kinds == {jnp.dtype("float32")}
    assert make(rngs=nnx.Rngs(0))(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_partition_names():
    def specs(layer):
        return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))

    linear = nn.FusedLinear(4, 6, norm_type="LAYER_NORM", rngs=nnx.Rngs(0))
    rows = nn.FusedLinear(4, 6, names=("tensor", None), rngs=nnx.Rngs(0))
    assert specs(linear) == dict(
        kernel=P(None, "tensor"), bias=P("tensor"), gamma=P(None), beta=P(None)
    )
    assert specs(rows) == dict(kernel=P("tensor", None), bias=P(None))
    conv = nn.Conv1D(4, 6, 3, rngs=nnx.Rngs(0))
    assert specs(conv) == dict(filters=P(None, None, "tensor"), bias=P("tensor"))
    depthwise = nn.DepthwiseConv1D(4, 3, rngs=nnx.Rngs(0))
    assert specs(depthwise) == dict(filters=P("tensor", None, None, None))
    loss = nn.LinearCrossEntropy(4, 6, rngs=nnx.Rngs(0))
    assert specs(loss) == dict(kernel=P(None, "tensor"))
