"""Second derivatives of functions with a rule of their own, wherever they stand.

A `lax.scan` that is differentiated in reverse forgets a rule of `jax.custom_jvp`: the
second derivative through it is that of the function's body, where a rounding, or bits,
silently give 0. Each function of the kernels whose rule is its own is held here to a
twin: the linear map that the rule says, and what the function adds to it as a constant.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import neuronjax
from neuronjax.kernels.kv_cache import write_around, write_blocks, write_slots
from neuronjax.kernels.mx.formats import E4M3FN
from neuronjax.kernels.mx.product import product_fwd
from neuronjax.kernels.mx.quantize import quantize_fwd, round_blocks
from neuronjax.kernels.own_derivative import own_derivative
from neuronjax.kernels.quantization.linear import scaled_linear_bwd, scaled_linear_fwd
from neuronjax.kernels.quantization.straight_through import static_codes
from neuronjax.kernels.stacked import layer_at

# What a cotangent loses when it is cast to bfloat16, twice over.
NARROW = 2.0**-6
STEPS = np.array([1.0, -2.0, 0.5])


@dataclasses.dataclass(frozen=True)
class Use:
    """A function of `x` and the linear map that has all of its derivatives."""

    shape: tuple[int, ...]
    of: Callable[[jax.Array], jax.Array]
    linear: Callable[[jax.Array], jax.Array]
    tolerance: float = 1e-9

    def twin(self, x):
        line = self.linear(x)
        return line + lax.stop_gradient(self.of(x) - line)

    @property
    def x(self):
        """Integers of either sign: exact in bfloat16, off the codes of fp8 when cut."""
        size = int(np.prod(self.shape))
        values = np.random.default_rng(0).permutation(size) % 61 - 30.0
        return jnp.asarray(values).reshape(self.shape)


def _matrix(rows, columns):
    return jnp.asarray(np.random.default_rng(1).standard_normal((rows, columns)))


def _of_basis(of, shape):
    """The map that a linear function is, from what it makes of each basis vector."""
    basis = jnp.eye(int(np.prod(shape))).reshape(-1, *shape)
    images = lax.map(of, basis)
    return lambda x: jnp.tensordot(x.reshape(-1), images, 1)


def _mx_product():
    packed, scale = quantize_fwd(_matrix(8, 8).astype(jnp.float32), E4M3FN)
    weight = packed[:, None], scale[:, None]
    of = lambda x: product_fwd(x, *weight, kind=E4M3FN)  # noqa: E731
    return Use((1, 4, 8, 1), of, _of_basis(of, (1, 4, 8, 1)))


def _fp8_product(product, shape):
    weight = _matrix(3, 4).astype(jnp.float8_e4m3)
    of = functools.partial(
        product, w=weight, scale=jnp.float64(0.5), dtype=jnp.dtype("float64")
    )
    return Use(shape, of, _of_basis(of, shape))


def _write(write, cache_shape, new_shape, *where, **options):
    """What a write of bfloat16 holds, as float64: linear in cache and in new tokens."""
    cache_size, new_size = map(int, map(np.prod, (cache_shape, new_shape)))

    def of(x, dtype=jnp.bfloat16):
        cache, new = jnp.split(x.astype(dtype), [cache_size])
        parts = cache.reshape(cache_shape), new.reshape(new_shape)
        return write(*parts, *map(jnp.int32, where), **options).astype(x.dtype)

    shape = (cache_size + new_size,)
    return Use(shape, of, _of_basis(lambda x: of(x, x.dtype), shape), NARROW)


def _clipped(x, limit):
    return lax.clamp(jnp.float64(-limit), x, jnp.float64(limit))


def _unsaturated(x):
    """`x` up to 1.75 powers of two of the block's largest value, where e4m3fn ends."""
    largest = 1.75 * 2 ** jnp.floor(jnp.log2(jnp.abs(x).max()))
    return jnp.where(jnp.abs(x) <= lax.stop_gradient(largest), x, 0)


def _layer():
    index = jnp.int32(1)
    of = lambda x: layer_at(x.astype(jnp.bfloat16), index).astype(x.dtype)  # noqa: E731
    return Use((3, 4), of, lambda x: x[1], NARROW)


