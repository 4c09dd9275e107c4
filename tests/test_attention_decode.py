"""Decode attention, against a float64 softmax over the slots that each query sees."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax.emit import attention_tkg_fwd_kernel
from neuronjax.primitives import registry
from neuronjax.primitives.attention.decode import attention_tkg_backward
from tests.decode_case import draw, require_as_good_as_plain, visible

# batch, query heads, key heads, new tokens, slots, width of keys, width of values
SHAPES = [(2, 4, 2, 1, 16, 8, 8), (3, 6, 2, 3, 7, 5, 4), (1, 1, 1, 2, 1, 2, 2)]


def _draw(shape, seed=0, dtype=jnp.float32, scale=1.0):
    batch, heads, kv_heads, seq, slots, d, dv = shape
    rng = np.random.default_rng(seed)
    sizes = [(heads, seq, d), (kv_heads, seq, d), (kv_heads, seq, dv)]
    sizes += [(kv_heads, d, slots), (kv_heads, slots, dv)]
    return [jnp.asarray(rng.normal(size=(batch, *s)) * scale, dtype) for s in sizes]


def _visible(lengths, seq, slots):
    """`[slots + seq, batch, 1, seq]`: slots below the length, new tokens causally."""
    prior = np.arange(slots)[:, None] < np.asarray(lengths)
    active = np.arange(seq)[:, None] <= np.arange(seq)
    prior = np.broadcast_to(prior[:, :, None, None], (slots, len(lengths), 1, seq))
    active = np.broadcast_to(active[:, None, None], (seq, len(lengths), 1, seq))
    return np.concatenate([prior, active])


def _attend(q, k_active, v_active, k_prior, v_prior, seen):
    """Softmax over what is seen, one query at a time, float64."""
    q, k_active, v_active, k_prior, v_prior = (
        np.asarray(x, np.float64) for x in (q, k_active, v_active, k_prior, v_prior)
    )
    batch, heads, seq, _ = q.shape
    group = heads // k_active.shape[1]
    out = np.zeros((batch, heads, v_active.shape[-1], seq))
    for b, h, t in np.ndindex(batch, heads, seq):
        n = h // group
        keys = np.concatenate([k_prior[b, n].T, k_active[b, n]])
        values = np.concatenate([v_prior[b, n], v_active[b, n]])
        shown = np.broadcast_to(seen, (len(keys), batch, heads, seq))[:, b, h, t] != 0
        if shown.any():
            z = keys[shown] @ q[b, h, t]
            p = np.exp(z - z.max())
            out[b, h, :, t] = p @ values[shown] / p.sum()
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_lengths_say_what_is_seen(shape, transposed):
    arrays = _draw(shape)
    lengths = np.arange(shape[0]) * 3 % (shape[4] + 1)
    wanted = _attend(*arrays, _visible(lengths, shape[3], shape[4]))
    arrays[3] = arrays[3].mT if transposed else arrays[3]
    got = attention_tkg_fwd_kernel(
        *arrays, lengths=jnp.asarray(lengths), tp_k_prior=transposed
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_say_what_is_seen(shape):
    arrays = _draw(shape)
    size = (shape[4] + shape[3], shape[0], shape[1], shape[3])
    mask = np.random.default_rng(1).random(size) < 0.6
    mask[:, 0, 0, 0] = False
    wanted = _attend(*arrays, mask)
    got = attention_tkg_fwd_kernel(*arrays, mask=jnp.asarray(mask))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert not np.any(got[0, 0, :, 0])


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(shape):
    """In values and in every gradient."""
    *arrays, _ = draw(shape, jnp.bfloat16)
    lengths = np.full(shape[0], shape[4] - 1)
    run = functools.partial(
        attention_tkg_fwd_kernel, lengths=jnp.asarray(lengths), tp_k_prior=True
    )
    require_as_good_as_plain(run, arrays, visible(lengths, None, shape[3], shape[4]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives(shape, masked):
    with jax.enable_x64(True):
        arrays = _draw(shape, dtype=jnp.float64)
        size = (shape[4] + shape[3], shape[0], shape[1], shape[3])
        mask = jnp.asarray(np.random.default_rng(1).random(size) < 0.6)
        lengths = jnp.arange(shape[0]) % (shape[4] + 1)
        seen = dict(mask=mask) if masked else dict(lengths=lengths)
        attend = functools.partial(attention_tkg_fwd_kernel, **seen)
        check_grads(jax.jit(attend), arrays, 2, modes=["fwd", "rev"])


def test_rotation_is_differentiated_through():
    with jax.enable_x64(True):
        arrays = _draw((2, 2, 1, 3, 5, 4, 4), dtype=jnp.float64)
        freqs = jnp.array([[0.7], [0.2]])
        positions = jnp.array([[3, 4, 5], [1, 2, 3]])
        attend = functools.partial(
            attention_tkg_fwd_kernel,
            lengths=jnp.array([3, 1]),
            rope_pos_ids=positions,
        )
        check_grads(
            jax.jit(lambda freqs, *a: attend(*a, inv_freqs=freqs)),
            (freqs, *arrays),
            1,
        )


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_equal_those_of_the_plain_computation(rotated):
    arrays = _draw((2, 4, 2, 2, 6, 8, 8))
    extra = {}
    if rotated:
        freqs = 1.0 / jnp.arange(1.0, 5.0)[:, None]
        extra = dict(inv_freqs=freqs, rope_pos_ids=jnp.array([[2, 3], [5, 6]]))

    def loss(*arrays):
        outs = attention_tkg_fwd_kernel(*arrays, lengths=jnp.array([2, 5]), **extra)
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(outs))

    gradient = jax.grad(loss, range(5))
    with neuronjax.plain():
        wanted = jax.jit(gradient)(*arrays)
    chex.assert_trees_all_close(jax.jit(gradient)(*arrays), wanted, atol=1e-5)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_unseen_slots_and_spare_rows_never_leak(poison, masked):
    """R-08: in values and in gradients, with NaN in keys and in values."""
    shape = (2, 4, 2, 2, 6, 8, 8)
    arrays = _draw(shape)
    lengths = jnp.array([2, 5])
    shown = jnp.asarray(_visible(lengths, 2, 6))
    mask = jnp.broadcast_to(shown, (8, 2, 4, 2))
    seen = dict(mask=mask) if masked else dict(lengths=lengths)
    hidden = (jnp.arange(6) >= lengths[:, None])[:, None]
    bad = list(arrays)
    bad[3] = jnp.where(hidden[:, :, None], poison, arrays[3])
    bad[4] = jnp.where(hidden[..., None], poison, arrays[4])
    bad[3], bad[4] = (jnp.concatenate([x, x[:1] * poison]) for x in bad[3:])

    def loss(*arrays):
        return jnp.sin(attention_tkg_fwd_kernel(*arrays, **seen)).sum()

    run = jax.jit(jax.value_and_grad(loss, range(5)))
    (value, grads), (wanted, clean) = run(*bad), run(*arrays)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    grads = [*grads[:3], *(g[:2] for g in grads[3:])]
    chex.assert_trees_all_close(grads, list(clean), atol=1e-6)


def test_a_new_token_that_one_query_does_not_see_does_not_reach_it():
    """R-08: query 0 does not see new token 1, query 1 does."""
    q, k, v, k_prior, v_prior = _draw((1, 1, 1, 2, 3, 4, 4))
    v = v.at[0, 0, 1].set(jnp.nan)
    out = attention_tkg_fwd_kernel(q, k, v, k_prior, v_prior, lengths=jnp.array([2]))
    assert jnp.isfinite(out[..., 0]).all() and jnp.isnan(out[..., 1]).all()


def test_a_row_that_sees_nothing_gets_zero_and_finite_gradients():
    """R-01, on the mask of a decode step."""
    q = jnp.ones((1, 1, 2, 1))
    k_prior, v_prior = jnp.array([1.0, 2]).reshape(1, 1, 1, 2), jnp.array([3.0, 5])
    v_prior = v_prior.reshape(1, 1, 2, 1)
    mask = jnp.array([[True, False], [True, False]])[:, None, None]

    def out(q, k, v):
        return attention_tkg_fwd_kernel(q, None, None, k, v, mask=mask)

    np.testing.assert_allclose(out(q, k_prior, v_prior).ravel(), [4.462117, 0], 1e-6)
    _, pull = jax.vjp(out, q, k_prior, v_prior)
    for scale in (1.0, 1e30):
        dq, dk, dv = pull(jnp.array([1.0, scale]).reshape(1, 1, 1, 2))
        np.testing.assert_allclose(dq.ravel(), [0.393224, 0], atol=2e-6)
        np.testing.assert_allclose(dk.ravel(), [-0.393224, 0.393224], atol=2e-6)
        np.testing.assert_allclose(dv.ravel(), [0.268941, 0.731059], atol=2e-6)


def test_three_cached_and_two_new_tokens_are_causal_at_the_end():
    """R-03: prior 3 and active 2 give [2.5, 3.0]."""
    zeros = jnp.zeros((1, 1, 2, 1))
    values = jnp.arange(1.0, 6.0).reshape(1, 1, 5, 1)
    got = attention_tkg_fwd_kernel(
        zeros,
        zeros,
        values[:, :, 3:],
        jnp.zeros((1, 1, 1, 3)),
        values[:, :, :3],
        lengths=jnp.array([3]),
    )
    np.testing.assert_allclose(got.ravel(), [2.5, 3.0])


def test_one_token_sees_the_whole_prior_part():
    """R-14: cache of 8, one query at position 3."""
    values = jnp.array([1.0, 2, 3, 4, 0, 0, 0, 0]).reshape(1, 1, 8, 1)
    zero = jnp.zeros((1, 1, 1, 1))
    got = attention_tkg_fwd_kernel(
        zero,
        zero,
        values[:, :, 3:4],
        jnp.zeros((1, 1, 1, 8)),
        values,
        lengths=jnp.array([3]),
    )
    np.testing.assert_allclose(got.ravel(), [2.5])


def test_a_ragged_batch_may_have_an_empty_row():
    """R-16: lengths [0, 1, 4] give [0, 1, 3], traced, in one compilation."""
    chex.clear_trace_counter()
    values = jnp.broadcast_to(jnp.array([1.0, 2, 3, 6]).reshape(4, 1), (3, 1, 4, 1))
    query, keys = jnp.zeros((3, 1, 1, 1)), jnp.zeros((3, 1, 1, 4))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def attend(lengths):
        return attention_tkg_fwd_kernel(
            query, None, None, keys, values, lengths=lengths
        )

    np.testing.assert_allclose(attend(jnp.array([0, 1, 4])).ravel(), [0, 1, 3])
    np.testing.assert_allclose(attend(jnp.array([2, 0, 0])).ravel(), [1.5, 0, 0])


@pytest.mark.parametrize(("heads", "wanted"), [(4, [10, 10, 20, 20]), (6, [10] * 3)])
def test_key_heads_are_repeated_and_not_tiled(heads, wanted):
    """R-06."""
    values = jnp.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    zero, keys = jnp.zeros((1, heads, 1, 1)), jnp.zeros((1, 2, 1, 1))
    got = attention_tkg_fwd_kernel(
        zero, keys, values, keys, values, lengths=jnp.array([1])
    )
    np.testing.assert_allclose(got.ravel()[: len(wanted)], wanted)


def _config(**changes):
    sizes = dict(bs=2, q_head=2, s_active=2, curr_sprior=6, full_sprior=8, d_head=64)
    return neuronjax.AttnTKGConfig(**{**sizes, **changes})


def _tkg_arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    sizes = [(2, 2, 2, 64), (2, 1, 2, 64), (2, 1, 2, 64), (3, 1, 64, 8), (3, 1, 8, 64)]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in sizes]


def test_position_ids_without_a_mask_are_causal():
    arrays = _tkg_arrays()
    positions = jnp.array([[3, 4], [0, 1]])
    config = _config(use_pos_id=True)
    got, _ = neuronjax.attention_tkg(*arrays, None, config, rope_pos_ids=positions)
    seen = _visible([3, 0], 2, 4)
    arrays[3], arrays[4] = arrays[3][:2, :, :, :4], arrays[4][:2, :, :4]
    np.testing.assert_allclose(got, _attend(*arrays, seen), rtol=1e-4, atol=1e-5)


def test_a_tree_of_new_tokens_is_what_its_mask_says():
    arrays = _tkg_arrays()
    positions = jnp.array([[3, 4], [0, 1]])
    tree = np.broadcast_to(np.eye(2, dtype=bool)[:, None, None], (2, 2, 2, 2))
    config = _config(use_pos_id=True)
    got, _ = neuronjax.attention_tkg(
        *arrays, jnp.asarray(tree), config, rope_pos_ids=positions
    )
    seen = np.concatenate(
        [np.broadcast_to(_visible([3, 0], 2, 4)[:4], (4, 2, 2, 2)), tree]
    )
    arrays[3], arrays[4] = arrays[3][:2, :, :, :4], arrays[4][:2, :, :4]
    np.testing.assert_allclose(got, _attend(*arrays, seen), rtol=1e-4, atol=1e-5)


def test_gradients_come_from_the_stored_statistics():
    """A poisoned statistic changes the gradients that derive from it, no others."""
    arrays = _draw((1, 2, 1, 2, 4, 4, 4))
    config = dict(
        prior_slots=4, tp_k_prior=False, fuse_rope=False, is_tkg=True, is_tiled=False
    )
    operands = (*arrays, None, jnp.array([3]), *[None] * 5)
    family = registry.resolve_family("AttentionTkgFwd")
    outs = family(*operands, name="AttentionTkgFwd", **config)
    seeds = (jnp.ones_like(outs[0]), None, None)

    def run(*outs):
        return attention_tkg_backward(
            *operands, *outs, *seeds, name="AttentionTkgFwdBwd", **config
        )

    nan = [jnp.full_like(x, jnp.nan) for x in outs]
    of_out = [bool(jnp.isnan(g).any()) for g in run(nan[0], *outs[1:])]
    assert of_out == [True, True, False, True, False]
    for i in (1, 2):
        poisoned = [nan[j] if j == i else x for j, x in enumerate(outs)]
        assert all(bool(jnp.isnan(g).any()) for g in run(*poisoned))


def test_the_gradient_of_a_sink_comes_from_every_stored_statistic():
    arrays, sink = _draw((1, 2, 1, 2, 4, 4, 4)), jnp.ones((2, 1))
    rest = (None, jnp.array([3]), None, None, sink, None, None)
    config = dict(prior_slots=4, tp_k_prior=False, fuse_rope=False)
    config |= dict(is_tkg=True, is_tiled=False)
    family = registry.resolve_family("AttentionTkgFwd")
    outs = family(*arrays, *rest, name="AttentionTkgFwd", **config)
    backward = registry.resolve_family("AttentionTkgFwdBwd")
    for i in range(3):
        stored = [x * jnp.nan if j == i else x for j, x in enumerate(outs)]
        stored += [jnp.ones_like(outs[0]), None, None]
        *_, d_sink = backward(
            *arrays, *rest, *stored, name="AttentionTkgFwdBwd", **config
        )
        assert jnp.isnan(d_sink).all()


def test_the_macro_says_that_it_decodes():
    arrays = _draw((1, 2, 1, 1, 4, 4, 4))
    attend = functools.partial(attention_tkg_fwd_kernel, lengths=jnp.array([3]))
    (row,) = neuronjax.trace(attend, *arrays).rows
    assert row.name == "AttentionTkgFwd" and dict(row.config)["is_tkg"]


@pytest.mark.parametrize("plain", [False, True])
def test_an_empty_past_leaves_the_new_tokens(plain):
    """`curr_sprior` is `s_active`; and no slot at all, which gives zeros."""
    arrays = _tkg_arrays()
    mask = np.tri(2, dtype=bool).T[:, None, None]
    config, seen = _config(curr_sprior=2), jnp.broadcast_to(mask, (2, 2, 2, 2))

    def attend(q):
        out, _ = neuronjax.attention_tkg(q, *arrays[1:], seen, config)
        cached = (q, None, None, *arrays[3:])
        none = attention_tkg_fwd_kernel(
            *cached, lengths=jnp.array([3, 0]), prior_slots=0
        )
        return jnp.sin(out).sum() + none.sum(), (out, none)

    with neuronjax.plain() if plain else contextlib.nullcontext():
        (_, (out, none)), dq = jax.value_and_grad(attend, has_aux=True)(arrays[0])
    read = [*arrays[:3], arrays[3][:2, :, :, :0], arrays[4][:2, :, :0]]
    wanted = _attend(*read, np.broadcast_to(mask, (2, 2, 2, 2)))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert not np.any(none) and np.isfinite(dq).all() and np.any(dq)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_frequencies_turn_by_the_angles_that_they_say(dtype):
    """A position past what the dtype holds exactly is not rounded to it."""
    arrays = _draw((1, 1, 1, 1, 2, 4, 4))
    freqs = jnp.array([[1.0], [0.1]], dtype)

    def keys(freqs):
        return attention_tkg_fwd_kernel(
            *arrays,
            lengths=jnp.array([2]),
            inv_freqs=freqs,
            rope_pos_ids=jnp.array([[70001]]),
        )[1]

    np.testing.assert_array_equal(keys(freqs), keys(freqs.astype("float32")))
    angles = 70001.0 * np.asarray(freqs, np.float64)[:, 0]
    first, second = np.split(np.asarray(arrays[1], np.float64)[0, 0, 0], 2)
    turned = first * np.cos(angles) - second * np.sin(angles)
    np.testing.assert_allclose(keys(freqs)[0, 0, 0, :2], turned, atol=2e-2)


@pytest.mark.parametrize("length", [-1, 8])
def test_a_length_that_no_sequence_has_is_refused_where_it_is_known(length):
    """Under jit it is the nearest one."""
    arrays = _draw(SHAPES[1])

    def attend(lengths):
        return attention_tkg_fwd_kernel(*arrays, lengths=lengths)

    lengths = jnp.array([3, length, 7])
    with pytest.raises(ValueError, match=rf"lengths must lie in \[0, 7\].*{length}"):
        attend(lengths)
    wanted = attend(jnp.clip(lengths, 0, 7))
    np.testing.assert_allclose(jax.jit(attend)(lengths), wanted, atol=1e-6)
