"""Dropout of attention weights: one mask a key, in every pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.emit import attention_kernel, backwards_attention_kernel
from tests.attention_case import DROPPED, Case, error


def _four():
    """R-12's call: causal, four rows, one-hot values."""
    zeros = jnp.zeros((1, 4, 1))
    return zeros, zeros, jnp.eye(4)[None]


def _dropped(key, rate=0.9, **options):
    settings = dict(dropout_rate=rate, dropout_key=key, tp_k=True)
    return neuronjax.attention_cte(*_four(), **(settings | options))


def test_early_rows_have_no_nan_and_weights_are_divided_after_the_softmax():
    """R-12: rate 0.9, several keys: each weight is 0 or softmax / 0.1."""
    softmax = np.tri(4) / np.arange(1, 5)[:, None]
    kept = 0
    for seed in range(6):
        out = np.asarray(_dropped(jax.random.key(seed)))[0]
        assert np.isfinite(out).all()
        hit = out > 0
        np.testing.assert_allclose(out[hit], (softmax / 0.1)[hit], rtol=1e-5)
        kept += hit.sum()
    assert 0 < kept < 30  # of 60 visible weights, 6 expected


def test_one_key_is_one_mask_in_every_pass():
    """R-12: forward, again, jit, backward and remat."""
    key = jax.random.key(3)
    q, k, v = _four()

    def run(v, key):
        options = dict(dropout_rate=0.5, dropout_key=key, tp_k=True)
        return neuronjax.attention_cte(q, k, v, **options)

    weights = run(v, key)[0]
    np.testing.assert_array_equal(run(v, key)[0], weights)
    np.testing.assert_array_equal(jax.jit(run)(v, key)[0], weights)
    assert (np.asarray(run(v, jax.random.key(4))[0]) != np.asarray(weights)).any()
    d_out = jnp.arange(16.0).reshape(1, 4, 4)
    for f in (run, jax.checkpoint(run), jax.jit(jax.checkpoint(run))):
        out, pull = jax.vjp(f, v, key)
        np.testing.assert_array_equal(out[0], weights)
        np.testing.assert_allclose(pull(d_out)[0][0], weights.T @ d_out[0], rtol=1e-6)


def test_rate_zero_needs_no_key_and_a_rate_needs_one():
    """R-12."""
    plain = neuronjax.attention_cte(*_four(), tp_k=True)
    np.testing.assert_array_equal(_dropped(None, 0.0), plain)
    np.testing.assert_array_equal(_dropped(jax.random.key(0), 0.0), plain)
    with pytest.raises(ValueError, match="dropout_key"):
        _dropped(None, 0.1)
    for rate in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="dropout_rate"):
            _dropped(jax.random.key(0), rate)


def test_the_raw_macros_refuse_dropout_by_name():
    """R-12: the backward in the contract's words, the forward under its name."""
    q, k, v = _four()
    outs = attention_kernel(q, k.mT, v, tp_q=True, cache_softmax=True)
    message = (
        "Backwards Attention BIR kernel does not currently support non zero dropout "
        "prob"
    )
    with pytest.raises(ValueError) as refusal:
        args = q, k.mT, v, outs[0], outs[0], *outs[1:]
        backwards_attention_kernel(*args, tp_q=True, dropout_prob=0.1)
    assert message in str(refusal.value)
    with pytest.raises(ValueError, match="attention_kernel: dropout_prob must be 0"):
        attention_kernel(q, k.mT, v, tp_q=True, dropout_prob=0.1)


def test_the_mask_has_its_rate_and_differs_between_heads_rows_and_blocks():
    case = Case(300, 520, heads=(4, 2), widths=(1, 520), causal=False, rate=0.3)
    keep = case.kept()
    count = keep.size
    assert abs(keep.mean() - 0.7) < 5 * np.sqrt(0.21 / count)
    # Independent masks agree on 0.49 + 0.09 of the weights.
    pairs = [(keep[0], keep[h]) for h in (1, 2, 3)]
    pairs += [(keep[:, :-n], keep[:, n:]) for n in (1, 2, 256)]
    pairs += [(keep[..., :-n], keep[..., n:]) for n in (1, 256)]
    for a, b in pairs:
        assert abs((a == b).mean() - 0.58) < 0.02
    rows = keep.mean((0, 2)), keep.mean((0, 1))
    for means, size in zip(rows, (4 * 520, 4 * 300), strict=True):
        assert np.abs(means - 0.7).max() < 6 * np.sqrt(0.21 / size)


def test_the_mask_is_that_of_the_key_whatever_the_operands_are():
    """Read from random scores instead of equal ones, in another width."""
    case = DROPPED["dropped_prefix"]
    floats, prior = case.floats(), case.prior
    columns = np.broadcast_to(np.eye(case.columns), (2, case.columns, case.columns))
    columns = jnp.asarray(columns, jnp.float32)
    floats |= dict(v_prior=columns[:, :prior], v=columns[:, prior:])
    out = np.asarray(jax.jit(case.call)(floats, case.rest())[0])
    seen = np.broadcast_to(case.seen(), out.shape)
    np.testing.assert_array_equal((out > 0)[seen], case.kept()[seen])


def test_keys_map_over_a_batch():
    """R-42: one mask a key under vmap, forward and gradient."""
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = _four()

    def loss(v, key):
        options = dict(dropout_rate=0.5, dropout_key=key, tp_k=True)
        return jnp.sum(jnp.sin(1 + neuronjax.attention_cte(q, k, v, **options)))

    def whole(v):
        return jax.vmap(loss, (None, 0))(v, keys).sum()

    got = jax.jit(jax.value_and_grad(whole))(v)
    single = jax.jit(jax.value_and_grad(loss))
    each = [single(v, key) for key in keys]
    assert len({float(value) for value, _ in each}) == 3
    for a, b in zip(got, map(sum, zip(*each, strict=True)), strict=True):
        assert error(a, b) <= 1e-5


def test_statistics_are_those_before_dropout():
    outs = [
        _dropped(jax.random.key(0), rate, cache_softmax=True)[1:] for rate in (0.0, 0.9)
    ]
    for a, b in zip(*outs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropped_weights_keep_the_expectation():
    """The mean over keys is attention without dropout."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32) for _ in range(3))
    keys = jax.random.split(jax.random.key(2), 2000)

    def run(key):
        options = dict(dropout_rate=0.4, dropout_key=key, tp_k=True)
        return neuronjax.attention_cte(q, k, v, **options)

    mean = jax.jit(lambda keys: jax.lax.map(run, keys).mean(0))(keys)
    wanted = neuronjax.attention_cte(q, k, v, tp_k=True)
    np.testing.assert_allclose(mean, wanted, atol=0.12)
