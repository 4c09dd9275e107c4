"""Models with quantized projections: layers, calibration, training, generation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import neuronjax
from neuronjax import nn
from neuronjax.models import Llama, LlamaConfig
from neuronjax.nn.quantization import MODES, QuantizedAttention, QuantizedMLP
from neuronjax.nn.quantization.calibrate import calibrate
from neuronjax.sharding.placement import place

CONFIG = LlamaConfig(
    vocab_size=61,
    d_model=32,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq=256,
)
# The error of a block's output, root mean square relative to the output's: fp8 keeps 4
# bits of a value, fp4 2.
ERROR = {"row-fp8": 0.06, "static-fp8": 0.08, "mxfp8": 0.12, "mxfp4": 0.3}


def tokens(batch=2, seq=6):
    return jnp.arange(batch * seq, dtype=jnp.int32).reshape(batch, seq) % 61


def decoder(**options):
    return Llama(CONFIG, rngs=nnx.Rngs(0), **options)


def quantized(model, mode):
    seen = [tokens(2, 16)] if mode == "static-fp8" else None
    return neuronjax.quantize(model, mode, calibration=seen)


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def models(mode):
    model = decoder()
    return model, quantized(model, mode)


def deviation(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean())


def relative(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.abs(got - wanted).max() / np.abs(wanted).max()


def dequantized(layer, name):
    """Weight `name` of a row-fp8 layer, from its codes alone."""
    codes = np.asarray(layer.codes[name][...]).astype(np.float64)
    return codes * np.asarray(layer.codes[f"{name}_scale"][...], np.float64)


def test_every_block_is_replaced_and_close_to_what_it_was(mode, models):
    model, new = models
    for old, layer in zip(model.layers, new.layers, strict=True):
        assert isinstance(layer.mlp, QuantizedMLP)
        assert isinstance(layer.attention, QuantizedAttention)
        x = jax.random.normal(jax.random.key(1), (2, 6, CONFIG.d_model))
        assert 0 < deviation(layer.mlp(x), old.mlp(x)) < ERROR[mode]
        cos, sin = nn.rotary_tables(jnp.arange(12).reshape(2, 6) % 6, CONFIG.head_dim)
        got, wanted = (a(x, cos, sin) for a in (layer.attention, old.attention))
        assert 0 < deviation(got, wanted) < ERROR[mode]


def test_a_row_fp8_weight_is_within_half_a_step():
    layer = nn.MLP(32, 64, rngs=nnx.Rngs(0))
    new = neuronjax.quantize(layer, "row-fp8")
    for name in ("gate", "up", "down"):
        weight = np.asarray(getattr(layer, name)[...], np.float64)
        scale = np.asarray(new.codes[f"{name}_scale"][...], np.float64)
        np.testing.assert_allclose(scale, np.abs(weight).max(0) / 240, rtol=1e-6)
        step = np.maximum(np.abs(weight) * 2**-4, scale * 2**-10)
        assert (np.abs(dequantized(new, name) - weight) <= step * 1.0001).all()


def test_a_row_fp8_block_is_the_block_on_the_dequantized_weights():
    """Few rows: nothing is rounded but the weights."""
    layer = nn.MLP(32, 64, rngs=nnx.Rngs(0))
    new = neuronjax.quantize(layer, "row-fp8")
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 6, 32)), np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    gate, up = (normed @ dequantized(new, name) for name in ("gate", "up"))
    wanted = (gate / (1 + np.exp(-gate)) * up) @ dequantized(new, "down")
    assert relative(jax.jit(lambda x: new(x))(jnp.float32(x)), wanted) < 1e-5


def _block_errors(weight, kind, closest):
    """The summed squared error of each block of 8 containers of a column."""
    packed, scale = neuronjax.quantize_mx_weight(
        weight, "contiguous", kind, closest=closest
    )
    values = np.asarray(neuronjax.unpack_mx(packed.T, kind), np.float64).T
    powers = 2.0 ** (np.asarray(scale, np.float64) - 127)
    lost = values * np.repeat(powers, 32, 0) - np.asarray(weight, np.float64)
    return (lost.reshape(16, 32, -1) ** 2).sum(1)


@pytest.mark.parametrize("kind", ["float8_e4m3fn_x4", "float4_e2m1fn_x4"])
def test_the_closest_scale_is_never_worse_and_sometimes_better(kind):
    weight = jax.random.normal(jax.random.key(0), (512, 8))

    floor, best = (_block_errors(weight, kind, closest) for closest in (False, True))
    assert (best <= floor * (1 + 1e-6)).all() and (best < floor * 0.99).any()


def test_a_residual_is_added(mode, models):
    layer = models[1].layers[0].mlp
    x = jax.random.normal(jax.random.key(1), (2, 6, CONFIG.d_model))
    np.testing.assert_allclose(layer(x, residual=x), layer(x) + x, rtol=1e-5, atol=1e-5)


def test_the_macros_of_a_quantized_model_are_the_same(models):
    old, new = (neuronjax.trace(model, tokens()) for model in models)
    for name in ("MLP", "QKV", "OutputProjection"):
        assert new.count(name) == old.count(name) == CONFIG.num_layers


def test_stacked_layers_say_the_same(mode, models):
    new = models[1]
    wanted, stacked = new(tokens()), new.stacked()
    assert stacked.scan_layers and not stacked.unstacked().scan_layers
    for model in (stacked, stacked.unstacked()):
        np.testing.assert_allclose(model(tokens()), wanted, rtol=1e-4, atol=1e-4)
    if mode != "static-fp8":
        scanned = quantized(decoder().stacked(), mode)
        np.testing.assert_allclose(scanned(tokens()), wanted, rtol=1e-4, atol=1e-4)


def test_decoding_agrees_with_prefill(mode, models):
    """Few rows in both, so that both round alike."""
    new = models[1].stacked()
    lengths = jnp.array([5, 5], jnp.int32)
    _, cache = new.prefill(tokens()[:, :5], lengths, 64)
    got, _ = new.decode(tokens()[:, 5:], cache)
    wanted = new(tokens())[:, 5:]
    assert relative(got, wanted) < (1e-4 if "fp8" in mode and "mx" not in mode else 0.1)
    assert len(new.generate([[1, 2, 3]], max_tokens=4)[0]) == 4


def test_only_norms_and_embeddings_train(mode, models):
    """Codes and scales are constants; gradients pass through them to what is below."""
    new = nnx.merge(*nnx.split(models[1]))
    optimizer = nnx.Optimizer(new, optax.sgd(1e-2), wrt=nnx.Param)
    codes = jax.tree.map(jnp.copy, nnx.state(new, nnx.Not(nnx.Param)))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(
                model(tokens())[:, :-1], tokens()[:, 1:]
            ).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes its step count
            optimizer.update(model, gradients)
        return value, gradients

    first, gradients = step(new, optimizer)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients))
    for _ in range(8):
        last, _ = step(new, optimizer)
    assert last < first
    same = jax.tree.map(
        lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)),
        codes,
        nnx.state(new, nnx.Not(nnx.Param)),
    )
    assert all(jax.tree.leaves(same))


def test_a_quantized_model_runs_on_a_mesh(mode, models):
    new = models[1]
    wanted = new(tokens())
    copy = nnx.merge(*nnx.split(new))
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    place(copy, mesh)
    got = nnx.jit(lambda model, t: model(t))(copy, tokens())
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


def test_calibration_sees_the_largest_magnitudes():
    model = decoder()
    batches = [tokens(2, 8), tokens(2, 8)[::-1] + 3]
    seen = calibrate(model, batches, lambda model, x: model(x))
    layer, cos_sin = model.layers[0], nn.rotary_tables(jnp.arange(8)[None], 8)
    cos, sin = (jnp.broadcast_to(t, (2, 8, 8)) for t in cos_sin)
    tops = {"qkv": 0.0, "gate_up": 0.0, "down": 0.0}
    for batch in batches:
        x = model.embedding[...][batch]
        h = x + layer.attention(x, cos, sin)
        for name, value in (("qkv", x), ("gate_up", h)):
            value = np.asarray(value, np.float64)
            normed = value / np.sqrt((value**2).mean(-1, keepdims=True) + 1e-5)
            tops[name] = max(tops[name], np.abs(normed).max())
        gate, up = (normed @ np.asarray(w[...]) for w in (layer.mlp.gate, layer.mlp.up))
        tops["down"] = max(tops["down"], np.abs(gate / (1 + np.exp(-gate)) * up).max())
    found = {**seen["layers", 0, "attention"], **seen["layers", 0, "mlp"]}
    for name, top in tops.items():
        np.testing.assert_allclose(found[name], top, rtol=1e-4)
    assert set(seen) == {
        ("layers", i, kind) for i in range(2) for kind in ("attention", "mlp")
    }


def test_the_model_that_was_given_is_not_changed():
    model = decoder()
    wanted = model(tokens())
    quantized(model, "static-fp8")
    assert isinstance(model.layers[0].mlp, nn.MLP)
    np.testing.assert_array_equal(model(tokens()), wanted)


def test_a_layer_alone_is_quantized_too():
    layer = nn.MLP(32, 64, rngs=nnx.Rngs(0))
    assert isinstance(neuronjax.quantize(layer, "row-fp8"), QuantizedMLP)


def test_a_zero_weight_stays_zero(mode):
    layer = nn.MLP(32, 64, rngs=nnx.Rngs(0))
    layer.up[...] = jnp.zeros_like(layer.up[...])
    seen = [jnp.ones((1, 2, 32))] if mode == "static-fp8" else None
    new = neuronjax.quantize(layer, mode, calibration=seen)
    out = new(jax.random.normal(jax.random.key(0), (1, 3, 32)))
    np.testing.assert_array_equal(out, jnp.zeros_like(out))


class Holder(nnx.Module):
    """A layer in two places, and layers in other containers."""

    def __init__(self):
        layers = [nn.MLP(32, 64, rngs=nnx.Rngs(i)) for i in range(3)]
        self.first = self.again = layers[0]
        self.pair = nnx.data((layers[1], layers[0]))
        self.by_name = nnx.Dict(b=layers[2])

    def __call__(self, x):
        layers = (self.first, self.again, *self.pair, self.by_name["b"])
        return sum(layer(x) for layer in layers)


def test_a_shared_layer_stays_shared_and_every_container_is_searched(mode):
    x = jax.random.normal(jax.random.key(0), (1, 3, 32))
    model = Holder()
    new = neuronjax.quantize(
        model, mode, calibration=[x] if mode == "static-fp8" else None
    )
    assert new.first is new.again is new.pair[1]
    found = (new.first, new.pair[0], new.by_name["b"])
    assert all(isinstance(layer, QuantizedMLP) for layer in found)
    assert isinstance(model.pair[0], nn.MLP)
    assert 0 < deviation(new(x), model(x)) < ERROR[mode]


@pytest.mark.parametrize("mode", ["row-fp8", "static-fp8"])
def test_tiny_weights_keep_their_digits(mode):
    layer = nn.MLP(32, 64, rngs=nnx.Rngs(0))
    layer.down[...] = layer.down[...] * 1e-9
    x = jax.random.normal(jax.random.key(0), (1, 3, 32))
    seen = [x] if mode == "static-fp8" else None
    new = neuronjax.quantize(layer, mode, calibration=seen)
    assert deviation(new(x), layer(x)) < ERROR[mode]


class Sub(nn.MLP):
    """A layer that `quantize` cannot know."""


class Wrapper(nnx.Module):
    def __init__(self, model):
        self.model = model


def not_finite():
    layer = nn.MLP(32, 64, rngs=nnx.Rngs(0))
    layer.up[...] = layer.up[...].at[0, 0].set(jnp.nan)
    return layer


def static(model, calibration, **options):
    return neuronjax.quantize(model, "static-fp8", calibration=calibration, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: neuronjax.quantize(m, "int3"), "mode must be one of row-fp8"),
        (lambda m: neuronjax.quantize(m, ["row-fp8"]), "mode must be one of row-fp8"),
        (
            lambda m: neuronjax.quantize(m, "row-fp8", call=lambda m, x: m(x)),
            "call is for calibration, which mode row-fp8 lacks",
        ),
        (lambda m: static(m, 5), "calibration must be an iterable of inputs, got 5"),
        (lambda m: static(m, []), "must run every layer, got nothing for layers.0"),
        (
            lambda m: static(m.layers[0].mlp, [jnp.full((1, 1, 32), jnp.inf)]),
            "calibration must be finite everywhere, got (nan|inf)",
        ),
        (
            lambda m: static(
                Wrapper(m.stacked()), [tokens()], call=lambda w, x: w.model(x)
            ),
            "expected a list of layers",
        ),
        (
            lambda m: neuronjax.quantize(
                Wrapper(Sub(32, 64, rngs=nnx.Rngs(0))), "row-fp8"
            ),
            "expected nn.MLP itself at model, got its subclass Sub",
        ),
        (
            lambda m: neuronjax.quantize(not_finite(), "row-fp8"),
            "expected finite weights, got NaN or infinity in model",
        ),
        (lambda m: neuronjax.quantize(m, "static-fp8"), "needs calibration, got none"),
        (
            lambda m: neuronjax.quantize(m, "row-fp8", calibration=[tokens()]),
            "takes no calibration, got some",
        ),
        (
            lambda m: neuronjax.quantize(
                m.stacked(), "static-fp8", calibration=[tokens()]
            ),
            "expected a list of layers",
        ),
        (
            lambda m: neuronjax.quantize(m.norm, "row-fp8"),
            "expected a model with nn.MLP or nn.Attention layers, got RMSNorm",
        ),
        (
            lambda m: neuronjax.quantize(neuronjax.quantize(m, "row-fp8"), "row-fp8"),
            "got Llama without any",
        ),
    ],
)
def test_a_mistake_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(decoder())
