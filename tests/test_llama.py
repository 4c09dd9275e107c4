"""Llama: caches, generation, sampling, refusals; on random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import neuronjax
from neuronjax.models.cache import Cache
from neuronjax.models.config import LlamaConfig
from neuronjax.models.generation import _sample
from neuronjax.models.llama import Llama
from neuronjax.models.load import load_llama
from tests.plain_llama import plain_llama

CONFIG = LlamaConfig(
    vocab_size=61,
    d_model=24,
    d_ff=40,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_seq=200,
)


def weights(config=CONFIG, seed=0):
    """Random tensors under Hugging Face names."""
    from neuronjax.models.checkpoint.layout import tensor_shapes

    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(1 if len(shape) == 1 else 0, 0.2, shape).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }


@pytest.fixture(scope="module", params=[False, True], ids=["layers", "scan"])
def model(request):
    return load_llama(CONFIG, weights(), scan_layers=request.param)


def test_logits_equal_the_plain_computation(model):
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, CONFIG.vocab_size)
    held = {k: jnp.asarray(v) for k, v in weights().items()}
    wanted = plain_llama(CONFIG, held, tokens)
    np.testing.assert_allclose(model(tokens), wanted, rtol=1e-4, atol=1e-4)


def test_several_tokens_decode_like_one_by_one(model):
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, CONFIG.vocab_size)
    wanted = model(tokens)
    lengths = jnp.array([3, 3], jnp.int32)
    _, cache = model.prefill(tokens[:, :3], lengths, 16)
    got, cache = model.decode(tokens[:, 3:], cache)
    np.testing.assert_allclose(got, wanted[:, 3:], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(cache.lengths, [7, 7])


def test_a_full_cache_keeps_its_slots(model):
    token = jnp.ones((1, 1), jnp.int32)
    _, cache = model.prefill(jnp.ones((1, 4), jnp.int32), jnp.array([4]), 4)
    _, after = jax.jit(lambda t, c: model.decode(t, c))(token, cache)
    jax.tree.map(np.testing.assert_array_equal, after.layers, cache.layers)


def test_a_cache_is_donated(model):
    graph, state = nnx.split(model)
    _, cache = model.prefill(jnp.ones((1, 4), jnp.int32), jnp.array([4]), 8)
    step = jax.jit(lambda s, t, c: nnx.merge(graph, s).decode(t, c), donate_argnums=2)
    _, new = step(state, jnp.ones((1, 1), jnp.int32), cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache.layers))
    assert isinstance(new, Cache)


def test_greedy_generation_is_the_argmax_of_the_logits(model):
    prompt = [5, 9, 11]
    (made,) = model.generate([prompt], max_tokens=6, eos_ids=())
    for i, token in enumerate(made):
        logits = model(jnp.array([prompt + made[:i]]))[0, -1]
        assert int(logits.argmax()) == token


def test_generation_streams_and_stops_at_the_end_token(model):
    (free,) = model.generate([[5, 9, 11]], max_tokens=6, eos_ids=())
    seen = []
    (made,) = model.generate(
        [[5, 9, 11]], max_tokens=6, eos_ids=free[2:3], stream=seen.append
    )
    stop = free.index(free[2]) + 1
    assert made == free[:stop] and seen == [[t] for t in made]


def test_sampling_is_reproducible_and_depends_on_the_seed(model):
    draw = dict(max_tokens=12, temperature=2.0, eos_ids=())
    first, again, other = (
        model.generate([[1, 2]], seed=seed, **draw) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_top_p_keeps_the_likeliest_tokens():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 400)
    draw = jax.vmap(
        lambda k, p: _sample(logits, k, jnp.float32(1), p, False), (0, None)
    )
    assert set(np.unique(draw(keys, jnp.float32(0.7)))) == {0, 1}
    assert set(np.unique(draw(keys, jnp.float32(0.01)))) == {0}
    share = np.mean(np.asarray(draw(keys, jnp.float32(1.0))) == 0)
    assert 0.4 < share < 0.6


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[]], {}, r"prompts\[0\] must hold ids"),
        ([[1], [61]], {}, r"prompts\[1\] must hold ids in \[0, 61\), got \[61\]"),
        ([], {}, "prompts must be at least one prompt"),
        (
            [[1]],
            dict(max_tokens=200),
            r"prompts\[0\] and max_tokens must fit in max_seq = 200, got 1 \+ 200",
        ),
        ([[1]], dict(max_tokens=-1), "max_tokens must be at least 0"),
        ([[1]], dict(temperature=-1.0), "temperature must be at least 0"),
        ([[1]], dict(top_p=0.0), r"top_p must be in \(0, 1\]"),
    ],
)
def test_bad_generation_settings_are_refused(model, prompts, settings, message):
    with pytest.raises(ValueError, match=f"generate: {message}"):
        model.generate(prompts, **settings)


def test_no_tokens_asked_gives_none(model):
    assert model.generate([[1, 2]], max_tokens=0) == [[]]


def test_weights_of_another_shape_are_refused():
    bad = dict(weights(), **{"model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"expected a parameter of shape \(24,\)"):
        load_llama(CONFIG, bad)


def test_untied_heads_are_used():
    tied = LlamaConfig(**{**vars(CONFIG), "tie_embeddings": True})
    tokens = jnp.arange(6)[None]
    for config in (CONFIG, tied):
        held = weights(config)
        got = load_llama(config, held)(tokens)
        wanted = plain_llama(
            config, {k: jnp.asarray(v) for k, v in held.items()}, tokens
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert Llama(tied, rngs=nnx.Rngs(0)).head is None


def _decode(model, state_of):
    """The logits of one decode step as a function of the model's arrays."""
    graph, state = nnx.split(model)
    cache = Cache.zeros(
        model.config, 1, 16, dtype=jnp.bfloat16, stacked=model.scan_layers
    )
    step = lambda state: nnx.merge(graph, state).decode(state_of, cache)[0]  # noqa: E731
    return step, state


