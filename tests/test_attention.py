"""Prefill attention and its backward, against float64 attention row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.emit import (
    attention_kernel,
    attention_prefix_caching_fwd_kernel,
    backwards_attention_kernel,
)
from neuronjax.kernels.attention.options import Extras
from neuronjax.primitives import registry
from neuronjax.sharding.attention import sharded_attention
from neuronjax.sharding.mesh import make_mesh
from tests.attention_equations import attend, gradients, visible
from tests.hlo import collectives

CAUSAL = "CausalAttentionMMSoftmaxMMWithoutSwap"
FULL = "AttentionMMSoftmaxMMWithoutSwap"
BACKWARD = "BackwardsAttention"
Tile = neuronjax.MemrefTile


def _draw(q_seq, kv_seq, heads=6, kv_heads=2, d=8, dv=6, dtype=jnp.float32):
    """Queries, keys and values, sequence second: 6 heads share 2 key heads."""
    rng = np.random.default_rng(q_seq + kv_seq)
    shapes = (heads, q_seq, d), (kv_heads, kv_seq, d), (kv_heads, kv_seq, dv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _row(*values):
    """One head of width 1."""
    return jnp.asarray(values, jnp.float32).reshape(1, -1, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", range(8))
def test_every_layout_equals_the_equations(layout, causal):
    tp_q, tp_k, tp_out = (bool(layout & bit) for bit in (1, 2, 4))
    q, k, v = _draw(5, 7)
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
    q, k, v = _draw(3, 4)
    call = functools.partial(neuronjax.attention_cte, tp_k=tp_k, causal_mask=causal)
    with neuronjax.target(target):
        (row,) = neuronjax.trace(call, q, k if tp_k else k.mT, v).rows
    assert row.name == name and dict(row.config)["scale"] == 1.0


def test_fully_masked_row():
    """R-01: zero output and gradients, lse -inf; its cotangent changes nothing."""
    mask = jnp.array([[[True, True], [False, False]]])
    operands = _row(1, 1), _row(1, 2).mT, _row(3, 5)

    def run(q, k, v):
        return attention_kernel(q, k, v, mask, tp_q=True, cache_softmax=True)

    (out, neg_max, recip), pull = jax.vjp(run, *operands)
    lse = -neg_max - jnp.log(recip)
    np.testing.assert_allclose(out.ravel(), [4.462117, 0], rtol=1e-6)
    assert lse.ravel()[1] == -jnp.inf and np.isfinite(lse.ravel()[0])
    for huge in (1.0, 1e30, np.inf, np.nan):
        seeds = _row(1, huge), jnp.zeros_like(recip), jnp.zeros_like(recip)
        dq, dk, dv = (x.ravel() for x in pull(seeds))
        np.testing.assert_allclose(dq, [0.393224, 0], rtol=1e-5)
        np.testing.assert_allclose(dk, [-0.393224, 0.393224], rtol=1e-5)
        np.testing.assert_allclose(dv, [0.268941, 0.731059], rtol=1e-5)


def test_causal_alignment_is_top_left():
    """R-03: [1.0, 1.5], never guessed from the lengths."""
    got = neuronjax.attention_cte(_row(0, 0), _row(*[0] * 5).mT, _row(1, 2, 3, 4, 5))
    np.testing.assert_allclose(got.ravel(), [1.0, 1.5])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2)])
def test_key_heads_are_repeated_and_not_tiled(heads, kv_heads):
    """R-06."""
    v = jnp.array([10.0, 20.0]).reshape(2, 1, 1)
    got = neuronjax.attention_cte(jnp.zeros((heads, 1, 1)), jnp.zeros((2, 1, 1)), v)
    np.testing.assert_allclose(got.ravel(), np.repeat([10, 20], heads // kv_heads))


def test_heads_that_share_unevenly_are_an_error_naming_both():
    """R-06."""
    q, k, v = _draw(2, 2, heads=5)
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
    k, v = _row(0, 0, 0, 0).mT, _row(1, 2, 3, 8)
    k = k.at[0, 0, 2].set(jnp.nan) if bad == "k" else k
    v = v.at[0, 2, 0].set(jnp.nan) if bad == "v" else v
    mask = (jnp.arange(4) < 2).reshape(1, 1, 4)

    def run(q, k, v):
        return attention_kernel(q, k, v, mask, tp_q=True)

    out, pull = jax.vjp(run, _row(0), k, v)
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
    q, k = _row(1), _row(0, np.log(3)).mT
    lse, pull = jax.vjp(lambda *a: _lse(*a, _row(0, 0), causal_mask=False), q, k)
    dq, dk = pull(jnp.ones_like(lse))
    np.testing.assert_allclose(lse.ravel(), [1.386294], rtol=1e-6)
    np.testing.assert_allclose(dq.ravel(), [0.823959], rtol=1e-5)
    np.testing.assert_allclose(dk.ravel(), [0.25, 0.75], rtol=1e-5)


def test_the_gradient_of_a_broadcast_bias_is_summed_and_a_float_mask_refused():
    """R-10: dbias [-1, 1] in the bias' own shape; the emitter has masks alone."""
    q, k, v = (
        jnp.zeros((2, 1, 1)),
        jnp.zeros((2, 1, 2)),
        jnp.tile(_row(1, 3), (2, 1, 1)),
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
    out = run(_row(1), _row(0, 5).mT, _row(1, 3))
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
    q, k, v = _draw(3, 3)
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
        q, k, v = _draw(7, 7, 2, 2, dtype=jnp.float64)
        run = functools.partial(neuronjax.attention_cte, tp_k=True)
        out = run(q, k, v)
        wanted = attend(q, k, v, visible(7, 7, True, heads=2))[0]
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-12)
        check_grads(jax.jit(run), (q, k, v), order, eps=1e-5)


