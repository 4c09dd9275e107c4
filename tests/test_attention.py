"""Prefill attention and its backward, against float64 attention row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax.emit import (
    attention_kernel,
    backwards_attention_kernel,
)
from tests.attention_equations import attend, gradients, visible
from tests.prefill_case import CAUSAL, FULL, draw, one_head


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", range(8))
def test_every_layout_equals_the_equations(layout, causal):
    tp_q, tp_k, tp_out = (bool(layout & bit) for bit in (1, 2, 4))
    q, k, v = draw(5, 7)
    got = neuronjax.attention_cte(
        q if tp_q else q.mT,
        k if tp_k else k.mT,
        v,
        scale=0.3,
        causal_mask=causal,
        tp_q=tp_q,
        tp_k=tp_k,
        tp_out=tp_out,
        cache_softmax=True,
    )
    wanted = attend(q, k, v, visible(5, 7, causal, heads=6), 0.3)[:3]
    np.testing.assert_allclose(got[0].mT if tp_out else got[0], wanted[0], rtol=1e-4)
    for a, b in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("causal", "tp_k", "target", "name"),
    [
        (False, True, "gen3", "AttentionMMSoftmaxMM"),
        (False, True, "gen2", "AttentionMMSoftmaxMM"),
        (False, False, "gen3", FULL),
        (True, False, "gen3", CAUSAL),
        (True, True, "gen3", CAUSAL),
        (False, False, "gen2", f"V2{FULL}"),
        (True, False, "gen2", f"V2{CAUSAL}"),
        (True, False, "gen4", CAUSAL),
    ],
)
def test_layout_causality_and_target_choose_the_name(causal, tp_k, target, name):
    q, k, v = draw(3, 4)
    call = functools.partial(neuronjax.attention_cte, tp_k=tp_k, causal_mask=causal)
    with neuronjax.target(target):
        (row,) = neuronjax.trace(call, q, k if tp_k else k.mT, v).rows
    assert row.name == name and dict(row.config)["scale"] == 1.0


def test_fully_masked_row():
    """R-01: zero output and gradients, lse -inf; its cotangent changes nothing."""
    mask = jnp.array([[[True, True], [False, False]]])
    operands = one_head(1, 1), one_head(1, 2).mT, one_head(3, 5)

    def run(q, k, v):
        return attention_kernel(q, k, v, mask, tp_q=True, cache_softmax=True)

    (out, neg_max, recip), pull = jax.vjp(run, *operands)
    lse = -neg_max - jnp.log(recip)
    np.testing.assert_allclose(out.ravel(), [4.462117, 0], rtol=1e-6)
    assert lse.ravel()[1] == -jnp.inf and np.isfinite(lse.ravel()[0])
    for huge in (1.0, 1e30, np.inf, np.nan):
        seeds = one_head(1, huge), jnp.zeros_like(recip), jnp.zeros_like(recip)
        dq, dk, dv = (x.ravel() for x in pull(seeds))
        np.testing.assert_allclose(dq, [0.393224, 0], rtol=1e-5)
        np.testing.assert_allclose(dk, [-0.393224, 0.393224], rtol=1e-5)
        np.testing.assert_allclose(dv, [0.268941, 0.731059], rtol=1e-5)


def test_causal_alignment_is_top_left():
    """R-03: [1.0, 1.5], never guessed from the lengths."""
    got = neuronjax.attention_cte(
        one_head(0, 0), one_head(*[0] * 5).mT, one_head(1, 2, 3, 4, 5)
    )
    np.testing.assert_allclose(got.ravel(), [1.0, 1.5])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2)])
def test_key_heads_are_repeated_and_not_tiled(heads, kv_heads):
    """R-06."""
    v = jnp.array([10.0, 20.0]).reshape(2, 1, 1)
    got = neuronjax.attention_cte(jnp.zeros((heads, 1, 1)), jnp.zeros((2, 1, 1)), v)
    np.testing.assert_allclose(got.ravel(), np.repeat([10, 20], heads // kv_heads))


def test_heads_that_share_unevenly_are_an_error_naming_both():
    """R-06."""
    q, k, v = draw(2, 2, heads=5)
    with pytest.raises(ValueError, match="heads of q must be a multiple .* 5 and 2"):
        neuronjax.attention_cte(q, k.mT, v)


@pytest.mark.parametrize(("heads", "kv_heads", "dv"), [(4, 2, 1), (6, 3, 1), (6, 3, 5)])
def test_the_gradient_of_a_key_head_sums_over_its_group(heads, kv_heads, dv):
    """R-07: with cotangents [1, 2, 3, 4] two key heads get dv = [3, 7]."""
    q, k = jnp.zeros((heads, 1, 2)), jnp.zeros((kv_heads, 2, 1))
    v = jnp.ones((kv_heads, 1, dv))
    d_out = jnp.broadcast_to(jnp.arange(1.0, heads + 1)[:, None, None], (heads, 1, dv))
    _, pull = jax.vjp(neuronjax.attention_cte, q, k, v)
    got = pull(d_out)[2]
    wanted = np.arange(1, heads + 1).reshape(kv_heads, -1).sum(1)
    assert got.shape == v.shape
    np.testing.assert_allclose(got, np.broadcast_to(wanted[:, None, None], v.shape))


@pytest.mark.parametrize("bad", ["k", "v"])
def test_nan_past_the_length_reaches_nothing(bad):
    """R-08: valid length 2, NaN in slot 2 of the values, then of the keys."""
    k, v = one_head(0, 0, 0, 0).mT, one_head(1, 2, 3, 8)
    k = k.at[0, 0, 2].set(jnp.nan) if bad == "k" else k
    v = v.at[0, 2, 0].set(jnp.nan) if bad == "v" else v
    mask = (jnp.arange(4) < 2).reshape(1, 1, 4)

    def run(q, k, v):
        return attention_kernel(q, k, v, mask, tp_q=True)

    out, pull = jax.vjp(run, one_head(0), k, v)
    np.testing.assert_allclose(out.ravel(), [1.5])
    dq, dk, dv = (np.asarray(x).ravel() for x in pull(jnp.ones_like(out)))
    np.testing.assert_allclose(dv, [0.5, 0.5, 0, 0])
    assert np.isfinite(dq).all() and np.isfinite(dk).all()


def _lse(q, k, v, **options):
    call = functools.partial(neuronjax.attention_cte, cache_softmax=True, **options)
    _, neg_max, recip = call(q, k, v)
    return -neg_max - jnp.log(recip)


def test_log_sum_exp_is_differentiable():
    """R-09: lse 1.386294, dq 0.823959, dk [0.25, 0.75]."""
    q, k = one_head(1), one_head(0, np.log(3)).mT
    lse, pull = jax.vjp(lambda *a: _lse(*a, one_head(0, 0), causal_mask=False), q, k)
    dq, dk = pull(jnp.ones_like(lse))
    np.testing.assert_allclose(lse.ravel(), [1.386294], rtol=1e-6)
    np.testing.assert_allclose(dq.ravel(), [0.823959], rtol=1e-5)
    np.testing.assert_allclose(dk.ravel(), [0.25, 0.75], rtol=1e-5)


def test_the_gradient_of_a_broadcast_bias_is_summed_and_a_float_mask_refused():
    """R-10: dbias [-1, 1] in the bias' own shape; the emitter has masks alone."""
    q, k, v = (
        jnp.zeros((2, 1, 1)),
        jnp.zeros((2, 1, 2)),
        jnp.tile(one_head(1, 3), (2, 1, 1)),
    )
    bias = jnp.zeros((1, 1, 2))

    def run(bias):
        return neuronjax.attention_cte(q, k, v, causal_mask=False, bias=bias).sum()

    np.testing.assert_allclose(jax.grad(run)(bias), [[[-1, 1]]], rtol=1e-6)
    with pytest.raises(ValueError, match="attention_cte takes an additive bias"):
        jax.eval_shape(attention_kernel, q, k, v, bias)


