"""Derivatives of attention's options by differences, and under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.sharding.mesh import make_mesh
from tests.attention_case import CASES, DROPPED, STATISTICS, Case, error

CAUSAL = "CausalAttentionMMSoftmaxMMWithoutSwap"
FULL = "AttentionMMSoftmaxMMWithoutSwap"
BACKWARD = "BackwardsAttention"
SMALL = dict(heads=(2, 1), widths=(2, 1))
# Every option once; lengths past a block in the second group.
CHECKED = dict(
    window=Case(
        3, 9, offset=1, degree=3, strided=True, window=4, sink=True, bias="hqk",
        cap=2.0, **SMALL,
    ),
    prefix=Case(3, 4, prior=4, used=3, mask="qk", bias="hk", causal=False, **SMALL),
    dropout=Case(5, 5, rate=0.4, segments=(2, 2), bias="k", sink=True, **SMALL),
)  # fmt: skip
BLOCKS = dict(
    window=Case(258, 300, heads=(1, 1), widths=(1, 1), window=200, sink=True),
    prefix=Case(
        3, 270, heads=(1, 1), widths=(1, 1), prior=280, used=270, causal=False, cap=2.0
    ),
)


def _checked(case, *orders):
    """Differences of each order and its modes."""
    with jax.enable_x64(True):
        floats, rest = case.floats(jnp.float64), case.rest()
        if case.bias is not None:  # a difference of infinities is no number
            bias = jnp.where(jnp.isinf(floats["bias"]), 0.5, floats["bias"])
            floats["bias"] = bias
        seen = np.asarray(case.seen().any(2))[..., None]

        @jax.jit
        def run(floats):
            out, neg_max, recip = case.call(floats, rest)
            return out, jnp.where(seen, neg_max, 0), jnp.where(seen, recip, 0)

        for order, modes in orders:
            check_grads(run, (floats,), order, modes, eps=1e-5, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", CHECKED)
def test_derivatives_in_both_modes_to_second_order(name):
    if name == "window":  # forward over reverse too
        _checked(CHECKED[name], (2, ["fwd", "rev"]))
    else:
        _checked(CHECKED[name], (1, ["fwd"]), (2, ["rev"]))


@pytest.mark.parametrize("name", BLOCKS)
def test_derivatives_over_several_blocks_to_second_order(name):
    _checked(BLOCKS[name], (2, ["rev"]))


def test_second_derivatives_of_the_gradient_in_forward_mode():
    """A Hessian-vector product equals a difference of gradients."""
    with jax.enable_x64(True):
        case = Case(3, 4, prior=4, used=3, window=4, cap=1.5, sink=True, **SMALL)
        floats, rest = case.floats(jnp.float64), case.rest()

        def loss(floats):
            out, neg_max, recip = case.call(floats, rest)
            return sum(jnp.sum(jnp.sin(x)) for x in (out, neg_max, recip))

        gradient = jax.jit(jax.grad(loss))
        step = jax.tree.map(jnp.cos, floats)
        product = jax.jit(lambda x: jax.jvp(gradient, (x,), (step,))[1])(floats)
        ends = [
            gradient(jax.tree.map(lambda a, b, h=h: a + h * b, floats, step))
            for h in (1e-5, -1e-5)
        ]
        for label, got in product.items():
            wanted = (ends[0][label] - ends[1][label]) / 2e-5
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


MAPPED = Case(3, 4, prior=4, used=3, window=4, sink=True, bias="qk", mask="k")


@pytest.mark.parametrize(
    "mapped",
    [("k", "v", "k_prior", "v_prior"), ("sink", "bias"), ("q", "mask", "sink")],
    ids=str,
)
def test_vmap_with_some_operands_unbatched(mapped):
    """R-42: equal to a loop; an unmapped operand gets a summed gradient; one macro."""
    case = MAPPED
    rest = case.rest()
    operands = case.floats() | {"mask": rest.pop("mask")}
    dims = {n: (1 if n == "q" else 0) if n in mapped else None for n in operands}
    scales = 1.0, 0.5, -1.0
    stacked = {
        n: x if dims[n] is None
        else jnp.stack([x if n == "mask" else s * x for s in scales], dims[n])
        for n, x in operands.items()
    }  # fmt: skip

    def loss(operands):
        floats = {n: x for n, x in operands.items() if n != "mask"}
        outs = case.call(floats, dict(rest, mask=operands["mask"]))
        return sum(jnp.sum(jnp.sin(x)) for x in outs)

    def total(operands):
        return jax.vmap(loss, (dims,))(operands).sum()

    grad = functools.partial(jax.value_and_grad, allow_int=True)
    got = jax.jit(grad(total))(stacked)
    single = jax.jit(grad(loss))
    slices = (
        {
            n: x if dims[n] is None else jnp.take(x, i, dims[n])
            for n, x in stacked.items()
        }
        for i in range(3)
    )
    each = [single(x) for x in slices]
    np.testing.assert_allclose(got[0], sum(x[0] for x in each), rtol=1e-5)
    for label in case.floats():
        parts = [x[1][label] for x in each]
        stack = sum(parts) if dims[label] is None else jnp.stack(parts, dims[label])
        assert got[1][label].shape == stack.shape
        assert error(got[1][label], stack) <= 1e-5, label
    traced = neuronjax.trace(jax.vmap(loss, (dims,)), stacked)
    assert traced.count(CAUSAL) == 1


def test_vmap_of_a_gradient_and_an_axis_of_one():
    """R-42: a constant cotangent; the axis of size 1; jacrev against jacfwd."""
    case = Case(3, 3, window=2, sink=True, **SMALL)
    floats, rest = case.floats(), case.rest()
    run = functools.partial(case.call, rest=rest, cache_softmax=False)

    def gradient(floats):
        out, pull = jax.vjp(run, floats)
        return pull((jnp.ones_like(out[0]),))[0]

    wanted = jax.jit(gradient)(floats)
    got = jax.jit(jax.vmap(gradient))(jax.tree.map(lambda x: x[None], floats))
    for label, x in wanted.items():
        assert error(got[label][0], x) <= 1e-6
    pair = jax.jacrev, jax.jacfwd
    reverse, forward = (jax.jit(f(run))(floats)[0] for f in pair)
    for label in floats:
        assert error(reverse[label], forward[label]) <= 1e-5


def test_a_replicated_sink_and_bias_get_summed_gradients():
    """R-43: queries and keys split over 4 devices, everything else on all of them."""
    case = Case(3, 3, heads=(4, 4), widths=(2, 2), sink=True, bias="qk")
    floats = case.floats()
    sink = floats["sink"][:1]
    split = {n: floats[n] for n in "qkv"}

    def loss(split, bias, sink):
        heads = split["q"].shape[0]
        sinks = jnp.broadcast_to(sink, (heads, 1))
        out = case.call(dict(split, bias=bias, sink=sinks), {}, cache_softmax=False)
        return jnp.sum(jnp.sin(out[0]))

    mesh = make_mesh(tensor=4)
    shared = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), "tensor"),
        mesh=mesh,
        in_specs=(P("tensor"), P(), P()),
        out_specs=P(),
    )
    args = split, floats["bias"], sink
    got = jax.jit(jax.grad(shared, (0, 1, 2)))(*args)
    wanted = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) <= 1e-5


def test_lengths_bounds_and_offsets_are_operands_of_a_scan():
    """R-44, R-45: two steps each; integers get float0, bounds a zero gradient."""
    prefix, packed = CHECKED["prefix"], Case(4, 4, segments=(2, 2), **SMALL)
    slice_ = Case(2, 5, offset=1, degree=2, **SMALL)
    for case, labels in (
        (prefix, ("prior_used_len",)),
        (packed, ("bound_min", "bound_max")),
        (slice_, ("cp_offset",)),
    ):
        floats, rest = case.floats(), case.rest()
        steps = {n: jnp.stack([rest[n], rest[n] * 0 + 1]) for n in labels}

        def loss(floats, operands, case=case):
            return jnp.sum(jnp.sin(case.call(floats, operands)[0]))

        @jax.checkpoint
        def scanned(floats, steps, loss=loss):
            def step(total, operands):
                return total + loss(floats, operands), None

            return jax.lax.scan(step, jnp.float32(0), steps)[0]

        grads = jax.jit(jax.grad(scanned, (0, 1), allow_int=True))(floats, steps)
        single = jax.jit(jax.grad(loss))
        each = [single(floats, {n: x[i] for n, x in steps.items()}) for i in (0, 1)]
        for label in floats:
            assert error(grads[0][label], each[0][label] + each[1][label]) <= 1e-5
        for label, got in grads[1].items():
            if jnp.issubdtype(steps[label].dtype, jnp.integer):
                assert got.dtype == jax.dtypes.float0
            else:
                assert not np.asarray(got).any()


@pytest.mark.parametrize("name", CHECKED)
def test_named_residuals_let_remat_run_the_forward_once(name):
    """R-46, R-12: the names of the docstring; equal gradients without them."""
    case = CHECKED[name]
    floats, rest = case.floats(), case.rest()
    family = "attention" if case.prior is None else "prefix_caching_attention"
    names = [f"{family}_{output}" for output in STATISTICS]
    forward = CAUSAL if case.causal else FULL

    def loss(floats):
        return jnp.sum(jnp.sin(case.call(floats, rest, cache_softmax=False)[0]))

    for saved, count in ((names, 1), ((), 2)):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        again = jax.grad(jax.checkpoint(loss, policy=policy))
        traced = neuronjax.trace(again, floats)
        assert (traced.count(forward), traced.count(BACKWARD)) == (count, 1), traced
    wanted = jax.jit(jax.grad(loss))(floats)
    for label, got in jax.jit(again)(floats).items():
        assert error(got, wanted[label]) <= 1e-6


@pytest.mark.parametrize(
    "name", ["long_window", "whole", "packed", "strided", "dropout"]
)
@pytest.mark.parametrize("statistics", [False, True])
def test_every_rule_has_one_structure(name, statistics):
    """R-47: eval_shape, call, jit, vmap, and the forward of a gradient."""
    case = (CASES | DROPPED)[name]
    floats, rest = case.floats(), case.rest()
    run = functools.partial(case.call, rest=rest, cache_softmax=statistics)
    shapes = jax.eval_shape(run, floats)
    assert len(shapes) == (3 if statistics else 1)
    rows = case.heads[0], case.q_seq
    assert [x.shape[:2] for x in shapes] == [rows] * len(shapes)
    mapped = jax.eval_shape(jax.vmap(run), jax.tree.map(lambda x: x[None], floats))
    assert [x.shape for x in mapped] == [(1, *x.shape) for x in shapes]
    pushed = jax.eval_shape(lambda x: jax.jvp(run, (x,), (x,)), floats)
    for form in (jax.jit(run)(floats), *pushed):
        assert [(x.shape, x.dtype) for x in form] == [
            (x.shape, x.dtype) for x in shapes
        ]
    grads = jax.eval_shape(lambda x: jax.vjp(run, x)[1](run(x))[0], floats)
    assert {n: (x.shape, x.dtype) for n, x in grads.items()} == {
        n: (x.shape, x.dtype) for n, x in floats.items()
    }


@pytest.mark.parametrize("x64", [False, True])
def test_no_form_of_an_options_number_changes_the_dtype(x64):
    """R-48: cap and rate as Python and NumPy numbers; one program."""
    with jax.enable_x64(x64):
        case = Case(3, 3, sink=True, bias="k", **SMALL)
        floats = case.floats(jnp.bfloat16)
        options = [
            dict(logits_soft_cap=f(2), scale=f(1), dropout_rate=g(0.5))
            for f, g in ((float, float), (np.float64, np.float64), (int, np.float32))
        ]
        key = jax.random.key(0)
        runs = [
            functools.partial(case.call, rest=dict(dropout_key=key), **x)
            for x in options
        ]
        assert len({jax.jit(run).lower(floats).as_text() for run in runs}) == 1
        for run in runs:
            (out, *statistics), pull = jax.vjp(run, floats)
            assert out.dtype == jnp.bfloat16
            assert all(x.dtype == jnp.float32 for x in statistics)
            grads = pull((out, *statistics))[0]
            assert {n: x.dtype for n, x in grads.items()} == {
                n: x.dtype for n, x in floats.items()
            }
