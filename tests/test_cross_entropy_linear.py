"""The loss of `x w` without its logits, against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import emit
from neuronjax.kernels.cross_entropy import linear
from neuronjax.kernels.cross_entropy.linear import rows_for
from tests.cross_entropy_equations import linear_loss_and_gradients, token_losses

TARGETS = np.array([3, 0, -100, 8, 6, 1, 1], np.int32)
WEIGHTS = np.array([1, 0.5, 2, 0, 3, 1, 0.25], np.float32)


def drawn(dtype="float32", tokens=7, d_model=4, vocab=9):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(tokens, d_model)), rng.normal(size=(d_model, vocab))
    return np.asarray(x, dtype), np.asarray(w, dtype)


OPTIONS = {
    "plain": dict(ignore_index=-100),
    "smooth": dict(ignore_index=-100, label_smoothing=0.2, weights=WEIGHTS),
    "z": dict(ignore_index=-100, z_loss=0.05, weights=WEIGHTS),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("block_size", [2, 256])
def test_loss_and_gradients_equal_the_equations(block_size, options, reduction):
    """Blocks of two do not divide seven tokens: one is filled up."""
    given = dict(options, reduction=reduction)

    def loss(x, w):
        return neuronjax.linear_cross_entropy(
            x, w, TARGETS, block_size=block_size, **given
        )

    def both(x, w):
        total = jax.grad(lambda *args: jnp.sum(loss(*args)), (0, 1))
        return loss(x, w), *total(x, w)

    x, w = drawn()
    wanted = linear_loss_and_gradients(x, w, TARGETS, **given)
    for got, right in zip(jax.jit(both)(x, w), wanted, strict=True):
        np.testing.assert_allclose(got, right, 2e-5, 5e-6)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_weights_have_a_gradient(reduction):
    x, w = drawn()

    def loss(weights):
        options = dict(reduction=reduction, ignore_index=-100, block_size=3)
        return jnp.sum(
            neuronjax.linear_cross_entropy(x, w, TARGETS, weights=weights, **options)
        )

    places = np.where(TARGETS == -100, 0, TARGETS)
    wanted = np.where(TARGETS == -100, 0, token_losses(np.float64(x) @ w, places)[0])
    np.testing.assert_allclose(jax.grad(loss)(WEIGHTS), wanted, 1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_narrow_factors_err_no_more_than_the_plain_computation(dtype, reduction):
    """Twice what plain JAX errs in the same dtype; float16 keeps small gradients."""
    with jax.enable_x64(dtype == "float64"):
        x, w = map(jnp.asarray, drawn(dtype))
        y = np.where(TARGETS < 0, 0, TARGETS)

        def ours(x, w):
            options = dict(block_size=3, reduction=reduction)
            return jnp.mean(neuronjax.linear_cross_entropy(x, w, y, **options))

        def plain(x, w):
            log_p = jax.nn.log_softmax((x @ w).astype(wide))
            return -jnp.mean(log_p[np.arange(7), y])

        wide = jnp.float64 if dtype == "float64" else jnp.float32
        loss, grads = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, w)
        assert loss.dtype == wide and {g.dtype for g in grads} == {jnp.dtype(dtype)}
        right = linear_loss_and_gradients(x, w, y)
        other, others = jax.jit(jax.value_and_grad(plain, (0, 1)))(x, w)
        triples = zip((loss, *grads), (other, *others), right, strict=True)
        for got, peer, wanted in triples:
            allowed = 2 * np.abs(np.float64(peer) - wanted).max()
            eps = float(jnp.finfo(got.dtype).eps) * np.abs(wanted).max()
            assert np.abs(np.float64(got) - wanted).max() <= allowed + 4 * eps


def test_small_gradients_do_not_vanish_in_float16():
    """Each is divided by the number of tokens: 2**-20 lies below float16's range."""
    x, w = map(jnp.asarray, drawn("float16"))
    share = jnp.full(7, 2.0**-20)
    y = np.where(TARGETS < 0, 0, TARGETS)

    def loss(x, w):
        total = emit.linear_cross_entropy_kernel(x, w, y, share, block_size=3)
        return 2.0**20 * total

    grads = jax.grad(loss, (0, 1))(x, w)
    wanted = linear_loss_and_gradients(x, w, y, reduction="sum")[1:]
    for got, right in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(np.float64(got), right, 5e-3, 5e-3)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_ignored_tokens_never_leak(reduction):
    x, w = drawn()
    x[2] = np.nan

    def loss(x, w):
        options = dict(ignore_index=-100, reduction=reduction, block_size=3)
        return jnp.sum(neuronjax.linear_cross_entropy(x, w, TARGETS, **options))

    got, grads = jax.value_and_grad(loss, (0, 1))(x, w)
    assert np.isfinite(got) and not np.any(grads[0][2])
    assert all(np.isfinite(g).all() for g in grads)


def test_every_token_ignored():
    """R-28."""
    x, w = drawn()
    y = np.full(7, -100, np.int32)
    loss, grads = jax.value_and_grad(neuronjax.linear_cross_entropy, (0, 1))(
        x, w, y, ignore_index=-100, block_size=3
    )
    assert loss == 0 and not any(np.any(g) for g in grads)


