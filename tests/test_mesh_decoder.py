"""A decoder over a mesh is the decoder on one device, whatever the mesh is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import neuronjax
from neuronjax.models import Llama, LlamaConfig, MeshDecoder, MoEConfig, MoELM
from neuronjax.models import mesh_decoder as module
from neuronjax.sharding import make_mesh
from tests.hlo import program

# Neither 40 columns nor 61 tokens divide by 3: those are filled up, these are whole.
THREE = LlamaConfig(
    vocab_size=61,
    d_model=24,
    d_ff=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    max_seq=200,
)
EIGHT = LlamaConfig(
    vocab_size=64,
    d_model=16,
    d_ff=48,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
    tie_embeddings=True,
    max_seq=200,
)
EXPERTS = MoEConfig(
    **dataclasses.asdict(dataclasses.replace(EIGHT, num_kv_heads=2, d_ff=6)),
    num_experts=4,
    experts_per_token=2,
)
SHARED = dataclasses.replace(
    EXPERTS, shared_d_ff=5, norm_topk_prob=False, act_fn="SIGMOID", activation="GELU"
)
ODD = dataclasses.replace(THREE, d_model=15)
MODELS = dict(three=THREE, eight=EIGHT, experts=EXPERTS, shared=SHARED, odd=ODD)
MESHES = [
    ("three", 1, 1),
    ("three", 3, 1),
    ("three", 1, 2),
    ("three", 3, 2),
    ("eight", 2, 1),
    ("eight", 4, 1),
    ("eight", 8, 1),
    ("eight", 4, 2),
    ("experts", 2, 1),
    ("experts", 2, 2),
    ("shared", 2, 2),
]
PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7], [13]]


@functools.cache
def model_of(name):
    kind = MoELM if isinstance(MODELS[name], MoEConfig) else Llama
    return kind(MODELS[name], rngs=nnx.Rngs(3)).stacked()


def decoder_of(name, ranks=2, cores=1, model=None, **options):
    mesh = make_mesh(tensor=ranks, lnc=cores)
    return MeshDecoder(model or model_of(name), mesh, **options)


def arguments(seq=7, lengths=(3, 7, 1), slots=12):
    tokens = jax.random.randint(jax.random.key(1), (3, seq), 0, 61, jnp.int32)
    return tokens, jnp.array(lengths, jnp.int32), slots


def steps(model, counts=(1, 3), **given):
    """Logits of a ragged prefill and of decoding after it; the cache at the end."""
    graph, state = nnx.split(model)
    tokens, lengths, slots = arguments(**given)
    prefill = jax.jit(lambda s, *a: nnx.merge(graph, s).prefill(*a, slots))
    decode = jax.jit(lambda s, *a: nnx.merge(graph, s).decode(*a))
    logits, cache = prefill(state, tokens, lengths)
    found = [logits]
    for i, count in enumerate(counts):
        more = jax.random.randint(jax.random.key(i), (3, count), 0, 61, jnp.int32)
        logits, cache = decode(state, more, cache)
        found.append(logits)
    return found, cache


def close(found, wanted, tolerance=2e-5):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def prefilled(decoder, seq, slots):
    """The cache after one prompt of `seq` tokens."""
    graph, state = nnx.split(decoder)
    prompt = jnp.ones((1, seq), jnp.int32), jnp.array([seq], jnp.int32)
    run = jax.jit(lambda s, *a: nnx.merge(graph, s).prefill(*a, slots))
    return run(state, *prompt)[1]


def after_prefill(model, tokens):
    """What `decode` says of `tokens` after three prompts, while it is traced."""
    prompts, lengths, slots = arguments()
    cache = jax.eval_shape(lambda: model.prefill(prompts, lengths, slots)[1])
    return jax.eval_shape(model.decode, tokens, cache)


@functools.cache
def on_one_device(name):
    return steps(model_of(name))[0]


@pytest.mark.parametrize(("name", "ranks", "cores"), MESHES)
def test_any_mesh_computes_what_one_device_does(name, ranks, cores):
    close(steps(decoder_of(name, ranks, cores))[0], on_one_device(name))


@pytest.mark.parametrize(
    ("name", "ranks", "cores"),
    [("three", 3, 1), ("three", 1, 2), ("three", 3, 2), ("shared", 2, 2)],
)
def test_the_other_path_of_the_residual_computes_the_same(name, ranks, cores):
    decoder = decoder_of(name, ranks, cores, sbuf_residual_and_cc=True)
    close(steps(decoder)[0], on_one_device(name))


@pytest.mark.parametrize(
    ("name", "ranks", "cores"),
    [
        ("three", 3, 2),
        ("eight", 2, 1),
        ("eight", 4, 1),
        ("eight", 8, 1),
        ("experts", 2, 1),
    ],
)
def test_greedy_tokens_are_those_of_one_device(name, ranks, cores):
    options, seen = dict(max_tokens=6, eos_ids=()), []
    wanted = model_of(name).generate(PROMPTS, **options)
    decoder = decoder_of(name, ranks, cores)
    assert decoder.generate(PROMPTS, stream=seen.append, **options) == wanted
    assert [list(row) for row in zip(*seen, strict=True)] == wanted


@pytest.mark.parametrize(("name", "ranks"), [("three", 3), ("shared", 2)])
def test_layers_that_are_traced_one_by_one_are_the_scan(name, ranks):
    decoder = decoder_of(name, ranks, 2, scan_layers=False)
    close(steps(decoder)[0], on_one_device(name))


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_stacked_model_is_packed_as_its_list_is(scan_layers):
    states = [
        jax.tree.leaves(
            nnx.state(decoder_of("three", 3, model=m, scan_layers=scan_layers))
        )
        for m in (model_of("three"), model_of("three").unstacked())
    ]
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("seq", "lengths"), [(11, (3, 11, 8)), (12, (1, 4, 12))])
def test_long_prompts_are_read_in_chunks(monkeypatch, seq, lengths):
    """Three chunks of 4: one, a scan of one or two, and what is left."""
    given = dict(seq=seq, lengths=lengths, slots=17)
    wanted, _ = steps(model_of("three"), **given)
    monkeypatch.setattr(module, "CHUNK", 4)
    close(steps(decoder_of("three", 3), **given)[0], wanted)


@pytest.mark.parametrize(
    "sizes",
    [dict(data=2, tensor=3), dict(tensor=3, lnc=2, explicit=True), dict(heads=3)],
    ids=["another axis", "explicit", "another name"],
)
def test_meshes_of_other_kinds_compute_the_same(monkeypatch, sizes):
    """Ten tokens of a prompt in chunks of 4, so that every loop is there."""
    given = dict(seq=10, lengths=(3, 10, 8), slots=17)
    monkeypatch.setattr(module, "CHUNK", 4)
    axis = "heads" if "heads" in sizes else "tensor"
    decoder = MeshDecoder(model_of("three"), make_mesh(**sizes), axis=axis)
    close(steps(decoder, **given)[0], steps(model_of("three"), **given)[0])


def test_an_axis_of_one_core_is_none():
    decoder = MeshDecoder(model_of("three"), make_mesh(tensor=3, cores=1), lnc="cores")
    assert decoder.layout.lnc is None
    close(steps(decoder, (1,))[0], on_one_device("three")[:2])


def test_a_row_without_room_keeps_its_cache_and_still_answers():
    """7 + 1 + 3 tokens do not fit into 10 slots, 3 + 1 + 3 do."""
    wanted, held = steps(model_of("three"), slots=10)
    got, cache = steps(decoder_of("three", 3, 2), slots=10)
    close(got, wanted)
    assert cache.slots == 10
    np.testing.assert_array_equal(cache.lengths, held.lengths)
    assert cache.lengths.tolist() == [7, 11, 5]
    own, theirs = cache.layers, held.layers
    np.testing.assert_allclose(own.key[..., :10], theirs.key, rtol=1e-5, atol=1e-5)
    value = own.value[..., :10, :]
    np.testing.assert_allclose(value, theirs.value, rtol=1e-5, atol=1e-5)


def test_a_full_cache_keeps_its_slots():
    decoder = decoder_of("three", 3)
    graph, state = nnx.split(decoder)
    token = jnp.ones((1, 1), jnp.int32)
    cache = prefilled(decoder, 4, slots=4)
    step = jax.jit(lambda s, t, c: nnx.merge(graph, s).decode(t, c))
    _, after = step(state, token, cache)
    jax.tree.map(np.testing.assert_array_equal, after.layers, cache.layers)


def test_a_cache_is_donated():
    decoder = decoder_of("three", 3, 2)
    graph, state = nnx.split(decoder)
    cache = prefilled(decoder, 4, slots=8)
    step = jax.jit(lambda s, t, c: nnx.merge(graph, s).decode(t, c), donate_argnums=2)
    _, new = step(state, jnp.ones((1, 1), jnp.int32), cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache.layers))
    assert isinstance(new, module.MeshCache) and new.slots == 8


def test_bfloat16_over_ranks_and_cores_is_as_near_as_on_one_device():
    """At most twice the error of one device in bfloat16, against float32."""
    narrow = Llama(EIGHT, dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
    decoder = decoder_of("eight", 4, 2, model=narrow)
    held = jax.tree.leaves(nnx.state(decoder))
    assert {x.dtype for x in held} == {jnp.dtype("bfloat16")}
    got, cache = steps(decoder)
    assert cache.layers.key.dtype == jnp.bfloat16
    (alone, _), exact = steps(narrow), on_one_device("eight")
    for own, theirs, wanted in zip(got, alone, exact, strict=True):
        assert own.shape == wanted.shape
        distances = (np.abs(np.float32(x) - wanted) for x in (own, theirs))
        error, allowed = (x.max() / np.abs(wanted).max() for x in distances)
        assert 0 < error <= 2 * allowed


def test_each_device_holds_only_its_part():
    decoder = decoder_of("eight", 4, 2)
    _, cache = steps(decoder)
    shards = {
        name: w[...].addressable_shards[0].data.shape
        for name, w in decoder.layers.items()
    }
    assert shards == dict(
        W_qkv=(2, 16, 32),  # 2 of 8 key heads: each 2 queries, key and value, 4 wide
        W_out=(2, 16, 8),  # 4 of 16 query heads; half of d_model
        W_gamma_qkv=(2, 1, 16),
        W_gamma_mlp=(2, 1, 16),
        W_gate=(2, 16, 6),  # an eighth of 48
        W_up=(2, 16, 6),
        W_down=(2, 6, 16),
    )
    assert decoder.embedding[...].addressable_shards[0].data.shape == (8, 16)
    assert cache.layers.key.addressable_shards[0].data.shape == (2, 3, 2, 4, 13)
    assert cache.layers.value.addressable_shards[0].data.shape == (2, 3, 2, 13, 4)


def decode_step(name, decoder):
    """A decode step of one token, its state and its cache."""
    graph, state = nnx.split(decoder)
    _, cache = steps(decoder, ())
    tokens = jnp.ones((3, 1), jnp.int32)
    step = lambda state, cache: nnx.merge(graph, state).decode(tokens, cache)  # noqa: E731
    return step, state, cache


@pytest.mark.parametrize(
    ("name", "macros"),
    [
        ("eight", dict(AttentionBlockTkg=2, MLP=2, NeuronReduceMacro=1)),
        (
            "shared",
            dict(
                AttentionBlockTkg=2,
                RouterTopK=2,
                ExpertMLPs=2,
                MLP=2,
                NeuronReduceMacro=3,
            ),
        ),
    ],
)
def test_a_step_is_of_named_macros(name, macros):
    step, *arrays = decode_step(name, decoder_of(name, 2, 2))
    emitted = neuronjax.trace(step, *arrays)
    assert {key: emitted.count(key) for key in macros} == macros


@pytest.mark.parametrize("in_sbuf", [False, True], ids=["hbm", "sbuf"])
def test_a_step_has_two_all_reduces_a_layer_and_one_more(in_sbuf):
    decoder = decoder_of("three", 3, 2, sbuf_residual_and_cc=in_sbuf)
    step, *arrays = decode_step("three", decoder)
    places = program(jax.jit(step), *arrays).places()
    assert places.in_loops == {
        "all-reduce": 2,
        "all-gather": 2,
        "reduce-scatter": 1,
    }
    assert places.once == {}  # 61 tokens: the embedding is whole


def test_a_divided_embedding_costs_one_all_reduce():
    step, *arrays = decode_step("eight", decoder_of("eight", 4))
    places = program(jax.jit(step), *arrays).places()
    assert places.in_loops == {"all-reduce": 2}
    assert places.once == {"all-reduce": 1}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: decoder_of("three", 2),
            "the 2 ranks of 'tensor' must divide the key heads, got num_kv_heads = 3",
        ),
        (
            lambda: MeshDecoder(model_of("three"), make_mesh(data=1)),
            "axis must be an axis of the mesh, one of .'data',., got 'tensor'",
        ),
        (
            lambda: MeshDecoder(model_of("three"), make_mesh(tensor=1), axis=None),
            "axis must name the axis of the ranks, got None",
        ),
        (
            lambda: decoder_of("three", lnc="cores"),
            "lnc must be an axis of the mesh",
        ),
        (
            lambda: MeshDecoder(
                model_of("three"), make_mesh(tensor=1, cores=5), lnc="cores"
            ),
            "lnc must be an axis of 2 cores, got 5 of 'cores'",
        ),
        (
            lambda: MeshDecoder(
                model_of("three"), make_mesh(tensor=1, cores=4), lnc="cores"
            ),
            "lnc must be an axis of 2 cores, got 4 of 'cores'",
        ),
        (
            lambda: decoder_of("eight", 2, lnc="tensor"),
            "lnc must be another axis than axis = 'tensor'",
        ),
        (
            lambda: decoder_of("odd", 1, 2),
            "the two cores of 'lnc' must divide d_model, got 15",
        ),
        (
            lambda: decoder_of(
                "eight", model=neuronjax.quantize(model_of("eight"), "row-fp8")
            ),
            "layers must be of nn.Attention and nn.MLP or nn.MoE, not quantized, got "
            "QuantizedAttention and QuantizedMLP",
        ),
        (
            lambda: decoder_of("three", 3).prefill(*arguments(slots=6)),
            r"prefill: slots must be at least seq = 7, got 6",
        ),
        (
            lambda: decoder_of("three", 3).prefill(*arguments(seq=0)),
            r"prefill: tokens must be of shape .batch, seq., .* at least 1, got .3, 0.",
        ),
        (
            lambda: after_prefill(decoder_of("three", 3), jnp.ones((3, 0), jnp.int32)),
            r"decode: tokens must be of shape .batch, seq., .* at least 1, got .3, 0.",
        ),
        (
            lambda: after_prefill(decoder_of("three", 3), jnp.ones((2, 1), jnp.int32)),
            "decode: tokens must have a row for each of the 3 of the cache, got 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=f"MeshDecoder.*{message}"):
        build()