USES = {
    "MX blocks": lambda: Use(
        (8, 4), lambda x: round_blocks(x, axes=(0, 1), kind=E4M3FN), _unsaturated
    ),
    "fp8 codes": lambda: Use(
        (2, 5),
        lambda x: static_codes(x, jnp.float64(1), limit=30.0),
        lambda x: _clipped(x, 30.0),
    ),
    "MX product": _mx_product,
    "fp8 product": lambda: _fp8_product(scaled_linear_fwd, (2, 3)),
    "fp8 product, transposed": lambda: _fp8_product(scaled_linear_bwd, (2, 4)),
    "cache": lambda: _write(write_slots, (2, 4, 1), (2, 2, 1), [1, 3], axis=1),
    "circular cache": lambda: _write(
        write_around, (2, 3, 1), (2, 2, 1), [2, -1], axis=1
    ),
    "block cache": lambda: _write(
        write_blocks, (3, 2, 1), (2, 1, 1), [3, 0], [[0, 2], [1, -1]]
    ),
    "layer of a stack": _layer,
}


def _cubes(of, x):
    return jnp.sum(of(x) ** 3)


def _scanned(of, x):
    body = lambda total, step: (total + _cubes(of, step * x), None)  # noqa: E731
    return lax.scan(body, jnp.float64(0), jnp.asarray(STEPS))[0]


def _mapped(of, x):
    """Mapped, and computed again, inside of the scan."""
    both = jnp.stack([x, 2 * x])
    return _scanned(jax.checkpoint(jax.vmap(of)), both)


def _in_a_leaf(of, x):
    """The scan stands in the leaf of a macro, which JAX itself differentiates."""
    leaf = neuronjax.register_kernel("OwnDerivativeProbe", lambda x: _scanned(of, x))
    return leaf(x)


PLACES = {"scan": _scanned, "remat of vmap in a scan": _mapped, "leaf": _in_a_leaf}


def _second(loss, x):
    """The Hessian times cosines: forward over reverse, and reverse over reverse."""
    along, gradient = jnp.cos(jnp.arange(x.size)).reshape(x.shape), jax.grad(loss)
    forward = jax.jvp(gradient, (x,), (along,))[1]
    return forward, jax.grad(lambda x: jnp.vdot(gradient(x), along))(x)


def _wanted(use, times, x):
    """The same of the twin, without a loop: its Hessian-vector product."""

    def loss(x):
        factors = [time * float(step) for time in times for step in STEPS]
        return sum(_cubes(use.twin, factor * x) for factor in factors)

    return _second(loss, x)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", USES)
def test_the_second_derivative_is_that_of_the_rule(use, place):
    with jax.enable_x64(True):
        use = USES[use]()
        loss = functools.partial(PLACES[place], use.of)
        got = jax.jit(functools.partial(_second, loss))(use.x)
        times = (1, 2) if "vmap" in place else (1,)
        wanted = jax.jit(functools.partial(_wanted, use, times))(use.x)
        assert jnp.any(wanted)
        for second in got:
            worst = np.abs(second - wanted).max() / np.abs(wanted).max()
            assert worst < use.tolerance


def _scaled(x, factor, *, axis=None):
    moved = x if axis is None else lax.psum(x, axis)
    return jnp.round(moved * factor)


def _scaled_tangent(primals, tangents, *, axis=None):
    moved = tangents[0] if axis is None else lax.psum(tangents[0], axis)
    return moved * primals[1]


@pytest.mark.parametrize("name", [None, "ranks"])
def test_what_is_mapped_apart_from_the_operands_leaves_them_whole(name):
    scaled = own_derivative(_scaled_tangent)(_scaled)
    x, rows = jnp.array([0.7, 1.2]), jnp.arange(3.0)
    square = lambda x: jnp.sum(scaled(x, x) ** 2)  # noqa: E731

    def one(row):
        return jax.grad(square)(x) + row

    mapped = jax.vmap(one, axis_name=name)
    np.testing.assert_allclose(mapped(rows), jax.grad(square)(x) + rows[:, None])
    assert not _has_shape(jax.make_jaxpr(mapped)(rows), (3, 2), "scaled")
    hessian = jnp.diag(2 * (x * x + jnp.round(x * x)))
    for jacobian in jax.jacrev, jax.jacfwd:
        second = jacobian(jax.grad(square))(x)
        np.testing.assert_allclose(second, hessian, rtol=1e-6)


def test_an_unmapped_operand_is_summed_over_the_axis_of_a_setting():
    scaled = own_derivative(_scaled_tangent)(_scaled)
    x, rows = jnp.array([0.7, 1.2]), jnp.arange(3.0)

    def loss(x):
        one = lambda row: scaled(x, jnp.ones(2), axis="ranks").sum() + row  # noqa: E731
        return jax.vmap(one, axis_name="ranks")(rows).sum()

    assert loss(x) == 3 * (2 + 4) + 3
    np.testing.assert_allclose(jax.grad(loss)(x), [9, 9])


def _has_shape(jaxpr, shape, name):
    """Whether an equation of this name gives an array of this shape."""
    found = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == name]
    assert found
    return any(out.aval.shape == shape for eqn in found for out in eqn.outvars)