@pytest.mark.parametrize("target", [9, -1])
def test_targets_outside_the_vocabulary(target):
    """R-30: refused where known, else NaN; and nothing comes from that token."""
    x, w = drawn()
    y = np.where(np.arange(7) == 2, target, 1)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 9\)"):
        neuronjax.linear_cross_entropy(x, w, y)

    @jax.jit
    def losses(x, y):
        options = dict(reduction="none", block_size=3)
        return neuronjax.linear_cross_entropy(x, w, y, **options)

    loss, pull = jax.vjp(lambda x: losses(x, jnp.asarray(y)), x)
    assert np.isnan(loss).tolist() == (np.arange(7) == 2).tolist()
    (grad,) = pull(jnp.ones_like(loss))
    assert np.isfinite(grad).all() and not np.any(grad[2])
    mean = jax.jit(lambda y: neuronjax.linear_cross_entropy(x, w, y))
    assert np.isnan(mean(jnp.asarray(y)))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_derivatives_of_both_orders(reduction):
    x, w = map(jnp.asarray, drawn(tokens=4, d_model=2, vocab=3))
    y, weights = np.array([1, 0, 2, 2], np.int32), jnp.array([0.7, 1.3, 0.2, 1.0])

    def loss(x, w, weights):
        options = dict(label_smoothing=0.1, z_loss=0.2, reduction=reduction)
        return jnp.sum(
            neuronjax.linear_cross_entropy(
                x, w, y, weights=weights, block_size=3, **options
            )
        )

    check_grads(jax.jit(loss), (x, w, weights), 2, ("rev",), 3e-2, 3e-2, eps=1e-2)


def test_three_products_where_weights_are_known_and_four_where_not():
    x, w = drawn(tokens=6)
    y = np.zeros(6, np.int32)

    def products(reduction):
        def loss(x, w):
            options = dict(reduction=reduction, block_size=6)
            return jnp.sum(neuronjax.linear_cross_entropy(x, w, y, **options))

        grad = jax.jit(jax.value_and_grad(loss, (0, 1)))
        return grad.lower(x, w).as_text().count("stablehlo.dot_general")

    assert products("mean") == 3 and products("none") == 4


def test_macros_by_name_under_remat():
    """R-46: with its names kept the forward macro, and its products, run once."""
    x, w = drawn()
    y = np.where(TARGETS < 0, 0, TARGETS)
    policies = jax.checkpoint_policies
    names = [f"linear_cross_entropy_{name}" for name in ("total", "each", "dx", "dw")]
    kept = policies.save_only_these_names(*names)
    for policy, times in {kept: 1, policies.nothing_saveable: 2}.items():
        loss = jax.checkpoint(
            lambda x, w: neuronjax.linear_cross_entropy(x, w, y), policy=policy
        )
        traced = neuronjax.trace(jax.grad(loss, (0, 1)), x, w)
        assert traced.count("LinearCrossEntropy") == times
        assert traced.count("LinearCrossEntropyBwd") == 1


def test_tokens_of_any_rank():
    x, w = drawn(tokens=6)
    y = np.array([3, 0, 2, 8, 6, 1], np.int32)
    wanted = token_losses(np.float64(x) @ w, y)[0]
    options = dict(reduction="none", block_size=4)
    got = neuronjax.linear_cross_entropy(
        x.reshape(2, 3, 4), w, y.reshape(2, 3), **options
    )
    np.testing.assert_allclose(got, wanted.reshape(2, 3), 1e-5)
    one = neuronjax.linear_cross_entropy(x[0], w, y[0])
    np.testing.assert_allclose(one, wanted[0], 1e-5)


def test_blocks_are_smaller_where_the_vocabulary_is_large():
    assert [rows_for(v) for v in (1, 131072, 131073, 2**30)] == [256, 256, 128, 1]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("vocab", [10, 11])
def test_a_large_gradient_is_summed_by_parts(monkeypatch, vocab, reduction):
    """Of the rows of `dw`; this shape has no other test, so it is traced here."""
    monkeypatch.setattr(linear, "LARGE", 1)
    x, w = drawn(tokens=7, d_model=8, vocab=vocab)
    options = dict(ignore_index=-100, z_loss=0.05, reduction=reduction)

    def loss(x, w):
        out = neuronjax.linear_cross_entropy(x, w, TARGETS, block_size=3, **options)
        return jnp.sum(out)

    grad = jax.grad(loss, (0, 1))
    lowered = jax.jit(grad).lower(x, w).as_text()
    assert f"tensor<2x{vocab}xf32>" in lowered
    _, dx, dw = linear_loss_and_gradients(x, w, TARGETS, **options)
    for got, wanted in zip(jax.jit(grad)(x, w), (dx, dw), strict=True):
        np.testing.assert_allclose(got, wanted, 2e-5, 5e-6)
    mapped = jax.jit(jax.vmap(grad, (None, 0)))(x, np.stack([w, 2 * w]))[1]
    np.testing.assert_allclose(mapped[0], dw, 2e-5, 5e-6)
    check_grads(jax.jit(loss), (x, w), 2, atol=2e-2, rtol=2e-2)
