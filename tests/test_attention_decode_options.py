"""Sinks, windows, trees and fp8 in decode attention, against float64 equations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import nn
from neuronjax.emit import attention_tkg_fwd_kernel
from neuronjax.primitives import registry
from tests.decode_case import (
    SHAPES,
    attend,
    draw,
    gradients,
    require_as_good_as_plain,
    visible,
)


def _ends(shape, seed=3):
    """Filled slots, and window starts, some of which go around the end."""
    batch, _, _, seq, slots, *_ = shape
    rng = np.random.default_rng(seed)
    return rng.integers(0, slots + 1, batch), rng.integers(0, slots, (batch, seq))


def _call(window, shape):
    """The options of a call, and what a query sees under them."""
    lengths, starts = _ends(shape)
    starts = starts if window else None
    seen = visible(lengths, starts, shape[3], shape[4])
    options = dict(lengths=jnp.asarray(lengths, jnp.int32), tp_k_prior=True)
    if window:
        options["start_pos_ids"] = jnp.asarray(starts, jnp.int32)
    return options, seen


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_the_equations(shape, window, sunk):
    *arrays, sink = draw(shape)
    options, seen = _call(window, shape)
    live = [*arrays, sink] if sunk else arrays
    weight = np.cos(np.arange(np.prod(shape[:2] + shape[3:4] + shape[6:])))
    weight = weight.reshape(shape[0], shape[1], shape[6], shape[3])

    def loss(*live):
        extra = dict(sink=live[5]) if sunk else {}
        out = attention_tkg_fwd_kernel(*live[:5], **extra, **options)
        return (out * weight.astype(out.dtype)).sum(), out

    run = jax.jit(jax.grad(loss, range(len(live)), has_aux=True))
    grads, out = run(*live)
    used = sink if sunk else None
    np.testing.assert_allclose(out, attend(arrays, seen, used), rtol=1e-5, atol=1e-6)
    wanted = gradients(arrays, seen, used, weight)
    for got, exact in zip(grads, wanted, strict=False):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_derivatives_of_both_orders(window, sunk):
    shape = (2, 2, 1, 2, 4, 3, 2)
    with jax.enable_x64(True):
        *arrays, sink = draw(shape, jnp.float64)
        options, _ = _call(window, shape)

        def out(*live):
            extra = dict(sink=live[5]) if sunk else {}
            return attention_tkg_fwd_kernel(*live[:5], **extra, **options)

        live = [*arrays, sink] if sunk else arrays
        check_grads(jax.jit(out), live, 2, modes=["fwd", "rev"])


@pytest.mark.parametrize("sunk", [False, True])
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(sunk):
    """In values and in every gradient, that of the sink among them."""
    shape = (2, 4, 2, 2, 64, 16, 16)
    *arrays, sink = draw(shape, jnp.bfloat16)
    options, seen = _call(True, shape)

    def run(*live):
        extra = dict(sink=live[5]) if sunk else {}
        return attention_tkg_fwd_kernel(*live[:5], **extra, **options)

    require_as_good_as_plain(run, arrays, seen, sink if sunk else None)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_what_no_query_sees_changes_nothing(window, sunk, poison):
    """R-08: slots outside of every window and spare rows, values and gradients."""
    shape = (2, 4, 2, 2, 9, 4, 4)
    *arrays, sink = draw(shape)
    options, seen = _call(window, shape)
    hidden = jnp.asarray(~seen[:, :, :9].any(1))[:, None, :, None]
    bad = list(arrays)
    for i in (3, 4):
        bad[i] = jnp.where(hidden, poison, arrays[i])
        bad[i] = jnp.concatenate([bad[i], jnp.full_like(bad[i][:1], poison)])

    def loss(sink, *arrays):
        extra = dict(sink=sink) if sunk else {}
        return jnp.sin(attention_tkg_fwd_kernel(*arrays, **extra, **options)).sum()

    run = jax.jit(jax.value_and_grad(loss, range(6)))
    (value, grads), (wanted, clean) = run(sink, *bad), run(sink, *arrays)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert not any(np.any(g[2:]) for g in grads[4:])
    grads = [*grads[:4], *(g[:2] for g in grads[4:])]
    chex.assert_trees_all_close(grads, list(clean), atol=1e-6)


def test_a_sink_is_one_more_column_of_the_softmax():
    """R-05: outputs 4.5, 3.0, 2.25; derivatives -1 and -1.125; -inf is no sink."""
    zero, values = jnp.zeros((1, 1, 1, 1)), jnp.array([3.0, 6.0]).reshape(1, 1, 2, 1)
    keys = jnp.zeros((1, 1, 1, 2))

    def out(sink):
        return attention_tkg_fwd_kernel(
            *(zero, None, None, keys, values), lengths=jnp.array([2]), sink=sink
        ).sum()

    def at(x):
        return jnp.full((1, 1), x)

    for sink, wanted in ((-jnp.inf, 4.5), (0.0, 3.0), (np.log(2), 2.25)):
        np.testing.assert_allclose(out(at(sink)), wanted, rtol=1e-6)
    for sink, wanted in ((-jnp.inf, 0.0), (0.0, -1.0), (np.log(2), -1.125)):
        np.testing.assert_allclose(jax.grad(out)(at(sink)).sum(), wanted, rtol=1e-6)


def test_a_row_that_sees_the_sink_alone_gets_zero():
    """R-01: the statistics are those of the sink; no gradient reaches the cache."""
    *arrays, sink = draw((2, 2, 1, 1, 4, 3, 3))
    arrays = [arrays[0], None, None, *arrays[3:]]
    family = registry.resolve_family("AttentionTkgFwd")
    config = dict(prior_slots=4, tp_k_prior=True, fuse_rope=False)

    def outs(sink, lengths):
        rest = (None, lengths, None, None, sink, None, None)
        layout = dict(config, is_tkg=True, is_tiled=False)
        return family(*arrays, *rest, name="AttentionTkgFwd", **layout)

    out, neg_max, recip = outs(sink, jnp.array([0, 4]))
    assert not np.any(out[0]) and np.any(out[1])
    np.testing.assert_allclose(neg_max[0, :, 0], -sink)
    np.testing.assert_allclose(recip[0], 1.0)
    out, neg_max, recip = outs(jnp.full_like(sink, -jnp.inf), jnp.array([0, 4]))
    assert (
        not np.any(out[0]) and np.isposinf(neg_max[0]).all() and (recip[0] == 1).all()
    )


CONFIG = dict(bs=2, q_head=2, s_active=3, curr_sprior=11, full_sprior=12, d_head=4)


def _tkg(positions, starts, sunk=False, seed=0, **changes):
    """A call of `attention_tkg` over a flat cache, and the arrays of the equations."""
    config = neuronjax.AttnTKGConfig(**{**CONFIG, "use_pos_id": True, **changes})
    *arrays, sink = draw((2, 2, 1, 3, 12, 4, 4), seed=seed)
    out, _ = neuronjax.attention_tkg(
        *(*arrays[:3], arrays[3].mT, arrays[4], None, config),
        rope_pos_ids=jnp.asarray(positions),
        start_pos_ids=jnp.asarray(starts),
        sink=sink if sunk else None,
    )
    read = [*arrays[:3], *(x[:, :, :8] for x in arrays[3:])]
    return out, read, sink if sunk else None


def _window(position, width, wrap):
    """Starts and ends by the rule of the docstring."""
    where = np.asarray(position)[:, None] + np.arange(3)
    return np.maximum(0, where - width + 1) % wrap, where % wrap


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("position", [(0, 3), (5, 7), (14, 15), (8, 22)])
def test_several_tokens_see_no_stale_slot_of_a_circular_cache(position, width):
    """The window counts back from each query; slots not yet written are not in it."""
    starts, ends = _window(position, width, 8)
    out, arrays, sink = _tkg(ends, starts, sunk=True)
    seen = visible([0, 0], None, 3, 8)
    for b, t, back in np.ndindex(2, 3, width):
        # What lies before the first new token is in the cache, in its slot modulo 8.
        token = position[b] + t - back
        if 0 <= token < position[b]:
            seen[b, t, token % 8] = True
    wanted = attend(arrays, seen, sink)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_vendors_literal_rule_is_an_option(dtype):
    """Query t then sees the slots up to its own position, the stale ones too."""
    positions, starts = np.array([[3, 4, 5], [6, 7, 8]]), [[1, 2, 3], [7, 0, 1]]
    given = positions.astype(dtype), np.asarray(starts, dtype)
    out, arrays, _ = _tkg(*given, stale_slots_visible=True)
    wanted = attend(arrays, visible(positions, starts, 3, 8))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    causal, *_ = _tkg(*given)
    assert np.abs(causal - out).max() > 1e-2


@pytest.mark.parametrize("window", [False, True])
def test_a_tree_of_new_tokens_is_what_its_mask_says(window):
    """Position ids show the cache, the mask shows the new tokens: siblings do not."""
    shape = (2, 2, 1, 3, 6, 4, 4)
    *arrays, sink = draw(shape)
    options, _ = _call(window, shape)
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)  # query, key
    lengths, starts = _ends(shape)
    seen = visible(lengths, starts if window else None, 3, 6, tree)
    mask = jnp.broadcast_to(jnp.asarray(tree.T)[:, None, None], (3, 2, 2, 3))
    out = attention_tkg_fwd_kernel(*arrays, mask=mask, sink=sink, **options)
    wanted = attend(arrays, seen, sink)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_lengths_and_starts_of_any_dtype_do_not_wrap(dtype):
    shape = (1, 1, 1, 1, 300, 2, 2)
    *arrays, _ = draw(shape)
    out = attention_tkg_fwd_kernel(
        *arrays,
        lengths=jnp.array([100], dtype),
        start_pos_ids=jnp.array([[120]], dtype),
        tp_k_prior=True,
    )
    wanted = attend(arrays, visible([100], [[120]], 1, 300))
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def _prefill(q, k, v, *, sink, width):
    """Every row of a windowed prefill, float64: `[seq, d]` for one head."""
    seq = len(q)
    back = np.arange(seq)[:, None] - np.arange(seq)
    seen = (back >= 0) & (back < width)
    z = np.where(seen, q @ k.T, -np.inf)
    top = np.maximum(z.max(1, keepdims=True), sink)
    p = np.where(seen, np.exp(z - top), 0)
    return p @ v / (p.sum(1, keepdims=True) + np.exp(sink - top))


@pytest.mark.parametrize("seq", [1, 2])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_decode_over_a_circular_cache_equals_the_prefill(width, seq):
    """R-14: each token, the first, the last slot and those after the wrap included."""
    total, slots = 16, 6
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, total, 4)).astype("float32") for _ in range(3))
    rows = [x[0, 0].astype("float64") for x in (q, k, v)]
    wanted = _prefill(*rows, sink=0.5, width=width)

    @jax.jit
    def step(caches, first):
        new = [jax.lax.dynamic_slice_in_dim(x, first, seq, 2) for x in (q, k, v)]
        where = first + jnp.arange(seq)
        starts = jnp.maximum(0, where - width + 1)
        # A window that starts among the new tokens shows none of the cache.
        ends = jnp.minimum(starts, first) % slots, first % slots
        out = attention_tkg_fwd_kernel(
            *(*new, *caches),
            lengths=ends[1][None],
            start_pos_ids=ends[0][None],
            mask=_band(seq, width),
            sink=jnp.full((1, 1), 0.5),
            tp_k_prior=True,
        )
        write = functools.partial(nn.write_circular_cache, axis=2)
        pairs = zip(caches, new[1:], strict=True)
        return out, [write(c, x, first[None]) for c, x in pairs]

    caches = [jnp.full((1, 1, slots, 4), jnp.nan)] * 2
    for first in range(0, total, seq):
        out, caches = step(caches, jnp.int32(first))
        rows = wanted[first : first + seq]
        np.testing.assert_allclose(out[0, 0].T, rows, rtol=1e-4, atol=1e-5)


def _band(seq, width):
    """Of the new tokens, those in the window of each query: `[key, 1, 1, query]`."""
    back = np.arange(seq) - np.arange(seq)[:, None]
    return jnp.asarray((back >= 0) & (back < width))[:, None, None]


@pytest.mark.parametrize("query_dtype", ["bfloat16", "float32"])
def test_fp8_keys_and_values_enter_as_they_are_and_are_constants(query_dtype):
    shape = (2, 4, 2, 2, 8, 4, 4)
    *arrays, sink = draw(shape)
    options, seen = _call(True, shape)
    q = arrays[0].astype(query_dtype)
    codes = [(4 * x).astype(jnp.float8_e4m3) for x in arrays[1:]]
    wide = [np.asarray(q, "float32"), *(np.asarray(x, "float32") for x in codes)]

    def out(q, sink, *codes):
        return attention_tkg_fwd_kernel(q, *codes, sink=sink, **options)

    got = jax.jit(out)(q, sink, *codes)
    exact = attend(wide, seen, sink)
    tolerance = 1e-5 if query_dtype == "float32" else 2e-2
    assert got.dtype == q.dtype
    scale = np.abs(exact).max()
    assert np.abs(np.asarray(got, "float64") - exact).max() <= tolerance * scale
    _, pull = jax.vjp(out, q, sink, *codes)
    dq, d_sink, *zeros = pull(jnp.ones_like(got))
    wanted = gradients(wide, seen, sink, np.ones(got.shape))
    for grad, exact in ((dq, wanted[0]), (d_sink, wanted[5])):
        error = np.abs(np.asarray(grad, "float64") - exact).max()
        assert error <= tolerance * np.abs(exact).max()
    assert not any(np.any(np.float32(z)) for z in zeros)


@pytest.mark.parametrize("sunk", [False, True])
def test_rotation_stands_beside_windows_and_sinks(sunk):
    shape = (2, 2, 1, 2, 6, 4, 4)
    with jax.enable_x64(True):
        *arrays, sink = draw(shape, jnp.float64)
        options, seen = _call(True, shape)
        positions = np.array([[4, 5], [9, 10]])
        freqs = np.array([[0.7], [0.2]])
        angles = positions[..., None] * freqs[:, 0]

        def turned(x):
            x = np.asarray(x)
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            first, second = np.split(x, 2, -1)
            pair = first * cos - second * sin, second * cos + first * sin
            return np.concatenate(pair, -1)

        def outs(freqs, sink, *arrays):
            return attention_tkg_fwd_kernel(
                *arrays,
                inv_freqs=freqs,
                rope_pos_ids=jnp.asarray(positions, jnp.int32),
                sink=sink if sunk else None,
                **options,
            )

        out, k_out = outs(jnp.asarray(freqs), sink, *arrays)
        rotated = [turned(arrays[0]) / 2, turned(arrays[1]), *arrays[2:]]
        wanted = attend(rotated, seen, sink if sunk else None)
        np.testing.assert_allclose(out, wanted, rtol=1e-11)
        np.testing.assert_allclose(k_out, rotated[1], rtol=1e-11)
        live = (jnp.asarray(freqs), sink, *arrays)
        check_grads(jax.jit(outs), live, 2, modes=["rev"])
