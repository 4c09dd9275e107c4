"""`moe_cte` under transformations: vmap, remat, every rule's structure, x64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests.moe_case import CASES, CLAMPS, Case, compare


def _operands(case, dtype="float32"):
    index = case.index()
    return case.floats(index, dtype), case.routed(index)


def test_traced_and_known_operands_give_one_result():
    """R-42: eager, under jit, and mapped over leading axes as one macro."""
    case = CASES["clamps"]
    floats, rest = _operands(case)
    wanted = case.stored(floats, rest)
    compare(jax.jit(case.stored)(floats, rest), wanted, 1e-6)
    twice = {n: jnp.stack([x, 2 * x]) for n, x in floats.items()}
    other = case.routed(case.index(4))
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), rest, other)
    mapped = jax.vmap(case.stored)
    got = mapped(twice, both)
    compare(jax.tree.map(lambda x: x[0], got), wanted, 1e-6)
    second = case.stored({n: x[1] for n, x in twice.items()}, other)
    compare(jax.tree.map(lambda x: x[1], got), second, 1e-6)
    assert neuronjax.trace(mapped, twice, both).count("BlockwiseMM") == 1


@pytest.mark.parametrize("stored", [False, True])
def test_named_residuals_let_remat_run_the_forward_once(stored):
    """R-46, R-12: the names of the docstring; equal gradients without them."""
    case = CASES["clamps"]
    floats, rest = _operands(case)
    names = [f"blockwise_mm_{n}" for n in ("out", "gate_up", "down")]
    assert all(f"`{name}`" in str(neuronjax.moe_cte.__doc__) for name in names)

    def loss(floats):
        outs = (case.stored if stored else case.call)(floats, rest)
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(outs))

    for saved, count in ((names, 1), ((), 2)):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        again = jax.grad(jax.checkpoint(loss, policy=policy))
        traced = neuronjax.trace(again, floats)
        assert traced.count("BlockwiseMM") == count, traced
        assert traced.count("BlockwiseMMBwd") == 1, traced
    compare(jax.jit(again)(floats), jax.jit(jax.grad(loss))(floats), 1e-6)


@pytest.mark.parametrize("options", [
    {},
    dict(checkpoint_activation=True),
    dict(checkpoint_activation=True, expert_affinity_multiply_on_I=True),
    dict(checkpoint="recompute"),
])  # fmt: skip
def test_every_rule_has_one_structure(options):
    """R-47: abstract evaluation, call, plain, vmap, forward of a gradient."""
    case = Case(skip_token=True)
    floats, rest = _operands(case)

    def run(floats):
        return case.call(floats, rest, **options)

    def form(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    wanted = form(jax.eval_shape(run, floats))
    with neuronjax.plain():
        plain = jax.eval_shape(run, floats)
    lifted = jax.tree.map(lambda x: x[None], floats)
    mapped = jax.tree.map(lambda x: x[0], jax.vmap(run)(lifted))
    pushed = jax.eval_shape(lambda x: jax.jvp(run, (x,), (x,)), floats)
    forward = jax.eval_shape(lambda x: jax.vjp(run, x)[0], floats)
    for tree in (jax.jit(run)(floats), plain, mapped, *pushed, forward):
        assert form(tree) == wanted
    grads = jax.eval_shape(lambda x: jax.vjp(run, x)[1](run(x))[0], floats)
    assert form(grads) == form(floats)


@pytest.mark.parametrize("x64", [False, True])
def test_no_form_of_a_limit_changes_the_dtype(x64):
    """R-48: Python and NumPy numbers; one program."""
    with jax.enable_x64(x64):
        case = Case()
        floats, rest = _operands(case, "bfloat16")
        texts = set()
        for form in (float, int, np.float64, np.float32):
            limits = {
                name: form(n) for name, n in zip(CLAMPS, (2, -2, 1, -1), strict=True)
            }

            def run(floats, rest, limits=limits):
                return case.stored(floats, rest, **limits)

            got = jax.eval_shape(run, floats, rest)
            assert [x.dtype for x in got] == ["bfloat16"] * 3
            texts.add(jax.jit(run).lower(floats, rest).as_text())
        assert len(texts) == 1