def test_gradients_of_every_output_twice():
    """Both modes, to second order, statistics included; 6 heads on 2, dv unlike d."""
    with jax.enable_x64(True):
        arrays = _draw(3, 4, 6, 2, 3, 2, dtype=jnp.float64)

        def run(q, k, v):
            return neuronjax.attention_cte(q, k, v, tp_k=True, cache_softmax=True)

        check_grads(jax.jit(run), arrays, 2, eps=1e-5, rtol=1e-3, atol=1e-4)


def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation():
    low = _draw(40, 40, d=16, dv=16, dtype=jnp.bfloat16)
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
    q, k, v = _draw(5, 5)
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


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0), (1, 0, None)])
def test_vmap_with_some_operands_unbatched(dims):
    """R-42: equal to a loop; an unmapped operand gets an unmapped, summed gradient."""
    q, k, v = _draw(3, 4)
    run = functools.partial(neuronjax.attention_cte, tp_k=True)
    stacked = [
        x if dim is None else jnp.stack([x, x / 2, -x], dim)
        for x, dim in zip((q, k, v), dims, strict=True)
    ]
    each = [
        [
            x if dim is None else jnp.take(x, i, dim)
            for x, dim in zip(stacked, dims, strict=True)
        ]
        for i in range(3)
    ]
    mapped = jax.vmap(run, dims)
    np.testing.assert_allclose(
        mapped(*stacked), jnp.stack([run(*x) for x in each]), rtol=1e-5, atol=1e-6
    )
    loss = jax.grad(lambda *a: jnp.sin(mapped(*a)).sum(), (0, 1, 2))
    single = jax.grad(lambda *a: jnp.sin(run(*a)).sum(), (0, 1, 2))
    parts = zip(*(single(*x) for x in each), strict=True)
    for got, part, dim in zip(loss(*stacked), parts, dims, strict=True):
        wanted = sum(part) if dim is None else jnp.stack(part, dim)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert neuronjax.trace(mapped, *stacked).count(CAUSAL) == 1


def test_a_mask_is_an_operand_under_scan_and_grad():
    """R-44, R-45: two scan steps with an array as mask; its gradient is float0."""
    q, k, v = _draw(3, 4)
    masks = jnp.stack([jnp.ones((1, 3, 4), bool), jnp.tri(3, 4, dtype=bool)[None]])

    def attended(q, masks):
        def step(total, mask):
            out = attention_kernel(q, k.mT, v, mask, tp_q=True)
            return total + out.sum(), None

        return jax.lax.scan(step, 0.0, masks)[0]

    got, none = jax.grad(attended, (0, 1), allow_int=True)(q, masks)
    assert none.dtype == jax.dtypes.float0
    ones = np.ones((6, 3, 6))
    wanted = [gradients(q, k, v, visible(3, 4, c, heads=6), ones)[0] for c in (0, 1)]
    np.testing.assert_allclose(got, sum(wanted), rtol=1e-4, atol=1e-5)


def test_the_config_bag_takes_no_arrays():
    """R-44: the message names the argument."""
    family = registry.resolve_family(CAUSAL)
    with pytest.raises(ValueError, match=f"{CAUSAL}: scale must be a hashable"):
        family(*_draw(2, 2), Extras(), name=CAUSAL, scale=np.ones(2))


