"""Every option of `attention_cte`, values and gradients, against float64 rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests.attention_case import CASES, DROPPED, STATISTICS, Case, error
from tests.prefill_case import one_head


@pytest.mark.parametrize("name", CASES | DROPPED)
def test_values_and_gradients_of_every_option(name):
    """R-01, R-07, R-09: rows without keys, groups, all three cotangents."""
    case = (CASES | DROPPED)[name]
    floats, cotangents = case.floats(), case.cotangents()
    keep = case.kept() if case.rate else None
    outs, grads = case.program()(floats, case.rest(), cotangents)
    whole = case.reference(floats, keep)
    for label, got, wanted in zip(STATISTICS, outs, whole.outputs()[:3], strict=True):
        assert got.dtype == jnp.float32
        assert error(got, wanted) <= 1e-5, label
    d_out, d_neg_max, d_recip = map(np.asarray, cotangents)
    wanted = whole.gradients(d_out, d_neg_max=d_neg_max, d_recip=d_recip)
    wanted = case.split(wanted)
    assert set(grads) == set(wanted)
    for label, got in grads.items():
        assert got.shape == floats[label].shape and got.dtype == floats[label].dtype
        assert error(got, wanted[label]) <= 2e-5, label


LOW = "long_window", "long_prefix", "packed_causal", "strided", "sink"


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(name):
    case = CASES[name]
    floats = case.floats(jnp.bfloat16)
    d_out, *others = (c.astype(jnp.bfloat16) for c in case.cotangents())
    zeros = [jnp.zeros_like(c) for c in others]
    outs, grads = case.program()(floats, case.rest(), [d_out, *zeros])
    plain, pull = jax.vjp(jax.jit(case.plain), floats)
    whole = case.reference(floats)
    exact = dict(out=whole.outputs()[0])
    exact |= case.split(whole.gradients(np.asarray(d_out, np.float64)))
    errors = [
        {name: error(x[name], exact[name]) for name in exact}
        for x in (dict(grads, out=outs[0]), dict(pull(d_out)[0], out=plain))
    ]
    assert outs[0].dtype == grads["q"].dtype == jnp.bfloat16
    assert all(errors[0][n] <= 2 * errors[1][n] for n in exact), errors


def _attend(q, k, v, **options):
    """Rows of one head, keys laid out like the queries."""
    return neuronjax.attention_cte(q, k, v, tp_k=True, **options)


@pytest.mark.parametrize(
    ("window", "wanted"),
    [(2, [1, 1.5, 3, 6]), (1, [1, 2, 4, 8]), (None, [1, 1.5, 7 / 3, 3.75])],
)
def test_a_window_counts_the_query_itself(window, wanted):
    """R-04: a window of 1 gives v back."""
    q, v = one_head(0, 0, 0, 0), one_head(1, 2, 4, 8)
    out = _attend(q, q, v, sliding_window=window)
    np.testing.assert_allclose(out.ravel(), wanted, rtol=1e-6)


def test_a_sink_enters_the_denominator_only():
    """R-05: out 4.5, 3, 2.25; slopes -1 and -1.125; one value a head."""
    q, k, v = one_head(0), one_head(0, 0), one_head(3, 6)
    options = dict(causal_mask=False)
    np.testing.assert_allclose(_attend(q, k, v, **options).ravel(), [4.5])
    run = jax.value_and_grad(lambda s: _attend(q, k, v, sink=s, **options).sum())
    for sink, out, slope in ((0.0, 3.0, -1.0), (np.log(2), 2.25, -1.125)):
        got = run(jnp.full((1, 1), sink, jnp.float32))
        np.testing.assert_allclose(got[0], out, rtol=1e-6)
        np.testing.assert_allclose(got[1], [[slope]], rtol=1e-6)
    rows = jnp.zeros((2, 3, 1)), jnp.zeros((2, 2, 1)), jnp.tile(v, (2, 1, 1))
    of_rows = jax.grad(lambda s: _attend(*rows, sink=s, **options).sum())
    np.testing.assert_allclose(of_rows(jnp.zeros((2, 1))), [[-3], [-3]], rtol=1e-6)


def _hiding(hidden, size, first):
    """Options that show row 0 the keys `first` and the next alone, row 1 nothing."""
    column = jnp.arange(size)
    open_to = (column >= first) & (column < first + 2) & (jnp.arange(2) == 0)[:, None]
    bound = jnp.array([[first], [size]], jnp.float32)
    forms: dict = dict(
        mask=dict(mask=open_to[None]),
        bias=dict(bias=jnp.where(open_to, 0.0, -jnp.inf)[None]),
        bounds=dict(bound_min=bound, bound_max=bound.at[0].add(2)),
        window=dict(
            sliding_window=2,
            cp_offset=jnp.full((1, 1), first + 1, jnp.int32),
            global_cp_deg=31,
            cp_strided_q_slicing=True,
            mask=jnp.array([True, False])[None, :, None],
        ),
    )
    return dict(forms[hidden], causal_mask=hidden == "window", cache_softmax=True)


@pytest.mark.parametrize("hidden", ["mask", "bias", "bounds", "window"])
def test_a_row_that_sees_nothing_and_one_far_below_zero(hidden):
    """R-01, R-02: two blocks hidden before scores near -200; row 1 sees nothing."""
    size, first = 600, 530
    options = _hiding(hidden, size, first)
    pair = 0, slice(first, first + 2), 0
    k = jnp.zeros((1, size, 1)).at[pair].set(jnp.array([-200.0, -201]))
    v = jnp.full((1, size, 1), 50.0).at[pair].set(jnp.array([1.0, 2]))

    def run(q, k, v):
        return _attend(q, k, v, **options)

    (out, neg_max, recip), pull = jax.vjp(run, one_head(1, 1), k, v)
    np.testing.assert_allclose(out.ravel(), [1.268941, 0], rtol=1e-6)
    lse = np.asarray(-neg_max - jnp.log(recip)).ravel()
    np.testing.assert_allclose(lse, [-199.686738, -np.inf], rtol=1e-7)
    assert np.isposinf(neg_max[0, 1, 0]) and recip[0, 1, 0] == 1
    grads = pull((one_head(1, 1e30), *(jnp.zeros_like(x) for x in (neg_max, recip))))
    p = 0.731059
    slope = p * (1 - p)
    # a difference of products near 40: float32 leaves 4 digits
    np.testing.assert_allclose(grads[0].ravel(), [-slope, 0], rtol=1e-3)
    for got, two in zip(grads[1:], ([-slope, slope], [p, 1 - p]), strict=True):
        wanted = np.zeros(size)
        wanted[pair[1]] = two
        np.testing.assert_allclose(got.ravel(), wanted, rtol=1e-4)


def test_a_masked_row_with_a_sink():
    """Output 0; the statistics are those of the sink, and so are their gradients."""
    sink = jnp.array([[0.5]])

    def run(sink):
        hidden = jnp.zeros((1, 1, 1), bool)
        options = dict(mask=hidden, sink=sink, cache_softmax=True)
        return _attend(one_head(1), one_head(1), one_head(1), **options)

    outs, pull = jax.vjp(run, sink)
    assert [x.item() for x in outs] == [0.0, -0.5, 1.0]
    assert pull(tuple(map(jnp.ones_like, outs)))[0].item() == -1.0


def test_integers_are_a_mask_and_bounds_are_any_number():
    """Nonzero = attend; column j lies below the bound 2.5 when it lies below 3."""
    q, k, v = one_head(0), one_head(0, 0, 0, 0), one_head(1, 2, 4, 8)
    options = dict(causal_mask=False)
    got = _attend(q, k, v, mask=jnp.array([[[2, 0, -1, 0]]], jnp.int32), **options)
    np.testing.assert_allclose(got.ravel(), [2.5])
    for least, most, wanted in ((0.5, 2.5, 3.0), (-7.0, 99.0, 3.75), (2.0, 2.0, 0.0)):
        bounds = {"bound_min": least, "bound_max": most}
        bounds = {n: jnp.full((1, 1), x, jnp.float32) for n, x in bounds.items()}
        got = _attend(q, k, v, **options, **bounds)
        np.testing.assert_allclose(got.ravel(), [wanted])


@pytest.mark.parametrize("name", ["long_window", "prefix", "strided"])
def test_without_the_statistics_the_output_is_the_same(name):
    case = CASES[name]
    floats, rest = case.floats(), case.rest()
    (alone,) = jax.jit(lambda *a: case.call(*a, cache_softmax=False))(floats, rest)
    with_statistics = case.program()(floats, rest, case.cotangents())[0][0]
    assert error(alone, with_statistics) <= 1e-6


LOW_SOFTMAX = Case(17, 40, causal=False, sink=True)


def test_a_bfloat16_softmax_rounds_the_weights_and_the_statistics():
    case = LOW_SOFTMAX
    floats, rest = case.floats(), case.rest()
    program = case.program(softmax_dtype=jnp.bfloat16)
    (out, *statistics), grads = program(floats, rest, case.cotangents())
    exact, *wanted, _ = case.reference(floats).outputs()
    for got, x in zip(statistics, wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.all(np.abs(np.asarray(got, np.float64) - x) <= 2**-8 * np.abs(x))
    whole = case.program()(floats, rest, case.cotangents())[0][0]
    assert error(whole, exact) < 1e-6 < error(out, exact) < 2**-7
    assert out.dtype == jnp.float32 and grads["q"].dtype == jnp.float32
    d_out, d_neg_max, d_recip = map(np.asarray, case.cotangents())
    gradient = case.reference(floats).gradients(d_out, 0.0, d_neg_max, d_recip)
    for label, x in gradient.items():
        assert error(grads[label], x) < 2**-5, label


def test_bfloat16_scores_belong_to_gen4():
    case = LOW_SOFTMAX
    floats, rest = case.floats(), case.rest()
    low = dict(mm_out_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="mm_out_dtype"):
        case.call(floats, rest, **low)
    with neuronjax.target("gen4"):
        outs = case.call(dict(floats, sink=jnp.full((4, 1), -99.0)), rest, **low)
    q, k = (np.asarray(floats[n], np.float64) for n in "qk")
    z = case.scale * q @ np.repeat(k, 2, 0).swapaxes(1, 2)
    top = jnp.asarray(z.max(-1), jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(outs[1][..., 0], -top, rtol=2**-7)
    rounded = np.asarray(outs[1].astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(outs[1], rounded)


def test_float64_raises_no_infinity_with_any_option():
    """R-13: a window, a sink, a prefix, packing and a cap; 1e-12."""
    cases = (
        Case(17, 17, segments=(4, 13), window=5, sink=True, bias="h"),
        Case(9, 17, prior=9, used=4, cap=1.5),
    )
    with jax.enable_x64(True), jax.debug_infs(True):
        for case in cases:
            floats = case.floats(jnp.float64)
            cotangents = [c.astype(jnp.float64) for c in case.cotangents()]
            outs, grads = case.program()(floats, case.rest(), cotangents)
            whole = case.reference(floats)
            wanted = dict(zip(STATISTICS, whole.outputs()[:3], strict=True))
            seeds = dict(
                zip(("d_out", "d_neg_max", "d_recip"), cotangents, strict=True)
            )
            seeds = {n: np.asarray(x) for n, x in seeds.items()}
            wanted |= case.split(whole.gradients(**seeds))
            for label, got in (
                grads | dict(zip(STATISTICS, outs, strict=True))
            ).items():
                assert got.dtype == jnp.float64
                assert error(got, wanted[label]) <= 1e-12, label


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    """It would be a NaN in every row."""
    q, k, v = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5)), jnp.ones((2, 5, 6))
    with pytest.raises(ValueError, match="attention_cte: scale must be a finite real"):
        neuronjax.attention_cte(q, k, v, scale)
    with pytest.raises(ValueError, match="attention_kernel: scale must be a finite"):
        neuronjax.emit.attention_kernel(q, k, v, tp_q=True, scale=scale)
    rows, lse = jnp.ones((1, 2, 4, 3)), jnp.ones((1, 2, 3, 1))
    with pytest.raises(ValueError, match="attention_bwd: softmax_scale must be a fin"):
        neuronjax.attention_bwd(*[rows] * 5, lse, softmax_scale=scale)
