"""Derivatives of the decode block: numeric ones, the plain form's, and what is dead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax.kernels.attention_block_tkg.operands import Operands, output_names
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.attention_block_tkg.macro import (
    attention_block,
    attention_block_backward,
)
from tests.attention_block_backward import gradients
from tests.attention_block_case import call, combination
from tests.attention_block_loss import loss, split
from tests.macro_case import error

NUMERIC = [
    "bare",
    "every norm",
    "one gain",
    "interleaved",
    "keys transposed",
    "new tokens alone",
    "blocks",
    "no update",
    "hidden_actual",
    "on-chip output",
    "skipped",
]


@pytest.mark.parametrize("name", NUMERIC)
def test_gradients_of_every_operand_are_the_numeric_ones(name):
    """The caches among them; the scale of the softmax too."""
    with jax.enable_x64(True):
        arrays, options = combination(name, "float64")
        live, rest = split(arrays)
        if "softmax_scale" not in options and not options.get("skip_attention"):
            live = live | dict(softmax_scale=jnp.asarray(0.4))
        run = jax.jit(loss(options, rest))
        check_grads(run, (live,), 1, modes=["rev", "fwd"], eps=1e-5)


def test_second_derivatives_are_the_numeric_ones():
    with jax.enable_x64(True):
        arrays, options = combination("every norm", "float64")
        live, rest = split(arrays)
        check_grads(jax.jit(loss(options, rest)), (live,), 2, ["rev"], eps=1e-5)


WRITTEN_OUT = """
    every norm|norms without gain|one gain|epsilons|interleaved|one table|scale
    keys transposed|all slots|new tokens alone|blocks|no update|hidden_actual
    on-chip projection|transposed|skipped|row|static|static, wide weights
    fp8|fp8, no update|fp8 blocks|clipped
