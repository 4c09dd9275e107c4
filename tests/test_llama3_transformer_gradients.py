"""Derivatives of `llama3_transformer`, and the memory that they take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from tests.hlo import temporaries
from tests.llama3_equations import error, operands, sizes

SMALL = sizes(B=1, S=3, H=4, G=1, n=2, D=2, I=3)


def _function(**options):
    def run(given):
        return neuronjax.llama3_transformer(**given, **options)

    return jax.jit(run)


@pytest.mark.parametrize("order", ["group", "kind"])
def test_derivatives_are_numeric_ones(order):
    """R-07, R-18: to weights, gains and tables too, of output, keys and values."""
    with jax.enable_x64(True):
        given = operands(SMALL | dict(G=2), dtype="float64")
        run = _function(eps=0.1, qkv_order=order, output_kv=True)
        check_grads(run, (given,), 1, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6)


def test_second_derivatives_are_numeric_ones():
    with jax.enable_x64(True):
        given = operands(SMALL, dtype="float64")
        run = _function(eps=0.1, output_kv=True)
        check_grads(run, (given,), 2, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_keys_alone_have_their_gradient():
    """The cotangent of the output is none then."""
    given = operands(sizes())

    def keys(given):
        return jnp.sin(_function(output_kv=True)(given)[1]).sum()

    got = jax.grad(keys)(given)
    with neuronjax.plain():
        wanted = jax.grad(keys)(given)
    for name, x in wanted.items():
        assert error([got[name]], [x]) <= 1e-5 or not np.any(x), name
    # Nothing of the last layer but its keys counts.
    assert not np.any(got["W_downs"][-1]) and np.any(got["W_downs"][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_errs_at_most_twice_what_the_plain_one_does(dtype):
    given = operands(sizes(L=3, H=16, I=24, S=9), dtype=dtype)

    def loss(given):
        out = neuronjax.llama3_transformer(**given)
        return jnp.sin(out.astype(jnp.float32)).sum()

    gradient = jax.jit(jax.grad(loss))
    got = gradient(given)
    with neuronjax.plain():
        plain = gradient(given)
    with jax.enable_x64(True), neuronjax.plain():
        wide = {name: np.float64(x) for name, x in given.items()}
        exact = jax.jit(
            jax.grad(lambda g: jnp.sin(neuronjax.llama3_transformer(**g)).sum())
        )(wide)
    for name, x in exact.items():
        assert got[name].dtype == given[name].dtype
        assert error([got[name]], [x]) <= 2 * error([plain[name]], [x]) + 1e-6, name


def test_what_is_kept_for_the_backward_is_the_input_of_each_layer():
    z = sizes(L=3)
    given = operands(z)
    _, pull = jax.vjp(_function(), given)
    kept = [x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape")]
    held = {x.shape for x in given.values()}
    more = [shape for shape in kept if shape not in held]
    assert more == [(z["L"], z["B"], z["S"], z["H"])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_grows_by_one_residual_stream_a_layer(dtype):
    """A list of layers would keep heads and both halves of the MLP as well.

    Gradients are outputs and no temporaries. A layer with all that its own backward
    reads takes about 17 of these streams.
    """
    z = sizes(B=4, S=64, H=64, G=2, n=2, D=16, I=128)

    def used(count):
        given = operands(z | dict(L=count), dtype=dtype)
        loss = lambda g: neuronjax.llama3_transformer(**g).astype("float32").sum()  # noqa: E731
        return temporaries(jax.grad(loss), given)

    stream = z["B"] * z["S"] * z["H"] * jnp.dtype(dtype).itemsize
    assert used(10) - used(4) <= 6 * 1.5 * stream


def test_remat_and_scan_change_nothing():
    given = operands(sizes())
    run = _function()

    def loss(fun, given):
        return jnp.sin(fun(given)).sum()

    def twice(given):
        def step(x, _):
            return run(given | dict(X=x)), None

        return jax.lax.scan(step, given["X"], None, length=2)[0]

    again = jax.grad(functools.partial(loss, jax.checkpoint(run)))(given)
    once = jax.grad(functools.partial(loss, run))(given)
    for name, x in once.items():
        assert error([again[name]], [x]) <= 1e-6
    scanned = jax.grad(functools.partial(loss, twice))(given)
    unrolled = jax.grad(functools.partial(loss, lambda g: run(g | dict(X=run(g)))))(
        given
    )
    for name, x in unrolled.items():
        assert error([scanned[name]], [x]) <= 1e-5
