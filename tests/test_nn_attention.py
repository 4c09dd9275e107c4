"""The options of `nn.Attention`: windows, sinks, caps, packing, prefixes, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import neuronjax
from neuronjax import nn
from neuronjax.models.fused_stack import require_dense
from neuronjax.models.mesh_packing import require_plain
from neuronjax.nn.attention_options import segment_bounds
from tests.nn_case import stirred
from tests.nn_twins import draw

WIDTH, HEADS, KV_HEADS, HEAD_DIM, SEQ = 8, 4, 2, 4, 7
OPTIONS = {
    "causal": {},
    "window": dict(sliding_window=3),
    "window and sink": dict(sliding_window=2, sink=True),
    "sink": dict(sink=True),
}
CAPPED = {
    "window and sink": dict(sliding_window=2, sink=True),
    "cap": dict(logits_soft_cap=0.5),
}


def layer_of(**options):
    sizes = WIDTH, HEADS, KV_HEADS, HEAD_DIM
    return stirred(nn.Attention(*sizes, **options, rngs=nnx.Rngs(0, dropout=1)))


def inputs(batch=2, seq=SEQ):
    positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    return draw(batch, seq, WIDTH), *nn.rotary_tables(positions, HEAD_DIM)


def columns(arrays, start, end):
    x, cos, sin = (a[:, start:end] for a in arrays)
    return x, cos, sin


def cache_of(layer, given, slots=SEQ):
    """A cache of `given` tokens."""
    _, key, value = layer.prefill(*given)
    kind = given[0].shape[0], KV_HEADS, HEAD_DIM, slots, jnp.float32
    start = jnp.zeros(given[0].shape[0], jnp.int32)
    return nn.LayerCache.zeros(*kind).write(key, value, start)


@pytest.mark.parametrize("seq", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decoding_equals_prefill(options, seq):
    """R-14, with windows and sinks: the rows of a full prefill, step by step."""
    layer, args = layer_of(**options), inputs()
    wanted = layer(*args)
    cache = cache_of(layer, columns(args, 0, 3))
    decode = nnx.jit(lambda layer, *a: layer.decode(*a))
    for start in range(3, SEQ - seq + 1, seq):
        new = columns(args, start, start + seq)
        got, cache = decode(layer, *new, cache, jnp.full(2, start, jnp.int32))
        part = wanted[:, start : start + seq]
        np.testing.assert_allclose(got, part, rtol=2e-5, atol=2e-5)


def test_a_window_among_the_new_tokens_sees_no_cached_slot():
    layer, args = layer_of(sliding_window=1), inputs()
    lengths = jnp.full(2, 3, jnp.int32)
    cache = cache_of(layer, columns(args, 0, 3))
    stale = jnp.arange(SEQ) >= 3
    cache = nn.LayerCache(
        jnp.where(stale, jnp.nan, cache.key),
        jnp.where(stale[:, None], jnp.nan, cache.value),
    )
    got, _ = layer.decode(*columns(args, 3, 6), cache, lengths)
    np.testing.assert_allclose(got, layer(*args)[:, 3:6], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", CAPPED.values(), ids=CAPPED)
def test_prefill_behind_a_prefix_equals_prefill(options):
    """Each row has a prefix of its own length; what lies behind it is not read."""
    layer, args = layer_of(**options), inputs()
    wanted = layer(*args)
    lengths = [2, 4]
    rows = [tuple(a[row : row + 1] for a in args) for row in (0, 1)]
    caches = [
        cache_of(layer, columns(r, 0, n), 9) for r, n in zip(rows, lengths, strict=True)
    ]
    cache = jax.tree.map(lambda *parts: jnp.concatenate(parts), *caches)
    junk = jnp.arange(9) >= jnp.array(lengths)[:, None]
    cache = nn.LayerCache(
        jnp.where(junk[:, None, None], jnp.nan, cache.key),
        jnp.where(junk[:, None, :, None], jnp.nan, cache.value),
    )
    new = [columns(r, n, n + 3) for r, n in zip(rows, lengths, strict=True)]
    x, cos, sin = (jnp.concatenate(parts) for parts in zip(*new, strict=True))
    got, cache = layer.extend(x, cos, sin, cache, jnp.array(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        part = wanted[row, length : length + 3]
        np.testing.assert_allclose(got[row], part, rtol=2e-5, atol=2e-5)
        assert np.isfinite(cache.value[row, :, : length + 3]).all()


@pytest.mark.parametrize("options", CAPPED.values(), ids=CAPPED)
def test_packed_sequences_do_not_see_each_other(options):
    layer, args = layer_of(**options), inputs()
    segments = jnp.array([[3, 3, 3, 0, 0, 3, 3], [1, 1, 1, 1, 1, 1, 2]], jnp.int32)
    got = layer(*args, segments)
    for row, edges in enumerate([(0, 3, 5, 7), (0, 6, 7)]):
        alone = tuple(a[row : row + 1] for a in args)
        for start, end in zip(edges, edges[1:], strict=False):
            wanted = layer(*columns(alone, start, end))[0]
            part = got[row, start:end]
            np.testing.assert_allclose(part, wanted, rtol=2e-5, atol=2e-5)


def test_bounds_of_segments():
    low, high = segment_bounds(jnp.array([[5, 5, 2, 5], [0, 1, 1, 1]], jnp.int32))
    assert low[..., 0].tolist() == [[0, 0, 2, 3], [0, 1, 1, 1]]
    assert high[..., 0].tolist() == [[2, 2, 3, 4], [1, 4, 4, 4]]


def test_attention_that_is_not_causal_is_a_softmax_over_all():
    layer, (x, *_) = layer_of(causal=False, norm=False), inputs()
    wide = np.asarray(x, np.float64)
    heads = (wide @ np.asarray(layer.qkv[...], np.float64)).reshape(2, SEQ, 8, HEAD_DIM)
    q, k, v = heads[:, :, :4], heads[:, :, [4, 4, 5, 5]], heads[:, :, [6, 6, 7, 7]]
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5)
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, SEQ, -1)
    wanted = out @ np.asarray(layer.out[...], np.float64)
    np.testing.assert_allclose(layer(x, None, None), wanted, rtol=1e-5, atol=1e-5)


def test_dropout_follows_its_keys_and_ends_with_eval():
    plain, args = layer_of(), inputs()
    layers = [layer_of(dropout_rate=0.5) for _ in range(2)]
    first, second = (layer(*args) for layer in layers)
    np.testing.assert_array_equal(first, second)  # the same keys
    again = layers[0](*args)
    assert not np.allclose(first, again), "each call has a key of its own"
    layers[0].eval()
    np.testing.assert_array_equal(layers[0](*args), plain(*args))
    layers[0].train()
    third = layers[1](*args), layers[1](*args)
    np.testing.assert_array_equal(again, third[0])
    np.testing.assert_array_equal(layers[0](*args), third[1])


def test_dropout_under_jit_and_packing_draws_new_keys_and_is_right_on_average():
    layer, args = layer_of(dropout_rate=0.3), inputs()
    segments = jnp.array([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]], jnp.int32)
    draws = 400

    before = int(layer.dropout.count[...])
    layer.eval()
    wanted = layer(*args, segments)
    layer.train()
    total = jnp.zeros_like(wanted)
    call = nnx.jit(lambda layer, total: total + layer(*args, segments))
    for _ in range(draws):
        total = call(layer, total)
    assert int(layer.dropout.count[...]) == before + draws
    error = np.abs(np.asarray(total / draws - wanted)).max()
    assert 0 < error < 0.2 * np.abs(wanted).max()


def test_dropout_has_gradients_of_the_weights_that_it_kept():
    args = inputs()
    grads = [
        nnx.grad(lambda layer: jnp.sin(layer(*args)).sum())(layer_of(**options))
        for options in (dict(dropout_rate=0.5), {})
    ]
    kept, whole = (nnx.to_pure_dict(g)["qkv"] for g in grads)
    assert np.isfinite(kept).all() and kept.any() and not np.allclose(kept, whole)


def test_an_option_that_is_off_has_no_state():
    assert nnx.to_pure_dict(nnx.state(layer_of())).keys() == {"qkv", "out", "norm"}
    held = nnx.to_pure_dict(nnx.state(layer_of(sink=True), nnx.Param))
    assert held.keys() == {"qkv", "out", "norm", "sink"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(causal=False), "causal must be True, got False"),
        (dict(logits_soft_cap=2.0), "logits_soft_cap must be None, got 2.0"),
        (
            dict(dropout_rate=0.1),
            "dropout_rate must be 0, or the layer deterministic, got 0.1",
        ),
    ],
)
def test_decoding_refuses_what_its_macro_does_not_compute(options, message):
    layer, args = layer_of(**options), inputs(seq=1)
    cache = nn.LayerCache.zeros(2, KV_HEADS, HEAD_DIM, 4, jnp.float32)
    none = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=f"nn.Attention: to decode, {message}"):
        layer.decode(*args, cache, none)
    if "dropout_rate" in options:
        layer.eval()
        layer.decode(*args, cache, none)


def test_quantized_attention_keeps_the_options():
    layer, args = layer_of(sliding_window=2, sink=True, dropout_rate=0.2), inputs()
    layer.eval()
    quantized = neuronjax.quantize(layer, "row-fp8")
    assert quantized.options == layer.options and quantized.deterministic
    wanted = layer(*args)
    error = np.abs(quantized(*args) - wanted).max() / np.abs(wanted).max()
    far = np.abs(layer_of()(*args) - wanted).max() / np.abs(wanted).max()
    assert error < 0.1 < far


def test_fused_decoders_refuse_options():
    block = nn.DecoderLayer(8, 6, 4, 2, 4, rngs=nnx.Rngs(0))
    block.attention = layer_of(sliding_window=2)
    wanted = r"window, sink, soft cap and dropout, got AttentionOptions\("
    with pytest.raises(ValueError, match=f"Llama: fused_stack needs .* {wanted}"):
        require_dense(block)
    with pytest.raises(ValueError, match=f"MeshDecoder: nn.Attention must .*{wanted}"):
        require_plain("MeshDecoder", block)


@pytest.mark.parametrize(
    ("name", "odd", "got"),
    [
        ("segments", np.zeros((2, SEQ), np.float32), "float32"),
        ("segments", np.zeros((1, SEQ), np.int32), "int32"),
        ("segments", [[0] * SEQ] * 2, "list"),
        ("lengths", np.zeros(1, np.int32), "int32"),
    ],
)
def test_what_is_no_row_of_integers_for_each_sequence_is_refused(name, odd, got):
    layer, args = layer_of(), inputs()
    calls = [lambda: layer(*args, odd)]
    if name == "lengths":
        cache = nn.LayerCache.zeros(2, KV_HEADS, HEAD_DIM, SEQ, jnp.float32)
        calls = [
            lambda: layer.extend(*args, cache, odd),
            lambda: layer.decode(*args, cache, odd),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=f"nn.Attention: {name} must be .*{got}"):
            call()


def test_no_sequence_at_all_is_refused_in_words_or_gives_nothing():
    layer, none = layer_of(), inputs(batch=0)
    with pytest.raises(ValueError, match="no axis of q, k and v may be empty"):
        layer(*none)
    packed = jnp.zeros((0, SEQ), jnp.int32)
    assert layer(*none, packed).shape == (0, SEQ, WIDTH)