def test_decoding_in_bfloat16_widens_no_stack_of_layers():
    config = dataclasses.replace(CONFIG, num_layers=8, d_model=256, d_ff=512)
    model = Llama(config, scan_layers=True, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    step, state = _decode(model, jnp.ones((1, 1), jnp.int32))
    memory = jax.jit(step).lower(state).compile().memory_analysis()
    values = sum(x.size for x in jax.tree.leaves(nnx.state(model.layers)))
    # A float32 copy of the layers would take four bytes a value.
    assert memory.temp_size_in_bytes < values


def test_decoding_in_bfloat16_has_the_derivative_of_the_list_of_layers():
    scanned = Llama(
        CONFIG, scan_layers=True, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    found = []
    for model in (scanned, scanned.unstacked()):
        step, state = _decode(model, jnp.array([[3, 5]], jnp.int32))
        logits, pull = jax.vjp(jax.jit(step), state)
        (grads,) = pull(jnp.cos(logits))
        layers = nnx.to_pure_dict(grads)["layers"]
        if not model.scan_layers:
            layers = jax.tree.map(lambda *rows: jnp.stack(rows), *layers.values())
        found.append((logits, layers))
    for got, wanted in zip(*map(jax.tree.leaves, found), strict=True):
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        assert np.any(wanted)
        np.testing.assert_allclose(got, wanted, atol=0.05 * np.abs(wanted).max())


def test_the_fused_stack_is_the_model_in_one_macro(model):
    """Logits, generated tokens, and the gradient; decoding stays a step of layers."""
    fused = model.fused()
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, CONFIG.vocab_size)
    np.testing.assert_allclose(fused(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    prompts = [[5, 9, 11], [7, 1, 2, 3, 4]]
    made = [m.generate(prompts, max_tokens=6, eos_ids=()) for m in (fused, model)]
    assert made[0] == made[1]
    found = []
    for one in (fused, model.stacked()):
        graph, state = nnx.split(one)

        def loss(state, graph=graph):
            return jnp.sin(nnx.merge(graph, state)(tokens)).sum()

        if one is fused:
            seen = neuronjax.trace(jax.grad(loss), state)
            names = ("Llama3Transformer", "Llama3TransformerBwd")
            assert [seen.count(name) for name in (*names, "QKV")] == [1, 1, 0]
        found.append(jax.tree.leaves(jax.jit(jax.grad(loss))(state)))
    for got, wanted in zip(*found, strict=True):
        assert jnp.linalg.norm(got - wanted) <= 1e-5 * jnp.linalg.norm(wanted)


def test_a_fused_stack_is_built_stacked_and_refuses_other_layers():
    model = Llama(CONFIG, fused_stack=True, rngs=nnx.Rngs(0))
    assert model.scan_layers and not model.unstacked().fused_stack
    quantized = neuronjax.quantize(Llama(CONFIG, rngs=nnx.Rngs(0)), "row-fp8")
    with pytest.raises(ValueError, match="fused_stack needs layers that are Decoder"):
        quantized.fused()
