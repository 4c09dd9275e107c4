"""Derivatives of `transformer_tkg`, numeric and across the transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from tests import transformer_case as case
from tests.transformer_case import operands, sizes

SMALL = sizes(B=2, S=2, H=4, G=2, n=1, D=2, I=3, slots=5, ctx=4)
HELD = ("mask_cache", "position_ids", "W_gate_scales", "W_up_scales", "W_down_scales")


def _function(call):
    """The call as a function of what has a derivative, and that."""
    arrays, rest = case.split(call)
    live = {k: x for k, x in arrays.items() if k not in HELD}
    held = {k: x for k, x in arrays.items() if k in HELD}

    def run(live):
        return neuronjax.transformer_tkg(**live, **held, **rest)

    return jax.jit(run), live


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("changes", [dict(), dict(G=1, n=2)], ids=str)
def test_derivatives_are_numeric_ones(changes, stacked):
    with jax.enable_x64(True):
        call = operands(SMALL | changes, dtype="float64", eps=0.1)
        run, live = _function(case.stacked(call) if stacked else call)
        check_grads(run, (live,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bound", [0.0, 0.6])
def test_derivatives_of_quantized_layers_are_numeric_ones(bound):
    """fp8 weights are constants, as their scales are."""
    with jax.enable_x64(True):
        call = operands(SMALL | dict(quantized=(0, 1)), dtype="float64", eps=0.1)
        call["clamp_bound"] = bound
        weights = ("W_gates", "W_ups", "W_downs")
        run, live = _function(call)
        held = {k: live.pop(k) for k in weights}

        def of_floats(live):
            return run(live | held)

        check_grads(of_floats, (live,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_forward_mode_is_the_transpose_of_reverse_mode():
    with jax.enable_x64(True):
        run, live = _function(case.stacked(operands(SMALL, dtype="float64")))
        dots = jax.tree.map(lambda x: jnp.cos(3 * x), live)
        outs, pushed = jax.jvp(run, (live,), (dots,))
        seeds = jax.tree.map(lambda x: jnp.sin(x + 1), outs)
        (pulled,) = jax.vjp(run, live)[1](seeds)

        def inner(a, b):
            pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
            return sum((x * y).sum() for x, y in pairs)

        assert abs(inner(pushed, seeds) - inner(dots, pulled)) < 1e-9


def _step_loss(run, live):
    return jnp.sin(run(live)[0]).sum()


def test_remat_and_plain_change_nothing():
    run, live = _function(operands(SMALL))
    wanted = jax.grad(functools.partial(_step_loss, run))(live)
    again = jax.grad(functools.partial(_step_loss, jax.checkpoint(run)))(live)
    with neuronjax.plain():
        arrays, rest = case.split(operands(SMALL))
        held = {k: arrays[k] for k in ("mask_cache", "position_ids")}

        def unjitted(live):
            return neuronjax.transformer_tkg(**live, **held, **rest)

        plain = jax.grad(functools.partial(_step_loss, unjitted))(live)
    for name, x in wanted.items():
        for found in (again, plain):
            for a, b in zip(*map(jax.tree.leaves, (found[name], x)), strict=True):
                assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1), name


def test_the_backward_is_the_backward_macros():
    run, live = _function(operands(SMALL | dict(L=3)))
    found = neuronjax.trace(jax.grad(functools.partial(_step_loss, run)), live)
    assert found.count("AttentionBlockTkgBwd") == found.count("MLPBwd") == 3


def test_a_second_derivative_is_that_of_the_first():
    with jax.enable_x64(True):
        run, live = _function(operands(SMALL | dict(L=1), dtype="float64"))
        rest = {k: x for k, x in live.items() if k != "X"}

        def slope(x):
            return jax.grad(lambda x: _step_loss(run, rest | dict(X=x)))(x)

        dot = jnp.cos(live["X"])
        _, got = jax.jvp(slope, (live["X"],), (dot,))
        step = 1e-5
        ahead, behind = (slope(live["X"] + s * dot) for s in (step, -step))
        wanted = (ahead - behind) / (2 * step)
        assert np.abs(got - wanted).max() < 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("stacked", [False, True])
def test_two_tokens_at_once_are_two_steps(stacked):
    """The second step sees in its cache what the first one wrote."""
    call = operands(sizes(B=2, S=2, G=2))
    held, ctx = 3, 7  # slots that are filled, and rows of the mask
    seen = np.zeros((ctx, 2, 1, 2), bool)
    seen[:held], seen[-2:] = True, np.tri(2, dtype=bool).T[:, None, None]
    call |= dict(
        mask_cache=jnp.asarray(seen), position_ids=jnp.full((2, 1), held, jnp.int32)
    )
    call = case.stacked(call) if stacked else call
    wanted = neuronjax.transformer_tkg(**call)

    def step(caches, t):
        filled = jnp.arange(ctx, dtype=jnp.int32) < held + t
        mask = (filled | (jnp.arange(ctx) == ctx - 1))[:, None, None, None]
        own = {
            k: jax.lax.dynamic_index_in_dim(call[k], t, axis)
            for k, axis in dict(X=1, RoPE_cos=2, RoPE_sin=2).items()
        }
        own |= dict(
            mask_cache=jnp.broadcast_to(mask, (ctx, 2, 1, 1)),
            position_ids=call["position_ids"] + t,
            K_caches=caches[0],
            V_caches=caches[1],
        )
        out, *caches = neuronjax.transformer_tkg(**(call | own))
        return tuple(caches), out[:, 0]

    first = call["K_caches"], call["V_caches"]
    caches, outs = jax.lax.scan(step, first, jnp.arange(2, dtype=jnp.int32))
    got = outs.swapaxes(0, 1), *caches
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