@pytest.mark.parametrize("saved", [True, False])
def test_named_residuals_let_remat_run_the_forward_once(saved):
    """R-46: the checkpoint names of the docstring."""
    q, k, v = _draw(3, 3)
    names = "attention_out", "attention_neg_max", "attention_recip"
    policy = jax.checkpoint_policies.save_only_these_names(*names if saved else ())
    run = jax.checkpoint(
        lambda *a: neuronjax.attention_cte(*a, tp_k=True).sum(), policy=policy
    )
    traced = neuronjax.trace(jax.grad(run, (0, 1, 2)), q, k, v)
    assert traced.count(CAUSAL) == (1 if saved else 2)
    assert traced.count(BACKWARD) == 1


@pytest.mark.parametrize("x64", [False, True])
def test_no_form_of_scale_changes_the_dtype(x64):
    """R-48: Python and NumPy numbers and JAX scalars; one program for numbers."""
    with jax.enable_x64(x64):
        q, k, v = _draw(3, 3, dtype=jnp.bfloat16)

        def run(scale):
            return functools.partial(neuronjax.attention_cte, tp_k=True, scale=scale)

        numbers = [0.5, np.float64(0.5), np.float32(0.5)]
        texts = {jax.jit(run(s)).lower(q, k, v).as_text() for s in numbers}
        assert len(texts) == 1
        forms = [*numbers, 2, jnp.float32(0.5), jnp.asarray(0.5), jnp.bfloat16(0.5)]
        for scale in forms:
            out, pull = jax.vjp(run(scale), q, k, v)
            grads = pull(jnp.ones_like(out))
            assert {x.dtype for x in (out, *grads)} == {jnp.dtype("bfloat16")}


def test_a_traced_scale_has_a_gradient():
    q, k, v = _draw(3, 3)
    run = functools.partial(neuronjax.attention_cte, q, k, v, tp_k=True)
    got = jax.grad(lambda s: jnp.sin(run(scale=s)).sum())(0.5)
    wanted = (jnp.sin(run(scale=0.505)).sum() - jnp.sin(run(scale=0.495)).sum()) / 0.01
    np.testing.assert_allclose(got, wanted, rtol=1e-2)


def _tiles(q, k, v):
    return Tile.from_tensor(q, 2), Tile.from_tensor(k.mT, 1), Tile.from_tensor(v, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (256, 128)])