@pytest.mark.parametrize(
    ("scale", "wanted"), [(0.0, 2.0), (-1.0, 1.013386), (None, 2.986614)]
)
def test_scale_zero_negative_and_default(scale, wanted):
    """R-11: 0 is 0; the default 1/sqrt(d) is one in forward and backward."""
    run = functools.partial(neuronjax.attention_cte, scale=scale, causal_mask=False)
    out = run(one_head(1), one_head(0, 5).mT, one_head(1, 3))
    np.testing.assert_allclose(out.ravel(), [wanted], rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.5])
def test_attention_bwd_is_the_gradient_of_attention_cte(scale, causal):
    """R-11: the same default, 0 is 0; 4 query heads on 2 key heads."""
    rng = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(rng.normal(size=(n, 8, 128)), jnp.float32) for n in (4, 2, 2)
    )

    def run(q, k, v):
        options = dict(scale=scale, causal_mask=causal, tp_q=False, tp_out=True)
        return neuronjax.attention_cte(q, k, v.mT, cache_softmax=True, **options)

    (out, neg_max, recip), pull = jax.vjp(run, q, k, v)
    lse = neuronjax.statistics_to_tiles(-neg_max - jnp.log(recip))
    d_out = jnp.cos(out)
    got = neuronjax.attention_bwd(
        *(x[None] for x in (q, k, v, out, d_out, lse)),
        softmax_scale=scale,
        use_causal_mask=causal,
    )
    wanted = pull((d_out, jnp.zeros_like(neg_max), jnp.zeros_like(recip)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-4, atol=1e-5)


def test_the_raw_emitters_refuse_what_their_names_do_not_have():
    """R-11, R-12: scale and dropout, in the contracts' words."""
    q, k, v = draw(3, 3)
    for target, name in (("gen3", CAUSAL), ("gen2", f"V2{CAUSAL}")):
        message = f"{name} only supports scale equal to 1.0"
        with neuronjax.target(target), pytest.raises(ValueError) as refusal:
            attention_kernel(q, k.mT, v, is_causal=True, tp_q=True, softmax_scale=0.5)
        assert message in str(refusal.value).splitlines()
    out, neg_max, recip = attention_kernel(q, k.mT, v, tp_q=True, cache_softmax=True)
    args = (q, k.mT, v, out, out, neg_max, recip)
    for option, message in (
        ({"softmax_scale": 0.5}, "only supports softmax scale = 1.0"),
        ({"dropout_prob": 0.1}, "does not currently support non zero dropout prob"),
    ):
        with pytest.raises(ValueError) as refusal:
            backwards_attention_kernel(*args, tp_q=True, **option)
        assert f"Backwards Attention BIR kernel {message}" in str(refusal.value)


@pytest.mark.parametrize("order", [1, 2])
def test_float64_is_exact_and_raises_no_infinity(order):
    """R-13."""
    with jax.enable_x64(True), jax.debug_infs(True):
        q, k, v = draw(7, 7, 2, 2, dtype=jnp.float64)
        run = functools.partial(neuronjax.attention_cte, tp_k=True)
        out = run(q, k, v)
        wanted = attend(q, k, v, visible(7, 7, True, heads=2))[0]
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-12)
        check_grads(jax.jit(run), (q, k, v), order, eps=1e-5)


