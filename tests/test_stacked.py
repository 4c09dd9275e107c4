"""One layer cut out of a stack of narrow floats, inside a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from neuronjax.kernels.stacked import layer_at

NARROW = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3)


def _stack(dtype):
    return jnp.linspace(0.5, 2, 12, dtype=jnp.float32).reshape(3, 2, 2).astype(dtype)


def _cubes(stack):
    """The sum of cubes, layer by layer; its Hessian is diagonal: 6 x."""

    def body(total, i):
        row = layer_at(stack, i).astype(jnp.float32)
        return total + jnp.sum(row**3), None

    return lax.scan(body, jnp.float32(0), jnp.arange(3, dtype=jnp.int32))[0]


@pytest.mark.parametrize("dtype", NARROW)
def test_layers_keep_their_bits(dtype):
    stack = _stack(dtype)
    for i in range(3):
        got = layer_at(stack, jnp.int32(i))
        np.testing.assert_array_equal(got, stack[i])


@pytest.mark.parametrize("dtype", NARROW[:2])
@pytest.mark.parametrize("order", ["forward over reverse", "reverse over reverse"])
def test_second_derivatives_pass_a_scan(dtype, order):
    """A scan that is differentiated in reverse forgets rules of `jax.custom_jvp`."""
    stack, gradient = _stack(dtype), jax.grad(_cubes)
    if order == "forward over reverse":
        got = jax.jvp(gradient, (stack,), (jnp.ones_like(stack),))[1]
    else:
        got = jax.grad(lambda x: jnp.sum(gradient(x).astype(jnp.float32)))(stack)
    wanted = 6 * np.asarray(stack, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-7)


@pytest.mark.parametrize("dims", [(0, None), (1, None), (2, None), (None, 0), (1, 0)])
def test_it_is_mapped_over_either_operand(dims):
    stack, which = _stack(jnp.bfloat16), jnp.array([1, 0], jnp.int32)
    of_stack, of_which = dims
    size = 2 if of_which == 0 else stack.shape[of_stack]
    i = which if of_which == 0 else which[0]
    got = jax.vmap(layer_at, dims)(stack, i)
    for n in range(size):
        one = stack if of_stack is None else lax.index_in_dim(stack, n, of_stack, False)
        np.testing.assert_array_equal(got[n], one[which[n] if of_which == 0 else i])