def test_tiles_equal_tensors(lengths, causal):
    arrays = _draw(*lengths)
    call = functools.partial(neuronjax.attention_cte, scale=0.4, causal_mask=causal)

    def tiled(*arrays):
        return call(*_tiles(*arrays)).to_tensor()

    def plain(q, k, v):
        return call(q, k.mT, v)

    outs, pulls = zip(*(jax.vjp(f, *arrays) for f in (tiled, plain)), strict=True)
    np.testing.assert_allclose(*outs, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(pull(jnp.cos(outs[1])) for pull in pulls), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    grad = jax.grad(lambda *a: tiled(*a).sum(), (0, 1, 2))
    traced = neuronjax.trace(grad, *arrays)
    assert traced.names == ("TiledNativeKernelAttention", BACKWARD)


def test_a_tiled_leaf_keeps_its_operands_tiled():
    """No operand takes its untiled shape; the result is a tile."""
    q, k, v = _tiles(*_draw(256, 256))
    family = registry.resolve_family("TiledNativeKernelAttention")
    config = dict(scale=1.0, is_causal=True, is_tiled=True)
    config |= dict(tp_q=True, tp_k=False, tp_out=False)
    leaf = functools.partial(family.leaf, name="TiledNativeKernelAttention", **config)
    jaxpr = jax.make_jaxpr(leaf)(q.data, k.data, v.data, Extras())
    whole = {tuple(sorted(x.shape)) for x in (q, k, v)}
    for equation in jaxpr.eqns:
        if any(x is y for x in equation.invars for y in jaxpr.jaxpr.invars):
            shapes = {tuple(sorted(o.aval.shape)) for o in equation.outvars}
            assert not shapes & whole, equation
    assert jaxpr.out_avals[0].shape == (128, 2, 6, 6)


def test_tiles_refuse_what_they_cannot_do():
    q, k, v = _tiles(*_draw(5, 7))
    message = (
        "Softmax caching not supported yet for tiled attention_kernel. Pass in tensors "
        "instead of tiles."
    )
    with pytest.raises(ValueError) as refusal:
        neuronjax.attention_cte(q, k, v, cache_softmax=True)
    assert message in str(refusal.value).splitlines()
    mix = (
        "Inputs/outputs to attention_kernel must be all tensors or all tiles, not a mix"
    )
    with pytest.raises(ValueError, match=mix):
        attention_kernel(q, k, v.to_tensor())
    rows = [jnp.zeros((1, 50048, 1))] * 3
    with pytest.raises(ValueError, match="tiles must fit SBUF of gen3"):
        jax.eval_shape(neuronjax.attention_cte, *_tiles(*rows))


@pytest.mark.parametrize("window", [None, 0])
def test_no_window_is_no_window(window):
    """R-04: 0 and None."""
    q, k, v = _draw(3, 3)
    got = neuronjax.attention_cte(q, k.mT, v, sliding_window=window)
    np.testing.assert_array_equal(got, neuronjax.attention_cte(q, k.mT, v))


@pytest.mark.parametrize("name", ["Nonsense", "AttentionMMSoftmaxMM"])
def test_prefix_caching_is_keyed_by_name(name):
    """R-27."""
    q, k, v = _draw(3, 4)
    operands = q.mT, k.mT, v, k.mT, v
    message = f"Prefix caching is not implemented for this kernel name {name}"
    with pytest.raises(ValueError) as refusal:
        attention_prefix_caching_fwd_kernel(*operands, kernel_name=name)
    assert message in str(refusal.value).splitlines()


@pytest.mark.parametrize(
    ("option", "emitter"),
    [
        ("k_active", "attention_tkg_fwd_kernel"),
        ("v_active", "attention_tkg_fwd_kernel"),
        ("rope_pos_ids", "attention_tkg_fwd_kernel"),
        ("k_prior", "attention_prefix_caching_fwd_kernel"),
        ("prefix_mask", "attention_prefix_caching_fwd_kernel"),
    ],
)
def test_an_operand_of_another_emitter_is_refused_with_its_name(option, emitter):
    """R-27."""
    q, k, v = _draw(3, 3)
    message = f"attention_kernel: {option} is an operand of {emitter}, not of this one"
    with pytest.raises(ValueError, match=message):
        attention_kernel(q, k.mT, v, tp_q=True, **{option: jnp.zeros(1)})


def test_hints_change_no_value_and_a_destination_gives_its_dtype():
    q, k, v = _draw(3, 4)
    plain = attention_kernel(q, k.mT, v, tp_q=True)
    hinted = functools.partial(attention_kernel, tp_q=True, num_stages=2, num_tiles=4)
    np.testing.assert_array_equal(hinted(q, k.mT, v), plain)
    (row,) = neuronjax.trace(hinted, q, k.mT, v).rows
    assert dict(row.config)["num_stages"] == 2
    out = attention_kernel(
        q, k.mT, v, out=jnp.zeros((6, 3, 6), jnp.bfloat16), tp_q=True
    )
    assert out.dtype == jnp.bfloat16


def test_the_chips_layout_of_the_statistics_and_back():
    rows = jnp.arange(2 * 384.0).reshape(2, 384, 1)
    tiles = neuronjax.statistics_to_tiles(rows)
    assert tiles.shape == (2, 128, 3) and tiles[1, 5, 2] == rows[1, 2 * 128 + 5, 0]
    np.testing.assert_array_equal(neuronjax.statistics_from_tiles(tiles), rows)
    with pytest.raises(ValueError, match="q_seq a multiple of 128"):
        neuronjax.statistics_to_tiles(rows[:, :100])


@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2), dict(tensor=3)])
def test_attention_over_a_mesh_moves_nothing(sizes):
    q, k, v = _draw(5, 7, heads=24, kv_heads=12)
    q, k, v = (x.reshape(2, -1, *x.shape[1:]) for x in (q, k.mT, v))
    batch = "data" if "data" in sizes else None
    run = functools.partial(sharded_attention, make_mesh(**sizes), batch=batch)
    folded = (jax.lax.collapse(x, 0, 2) for x in (q, k, v))
    wanted = neuronjax.attention_cte(*folded).reshape(2, 12, 5, 6)
    np.testing.assert_allclose(jax.jit(run)(q, k, v), wanted, rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda *a: jnp.sin(run(*a)).sum(), (0, 1, 2)))
    split = jax.NamedSharding(make_mesh(**sizes), P(batch, "tensor"))
    placed = [jax.device_put(x, split) for x in (q, k, v)]
    assert collectives(jax.jit(gradient, out_shardings=split), *placed) == {}


def test_heads_that_the_mesh_cannot_share_are_refused():
    q, k, v = (x[None] for x in _draw(3, 3))
    with pytest.raises(ValueError, match="heads of q, k and v must be multiples of"):
        sharded_attention(make_mesh(tensor=4), q, k.mT, v)
