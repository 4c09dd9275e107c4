"""The router: its equations in float64, its gradient, its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.sharding.mesh import make_mesh
from tests.router_case import operands, router

RULES = [
    dict(act_fn=act, router_pre_norm=pre, norm_topk_prob=norm)
    for act in ("SOFTMAX", "SIGMOID")
    for pre, norm in ((False, False), (True, False), (True, True))
]


def of_logits(logits, k, **options):
    """The router of given logits: the weight is the identity."""
    logits = jnp.asarray(logits)
    logits = logits if logits.ndim == 2 else logits[None]
    return router(logits, jnp.eye(logits.shape[1], dtype=logits.dtype), k=k, **options)


def activation(z, act):
    if act == "SIGMOID":
        return 1 / (1 + np.exp(-z))
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(x, w, b, k, *, act_fn, router_pre_norm, norm_topk_prob):
    """The equations of the specification, token by token."""
    x, w, b = (np.asarray(z, np.float64) for z in (x, w, b))
    logits = x @ w + b.reshape(-1)
    index = np.array([sorted(range(len(r)), key=lambda e, r=r: -r[e]) for r in logits])
    index, affinities = index[:, :k], np.zeros_like(logits)
    for row, chosen, out in zip(logits, index, affinities, strict=True):
        if not router_pre_norm:
            out[chosen] = activation(row[chosen], act_fn)
        elif norm_topk_prob:
            scores = activation(row, act_fn)[chosen]
            out[chosen] = scores / scores.sum()
        else:
            out[:] = activation(row, act_fn)
    return logits, index, affinities


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("sizes", [(6, 16, 9), (5, 96, 33), (1, 3, 3)])
def test_it_equals_the_equations(rule, layout, sizes):
    x, w, b = operands(*sizes)
    wanted = reference(x, w, b, 3, **rule)
    given = x.T if layout == 0 else x
    got = jax.jit(lambda *a: router(*a, layout=layout, return_eager_affi=True, **rule))(
        given, w, b
    )
    np.testing.assert_array_equal(got[1], wanted[1])
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[2], wanted[2], rtol=1e-5, atol=1e-6)
    chosen = np.take_along_axis(wanted[2], wanted[1], 1)
    np.testing.assert_allclose(got[3], chosen, rtol=1e-5, atol=1e-6)
    assert [z.dtype for z in got] == ["float32", "int32", "float32", "float32"]


@pytest.mark.parametrize("layout", [0, 1, 2])
def test_an_input_on_chip_is_read_in_its_layout(layout):
    """Channel `h` lies at `[p, t, c]` as the specification says, index by index."""
    x, w, b = operands(3, 512)
    chunks, lying = 4, np.zeros((128, 3, 4), np.float32)
    for p, t, c in np.ndindex(128, 3, 4):
        half = c // (chunks // 2)
        h = (
            p * chunks + c,
            half * 256 + p * (chunks // 2) + c % (chunks // 2),
            c * 128 + p,
        )[layout]
        lying[p, t, c] = x[t, h]
    rule = dict(act_fn="SOFTMAX", router_pre_norm=False)
    got = router(jnp.asarray(lying), w, b, x_sb_layout=layout, **rule)
    for a, c in zip(got, router(x, w, b, **rule), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5)


def test_results_may_be_left_out_and_cast():
    x, w, b = operands()
    logits, index, affinities = router(x, w, b, act_fn="SOFTMAX")
    (only,) = router(
        x,
        w,
        b,
        act_fn="SOFTMAX",
        skip_store_expert_index=True,
        skip_store_router_logits=True,
        affinities_dtype="bfloat16",
    )
    np.testing.assert_array_equal(only, affinities.astype("bfloat16"))
    low, *_ = router(x, w, b, act_fn="SOFTMAX", logits_dtype="bfloat16")
    np.testing.assert_array_equal(low, logits.astype("bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_go_to_the_lowest_index(dtype):
    """R-34: plain, under jit, vmap and a split of the tokens."""
    row, options = jnp.array([1, 3, 3, 2, 3], dtype), dict(k=2, act_fn="SOFTMAX")
    logits, eye = jnp.stack([row, row[::-1], row, row]), jnp.eye(5, dtype=dtype)
    wanted = [[1, 2], [0, 2], [1, 2], [1, 2]]

    def index(x):
        return router(x, eye, **options)[1]

    mapped = jax.vmap(lambda x: index(x[None])[0])
    split = jax.shard_map(
        index, mesh=make_mesh(data=4), in_specs=P("data"), out_specs=P("data")
    )
    for run in (index, jax.jit(index), mapped, jax.jit(mapped), split):
        assert run(logits).tolist() == wanted
    values = of_logits(row, **options, return_eager_affi=True)[3]
    assert values[0, 0] == values[0, 1]
    zeros = jnp.array([-0.0, 0.0, -0.0, 0.0], dtype)
    assert of_logits(zeros, **options)[1].tolist() == [[0, 1]]


def test_softmax_before_and_after_the_selection():
    """R-35."""
    logits = jnp.log(jnp.array([[1.0, 2, 3, 4]]))

    def eager(k, **rule):
        rule = dict(rule, act_fn="SOFTMAX", return_eager_affi=True)
        grad = jax.grad(lambda z: of_logits(z, k, **rule)[3][0, 0])(logits)
        return of_logits(logits, k, **rule), grad

    dense, _ = eager(2)
    assert dense[1].tolist() == [[3, 2]]
    np.testing.assert_allclose(dense[3], [[0.4, 0.3]], rtol=1e-6)
    for rule in (dict(norm_topk_prob=True), dict(router_pre_norm=False)):
        outs, _ = eager(2, **rule)
        np.testing.assert_allclose(outs[3], [[4 / 7, 3 / 7]], rtol=1e-6)
        assert outs[2][0, :2].tolist() == [0, 0]
        one, grad = eager(1, **rule)
        assert one[3].tolist() == [[1.0]] and not grad.any()
    np.testing.assert_allclose(eager(1)[0][3], [[0.4]], rtol=1e-6)


def test_a_selection_bias_never_reaches_the_weights():
    """R-36."""
    scores, bias = np.array([[0.5, 0.75, 0.25]]), jnp.array([10.0, 0, 9])
    logits = jnp.asarray(np.log(scores / (1 - scores)), "float32")

    def run(bias, norm):
        return of_logits(
            logits,
            2,
            act_fn="SIGMOID",
            norm_topk_prob=norm,
            selection_bias=bias,
            return_eager_affi=True,
        )

    for norm, wanted in ((False, [0.5, 0.25]), (True, [2 / 3, 1 / 3])):
        _, index, _, weights = run(bias, norm)
        assert index.tolist() == [[0, 2]]
        np.testing.assert_allclose(weights[0], wanted, rtol=1e-6)
        assert not jax.grad(lambda b, n=norm: run(b, n)[3][0, 0])(bias).any()


def test_padding_takes_no_part():
    """R-38: counts and balance loss are those without padding; NaN there stays put."""
    (x, w, b), options = operands(4), dict(act_fn="SOFTMAX", norm_topk_prob=True)
    x = x.at[:2].set(jnp.nan)
    mask = jnp.array([False, False, True, True])

    def loss(x, w, mask=None):
        logits, index, affinities = router(x, w, b, token_mask=mask, **options)
        balance = neuronjax.load_balance_loss(logits, index, token_mask=mask)
        return balance + jnp.sin(affinities).sum(), (index, affinities)

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    (got, (index, affinities)), grads = run(x, w, mask)
    (wanted, (real, _)), real_grads = run(x[2:], w)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert (index[:2] == 9).all() and not affinities[:2].any()
    counts = neuronjax.expert_counts(index, 9)
    assert counts.tolist() == neuronjax.expert_counts(real, 9).tolist()
    assert counts.sum() == 6
    assert not grads[0][:2].any()
    np.testing.assert_allclose(grads[0][2:], real_grads[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grads[1], real_grads[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("act", ["SOFTMAX", "SIGMOID"])
def test_the_balance_loss_equals_its_equation(act):
    x, w, b = operands(7)
    logits, index, _ = router(x, w, b, act_fn=act)
    mask = np.array([True, False, True, True, True, False, True])
    p = activation(np.asarray(logits, np.float64), act)
    p = (p / p.sum(-1, keepdims=True))[mask]
    count = np.bincount(np.asarray(index)[mask].ravel(), minlength=9)
    wanted = 9 * (count / (5 * 3) * p.mean(0)).sum()
    got = neuronjax.load_balance_loss(logits, index, act_fn=act, token_mask=mask)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    check_grads(
        lambda z: neuronjax.load_balance_loss(z, index, act_fn=act), (logits,), 1
    )
    none = neuronjax.load_balance_loss(logits, index, token_mask=np.zeros(7, bool))
    assert none == 0


def of_row(row, **options):
    """The router of one row of any logits: as a bias they meet no 0 * inf."""
    row = jnp.asarray(row, "float32")[None]
    zeros = jnp.zeros_like(row), jnp.zeros((row.size, row.size))
    outs = router(*zeros, row, k=2, return_eager_affi=True, **options)
    return outs[1][0].tolist(), outs[2][0], outs[3][0]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_infinities_are_limits(rule):
    inf = np.inf
    index, affinities, weights = of_row([0, -inf, 1, -inf], **rule)
    assert index == [2, 0]
    np.testing.assert_allclose(affinities[jnp.array([1, 3])], 0)
    if rule["act_fn"] == "SOFTMAX":
        np.testing.assert_allclose(weights, [0.731059, 0.268941], rtol=1e-5)
    index, affinities, weights = of_row([inf, 0, inf, 1], **rule)
    assert index == [0, 2]
    if rule["act_fn"] == "SOFTMAX":
        np.testing.assert_allclose(affinities, [0.5, 0, 0.5, 0])
    index, affinities, _ = of_row([-inf] * 4, **rule)
    assert index == [0, 1] and not affinities.any()


def test_a_nan_ranks_first_and_stays_in_its_row():
    index, _, weights = of_row([0, np.nan, 1, 2], act_fn="SOFTMAX")
    assert index == [1, 3] and np.isnan(weights).all()
    x, w, b = operands()
    wanted = router(x, w, b, act_fn="SOFTMAX")
    got = router(x.at[2].set(jnp.nan), w, b, act_fn="SOFTMAX")
    rest = np.array([0, 1, 3, 4, 5])
    for a, c in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a[rest], c[rest])
    assert np.isnan(got[2][2]).all()


def test_a_saturated_sigmoid_selects_by_logits():
    """Scores of 1.0 tie; the logits behind them do not. Nor does 0 / 0 appear."""
    high = jnp.array([30.0, 90, 40, 60])
    assert of_logits(high, 2, act_fn="SIGMOID")[1].tolist() == [[1, 3]]
    low = of_logits(
        -high - 100, 2, act_fn="SIGMOID", norm_topk_prob=True, return_eager_affi=True
    )
    assert low[1].tolist() == [[0, 2]]
    np.testing.assert_allclose(low[3], [[1 / (1 + np.exp(-10.0)), 4.539787e-5]], 1e-4)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("layout", [0, 1])
def test_gradients_in_both_modes(rule, layout):
    with jax.enable_x64(True):
        x, w, b = operands(4, 5, 6, "float64")

        def run(x, w, b):
            outs = router(
                x,
                w,
                b,
                layout=layout,
                return_eager_affi=True,
                logits_dtype=None,
                **rule,
            )
            return [jnp.sin(z) for z in outs if z.dtype != jnp.int32]

        args = (x.T if layout == 0 else x, w, b)
        check_grads(jax.jit(run), args, order=1, modes=["rev", "fwd"], eps=1e-6)


def test_gradients_keep_their_dtypes():
    """R-24; R-45: a mask and indices have no gradient."""
    x, w, b = operands(dtype="bfloat16")
    mask = jnp.ones(6, bool)

    def run(x, w, b, mask):
        return router(x, w, b, act_fn="SOFTMAX", token_mask=mask)[::2]

    outs, pull = jax.vjp(run, x, w, b.astype("float32"), mask)
    grads = pull(tuple(map(jnp.ones_like, outs)))
    assert [g.dtype for g in grads[:3]] == ["bfloat16", "bfloat16", "float32"]
    assert grads[3].dtype == jax.dtypes.float0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [0, 1])
def test_a_mapped_router_equals_a_loop(dtype, layout):
    """R-42."""
    x, w, b = operands(dtype=dtype)
    x = x.T if layout == 0 else x
    stacked = jnp.stack([x, x * 2, -x])
    run = lambda x, w: router(x, w, b, layout=layout, act_fn="SOFTMAX")  # noqa: E731
    got = jax.jit(jax.vmap(run, (0, None)))(stacked, w)
    for i, one in enumerate(stacked):
        for a, c in zip(got, run(one, w), strict=True):
            np.testing.assert_allclose(a[i], c, rtol=1e-5, atol=1e-5)
    summed = lambda w: jnp.sin(jax.vmap(run, (0, None))(stacked, w)[2]).sum()  # noqa: E731
    grad = jax.grad(summed)(w)
    wide = lambda x, w: run(x.astype("float32"), w)  # noqa: E731
    wanted = sum(
        jax.grad(lambda w, x=x: jnp.sin(wide(x, w)[2]).sum())(w.astype("float32"))
        for x in stacked
    )
    assert grad.dtype == dtype
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    scale = float(jnp.abs(wanted).max())
    np.testing.assert_allclose(
        grad.astype("float32"), wanted, rtol=tolerance, atol=tolerance * scale
    )