def test_gradients_of_every_output_twice():
    """Both modes, to second order, statistics included; 6 heads on 2, dv unlike d."""
    with jax.enable_x64(True):
        arrays = draw(3, 4, 6, 2, 3, 2, dtype=jnp.float64)

        def run(q, k, v):
            return neuronjax.attention_cte(q, k, v, tp_k=True, cache_softmax=True)

        check_grads(jax.jit(run), arrays, 2, eps=1e-5, rtol=1e-3, atol=1e-4)


def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation():
    low = draw(40, 40, d=16, dv=16, dtype=jnp.bfloat16)
    seen = visible(40, 40, True, heads=6)

    def plain(q, k, v):
        keys, values = (jnp.repeat(x, 3, 0) for x in (k, v))
        z = jnp.where(seen, jnp.einsum("hqd,hkd->hqk", q, keys), -1e9)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(z.astype(q.dtype), -1), values)

    run = functools.partial(neuronjax.attention_cte, tp_k=True)
    d_out = jnp.cos(plain(*low).astype(jnp.float32)).astype(jnp.bfloat16)
    exact = attend(*low, seen)[0], *gradients(*low, seen, d_out)
    errors = []
    for f in (run, plain):
        out, pull = jax.vjp(f, *low)
        got = out, *pull(d_out)
        assert all(x.dtype == jnp.bfloat16 for x in got)
        errors.append(
            [
                np.abs(np.asarray(a, np.float64) - b).max()
                for a, b in zip(got, exact, strict=True)
            ]
        )
    assert all(a <= 2 * b for a, b in zip(*errors, strict=True)), errors


def test_gradients_come_from_the_stored_statistics():
    """A poisoned statistic changes the gradients that derive from it, no others."""
    q, k, v = draw(5, 5)
    outs = attention_kernel(q, k.mT, v, tp_q=True, cache_softmax=True, is_causal=True)

    def run(out, neg_max, recip):
        d_out = jnp.ones_like(outs[0])
        grads = backwards_attention_kernel(
            q, k.mT, v, out, d_out, neg_max, recip, is_causal=True, tp_q=True
        )
        return [bool(jnp.isnan(g).any()) for g in grads]

    nan = [jnp.full_like(x, jnp.nan) for x in outs]
    assert run(*outs) == [False, False, False]
    assert run(nan[0], *outs[1:]) == [True, True, False]
    assert run(outs[0], nan[1], outs[2]) == [True, True, True]
    assert run(*outs[:2], nan[2]) == [True, True, True]


@pytest.mark.parametrize("poisoned", ["o_ref", "lse_ref"])
def test_attention_bwd_reads_what_it_is_given(poisoned):
    shape, keys = (1, 2, 4, 128), (1, 1, 4, 128)
    arrays = dict.fromkeys(("q_ref", "o_ref", "dy_ref"), jnp.ones(shape))
    arrays |= dict.fromkeys(("k_ref", "v_ref"), jnp.ones(keys))
    arrays["lse_ref"] = jnp.ones((1, 2, 128, 1))
    arrays[poisoned] = jnp.full_like(arrays[poisoned], jnp.nan)
    found = [bool(jnp.isnan(g).any()) for g in neuronjax.attention_bwd(**arrays)]
    assert found == [True, True, poisoned == "lse_ref"]