"""
WRITTEN_OUT = [
    x.strip() for x in WRITTEN_OUT.replace("\n", "|").split("|") if x.strip()
]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_gradients_of_every_operand_are_those_written_out_by_hand(name):
    """Straight through a rounding, nothing from beyond a clip; constants get zeros."""
    with jax.enable_x64(True):
        arrays, options = combination(name, "float64")
        if name == "scale":
            options = {k: x for k, x in options.items() if k != "softmax_scale"}
            arrays = arrays | dict(softmax_scale=jnp.asarray(0.7))
        live, rest = split(arrays, options)
        floats = {k: x for k, x in rest.items() if is_differentiable(x.dtype)}
        rng = np.random.default_rng(5)
        shapes = jax.eval_shape(lambda: call(arrays, options))
        pulled = [rng.standard_normal(x.shape) for x in shapes]

        def total(given):
            outs = zip(call(arrays | given, options), pulled, strict=True)
            return sum((o * d).sum() for o, d in outs if is_differentiable(o.dtype))

        got = jax.jit(jax.grad(total))(live | floats)
        wanted = gradients(arrays, options, pulled)
    for key in live:
        assert got[key].shape == wanted[key].shape
        # The product of two float32 scales is rounded to float32.
        limit = 1e-6 if name.startswith("static") else 1e-10
        assert error(got[key], wanted[key]) <= limit, key
    assert all(not np.any(got[key]) for key in floats)


def test_a_clipped_key_has_no_gradient():
    """`d clip / dx` is 0 beyond 240 and the scale itself below."""

    def key(x):
        outs = neuronjax.attention_block_tkg(
            x,
            W_qkv=jnp.ones((1, 3)),
            K_cache=jnp.zeros((2, 2, 1)),
            V_cache=jnp.zeros((2, 2, 1)),
            k_scale=jnp.full((1, 1), 3.0),
            v_scale=jnp.full((1, 1), 2.0),
            skip_attention=True,
            update_cache=False,
            round_activations=False,
        )
        return outs[1].sum() + 10 * outs[2].sum()

    dx = jax.grad(key)(jnp.array([[[1.0]], [[100.0]]]))
    np.testing.assert_allclose(dx.ravel(), [3 + 20, 20])


@pytest.mark.parametrize("name", ["every norm", "blocks", "static", "skipped heads"])
def test_bfloat16_gradients_err_at_most_twice_as_much_as_the_plain_ones(name):
    """R-24: gradients have the dtypes of their operands. The mean of some draws."""
    _, options = combination(name)

    def grads(live, rest):
        return jax.grad(loss(options, rest))(live)

    kernel, plain, wide = (jax.jit(lambda *a: grads(*a)) for _ in range(3))
    errors = []
    for seed in range(5):
        live, rest = split(combination(name, "bfloat16", seed)[0], options)
        got = kernel(live, rest)
        assert all(got[key].dtype == live[key].dtype for key in live)
        with neuronjax.plain():
            narrow = plain(live, rest)
            with jax.enable_x64(True):
                exact = {k: x.astype(jnp.float64) for k, x in live.items()}
                exact = wide(exact, rest)
        errors.append({k: [error(g[k], exact[k]) for g in (got, narrow)] for k in live})
    for key in errors[0]:
        ours, theirs = np.mean([found[key] for found in errors], 0)
        assert ours <= 2 * theirs, key


def test_mapped_gradients_are_one_backward_macro():
    arrays, options = combination("every norm")
    live, rest = split(arrays)
    grads = jax.grad(loss(options, rest))
    moved = {k: jnp.stack([x, x / 2]) for k, x in live.items()}
    trace = neuronjax.trace(jax.vmap(grads), moved)
    assert trace.count("AttentionBlockTkgBwd") == 1
    outs = jax.jit(jax.vmap(grads))(moved)
    for i in range(2):
        one = jax.jit(grads)({k: x[i] for k, x in moved.items()})
        for key in one:
            assert error(outs[key][i], one[key]) <= 1e-5


# What the gradients of the stored values' readers are made of.
READERS = {
    "x_out": set(),
    "k_out": set(),
    "v_out": set(),
    "attention": {"w_out", "x", "k_cache", "sink"},
    "neg_max": {"x", "k_cache", "v_cache", "sink"},
    "rstd": {"x", "x_gain", "w_qkv", "q_pre_gain"},
    "q_pre_rstd": {"x", "w_qkv", "q_pre_gain", "k_cache", "cos"},
    "k_pre_rstd": {"x", "w_qkv", "k_pre_gain", "cos"},
    "q_post_rstd": {"x", "q_post_gain", "q_pre_gain"},
    "k_post_rstd": {"x", "k_post_gain", "k_pre_gain"},
}
UNTOUCHED = {
    "attention": {"bias_out", "v_cache"},
    "neg_max": {"bias_out", "w_out"},
    "rstd": {"bias_out", "w_out"},
    "q_pre_rstd": {"bias_out", "w_out"},
    "k_pre_rstd": {"bias_out", "w_out"},
    "q_post_rstd": {"bias_out", "w_out"},
    "k_post_rstd": {"bias_out", "w_out"},
}


@pytest.fixture(scope="module")
def backward():
    """The operands of the backward macro by name, and how to run it."""
    arrays, options = combination("every norm")
    found = {}

    def record(*operands, name, **config):
        found.update(operands=Operands(*operands), config=config)
        return attention_block_call(*operands, name=name, **config)

    attention_block_call = attention_block.__call__
    with pytest.MonkeyPatch.context() as patch:
        module = "neuronjax.primitives.attention_block_tkg.macro.attention_block"
        patch.setattr(module, record)
        call(arrays, options)
    o, config = found["operands"], found["config"]
    outs = attention_block(*o, name="AttentionBlockTkg", **config)
    names = output_names(**config)
    live = tuple(
        key
        for key, x in o._asdict().items()
        if x is not None and is_differentiable(x.dtype)
    )
    ones = {name: jnp.ones_like(out) for name, out in zip(names, outs, strict=True)}

    @jax.jit
    def run(outs):
        args = (*o, *(outs[k] for k in names), *(ones[k] for k in names))
        name = "AttentionBlockTkgBwd"
        grads = attention_block_backward(*args, name=name, live=live, **config)
        return dict(zip(live, grads, strict=True))

    return dict(zip(names, outs, strict=True)), run


@pytest.mark.parametrize("poisoned", READERS)
def test_gradients_come_from_the_stored_statistics(backward, poisoned):
    outs, run = backward
    clean = run(outs)
    moved = run(outs | {poisoned: jnp.full_like(outs[poisoned], jnp.nan)})
    changed = {k for k in clean if not np.array_equal(clean[k], moved[k])}
    assert READERS[poisoned] <= changed
    if not READERS[poisoned]:
        assert not changed
    assert not changed & UNTOUCHED.get(poisoned, set())
