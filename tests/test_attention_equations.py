"""The float64 reference of attention, against numbers worked by hand and jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_equations import Attention, attend, visible


def _row(*values):
    return np.asarray(values, np.float64).reshape(1, -1, 1)


def _out(v, seen, **options):
    """The result of equal scores, by row."""
    seen = np.asarray(seen)
    zeros = np.zeros((1, seen.shape[-2], 1)), np.zeros((1, seen.shape[-1], 1))
    return attend(*zeros, _row(*v), seen, **options)[0].ravel()


def test_a_row_that_sees_nothing():
    """R-01."""
    seen = np.array([[[True, True], [False, False]]])
    whole = Attention(_row(1, 1), _row(1, 2), _row(3, 5), seen)
    out, neg_max, recip, lse = whole.outputs()
    np.testing.assert_allclose(out.ravel(), [4.462117, 0], rtol=1e-6)
    assert lse[0, 1] == -np.inf and neg_max[0, 1] == np.inf and recip[0, 1] == 1
    got = whole.gradients(1.0)
    np.testing.assert_allclose(got["q"].ravel(), [0.393224, 0], rtol=1e-5)
    np.testing.assert_allclose(got["k"].ravel(), [-0.393224, 0.393224], rtol=1e-5)
    np.testing.assert_allclose(got["v"].ravel(), [0.268941, 0.731059], rtol=1e-5)


def test_scores_far_below_zero():
    """R-02."""
    seen = np.array([True, True, False, False])
    k, v = _row(-200, -201, 0, 0), _row(1, 2, 50, 60)
    out, _, _, lse = attend(_row(1), k, v, seen)
    np.testing.assert_allclose(out.ravel(), [1.268941], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), [-199.686738], rtol=1e-8)


def test_alignment_window_and_prefix():
    """R-03, R-04, R-17."""
    five = (1, 2, 3, 4, 5)
    assert _out(five, visible(2, 5, True)).tolist() == [1.0, 1.5]
    seen = visible(2, 2, True, prior=3, used=3)
    assert _out(five, seen).tolist() == [2.5, 3.0]
    window = [_out((1, 2, 4, 8), visible(4, 4, True, window=w)) for w in (2, 1)]
    assert [x.tolist() for x in window] == [[1, 1.5, 3, 6], [1, 2, 4, 8]]
    for used, wanted in ((2, 3.0), (0, 6.0)):
        seen = visible(1, 1, True, prior=4, used=used)
        assert seen[0, 0].tolist() == [j < used for j in range(4)] + [True]
        assert _out((1, 2, 1e9, 1e9, 6), seen) == [wanted]


def test_positions_of_a_window_over_a_prefix_and_of_a_slice():
    def keys(*lengths, **rules):
        return [np.flatnonzero(row).tolist() for row in visible(*lengths, **rules)[0]]

    # u = 2 of 3 slots: columns 0, 1, 3, 4 stand at -2, -1, 0, 1
    rules = dict(prior=3, used=2, window=3, causal=True)
    assert keys(2, 2, **rules) == [[0, 1, 3], [1, 3, 4]]
    assert keys(2, 6, causal=True, offset=2) == [[0, 1, 2], [0, 1, 2, 3]]
    rules = dict(causal=True, offset=1, stride=3, window=2)
    assert keys(2, 6, **rules) == [[0, 1], [3, 4]]
    bounds = [0, 0, 2, 5], [2, 2, 4, 5]
    assert keys(4, 5, causal=True, bounds=bounds) == [[0], [0, 1], [2], []]


def test_a_sink_is_in_the_denominator():
    """R-05."""
    for sink, out, slope in ((0.0, 3.0, -1.0), (np.log(2), 2.25, -1.125)):
        whole = Attention(
            _row(0), _row(0, 0), _row(3, 6), visible(1, 2, False), sink=[[sink]]
        )
        np.testing.assert_allclose(whole.outputs()[0].ravel(), [out])
        np.testing.assert_allclose(whole.gradients(1.0)["sink"], [[slope]])
    alone = attend(_row(0), _row(0), _row(3), np.zeros((1, 1, 1), bool), sink=[[0.5]])
    assert [x.item() for x in alone] == [0.0, -0.5, 1.0, 0.5]


def test_gradients_of_a_bias_and_of_the_log_sum_exp():
    """R-09, R-10."""
    zeros = np.zeros((2, 1, 1)), np.zeros((2, 2, 1))
    v = np.array([[[1.0], [3.0]]] * 2)
    whole = Attention(*zeros, v, True, bias=np.zeros((1, 1, 2)))
    np.testing.assert_allclose(whole.gradients(1.0)["bias"], [[[-1, 1]]])
    whole = Attention(_row(1), _row(0, np.log(3)), _row(0, 0), True)
    got = whole.gradients(d_lse=1.0)
    np.testing.assert_allclose(whole.outputs()[3].ravel(), [1.386294], rtol=1e-6)
    np.testing.assert_allclose(got["q"].ravel(), [0.823959], rtol=1e-5)
    np.testing.assert_allclose(got["k"].ravel(), [0.25, 0.75])


def test_a_bias_of_minus_infinity_hides_and_dropped_weights_are_lost():
    bias = np.array([[[0.0, -np.inf, 0.0, 0.0]]])
    whole = Attention(_row(0), _row(0, 0, 0, 0), _row(3, 1e9, 6, 9), True, bias=bias)
    np.testing.assert_allclose(whole.outputs()[0].ravel(), [6.0])
    got = whole.gradients(1.0)["bias"].ravel()
    np.testing.assert_allclose(got, [-1, 0, 0, 1], atol=1e-15)
    keep = np.array([[[True, True, False, False]]])
    for rate, out in ((0.5, 2.0), (0.9, 10.0)):
        whole = dict(bias=bias, keep=keep, rate=rate)
        got = attend(_row(0), _row(0, 0, 0, 0), _row(3, 1, 6, 9), True, **whole)
        np.testing.assert_allclose(got[0].ravel(), [out])
        np.testing.assert_allclose(got[3].ravel(), [np.log(3)])  # before dropout


@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_equals_jax_nn_where_every_row_sees_a_key(window):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rng = np.random.default_rng(0)
        q, k, v = (rng.normal(size=(n, 9, 4)) for n in (6, 2, 2))
        bias, mask = rng.normal(size=(6, 9, 9)), rng.random((6, 9, 9)) < 0.7
        mask |= np.eye(9, dtype=bool)
        d_out = rng.normal(size=q.shape)
        side = {} if window is None else {"local_window_size": (window - 1, 0)}

        def run(q, k, v, bias):
            q, k, v = (jnp.swapaxes(x, 0, 1)[None] for x in (q, k, v))
            options = dict(mask=jnp.asarray(mask)[None], scale=0.3, is_causal=True)
            out = jax.nn.dot_product_attention(q, k, v, bias[None], **options, **side)
            return jnp.swapaxes(out[0], 0, 1)

        # float32 inside, whatever the operands are
        out, pull = jax.vjp(run, *map(jnp.asarray, (q, k, v, bias)))
        seen = visible(9, 9, True, mask, heads=6, window=window)
        whole = Attention(q, k, v, seen, 0.3, bias=bias)
        np.testing.assert_allclose(whole.outputs()[0], out, rtol=1e-5, atol=1e-6)
        got = whole.gradients(d_out)
        for name, wanted in zip(("q", "k", "v", "bias"), pull(d_out), strict=True):
            np.testing.assert_allclose(got[name], wanted, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_differences():
    """Everything at once: cap, bias, sinks, dropout, and all four cotangents."""
    rng = np.random.default_rng(1)
    names = dict(q=(4, 3, 2), k=(2, 5, 2), v=(2, 5, 3), bias=(1, 3, 5), sink=(4, 2))
    arrays = {name: rng.normal(size=shape) for name, shape in names.items()}
    rest = dict(seen=visible(3, 5, True, window=2), scale=0.7, cap=1.5, rate=0.4)
    rest["keep"] = rng.random((4, 3, 5)) < 0.6
    shapes = (4, 3, 3), (4, 3, 1), (4, 3, 1), (4, 3, 1)
    d_out, d_neg_max, d_recip, d_lse = (rng.normal(size=s) for s in shapes)

    def loss(**moved):
        outs = Attention(**{**arrays, **moved}, **rest).outputs()
        seeds = d_out, d_neg_max, d_recip, d_lse
        return sum(np.sum(a * b) for a, b in zip(outs, seeds, strict=True))

    got = Attention(**arrays, **rest).gradients(d_out, d_lse, d_neg_max, d_recip)
    for name, value in arrays.items():
        step = 1e-5 * rng.normal(size=value.shape)
        slope = loss(**{name: value + step}) - loss(**{name: value - step})
        np.testing.assert_allclose(slope / 2, np.sum(got[name] * step), rtol=1e-6)
