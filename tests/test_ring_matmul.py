"""Products over a mesh are plain products, at the stated cost on the wire."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import sharding
from tests.hlo import along, program

# (ranks, cores); `over` takes the path through HBM where two cores share the rows.
MESHES = [(1, 1), (3, 1), (8, 1), (2, 2), (4, 2), (1, 2)]
FUNCTIONS = dict(
    CollectiveMatmul=sharding.sharded_allgather_matmul,
    MatmulReduceScatter=sharding.sharded_matmul_reduce_scatter,
)


def operands(dtype="float32", rows=48, inner=24, columns=24):
    rng = np.random.default_rng(7)
    shapes = (rows, inner), (inner, columns)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def over(name, ranks, cores, *, explicit=False, **options):
    """`(mesh, function)`."""
    mesh = sharding.make_mesh(tensor=ranks, lnc=cores, explicit=explicit)
    options |= dict(lnc="lnc" if cores == 2 else None, force_hbm_cc=cores == 2)
    return mesh, functools.partial(FUNCTIONS[name], mesh, **options)


def cotangents(out, arrays):
    """The gradients of `sum(out * weight)` for `out = lhs @ rhs`, in float64."""
    weight = np.cos(np.arange(out.size)).reshape(out.shape)
    lhs, rhs = (np.asarray(x, np.float64) for x in arrays)
    return weight @ rhs.T, lhs.T @ weight


def value_and_grads(function, arrays):
    def total(lhs, rhs):
        out = function(lhs, rhs)
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    run = jax.value_and_grad(total, (0, 1), has_aux=True)
    (_, out), grads = jax.jit(run)(*arrays)
    return out, grads


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("ranks", "cores", "explicit"),
    [(*mesh, False) for mesh in MESHES] + [(3, 1, True), (2, 2, True)],
)
def test_value_and_gradients_are_those_of_one_device(name, ranks, cores, explicit):
    """R-50: on a mesh of either kind, an explicit one being set."""
    arrays = operands()
    mesh, function = over(
        name, ranks, cores, explicit=explicit, bidirectional=ranks == 8
    )
    context = jax.set_mesh(mesh) if explicit else contextlib.nullcontext()
    with context:
        out, grads = jax.device_get(value_and_grads(function, arrays))
    lhs, rhs = (np.asarray(x, np.float64) for x in arrays)
    np.testing.assert_allclose(out, lhs @ rhs, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(grads, cotangents(out, arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_rounded_once(name):
    """Sums are float32: the result is the exact one, rounded to bfloat16."""
    arrays = operands("bfloat16", inner=240)
    _, function = over(name, 4, 2)
    out = function(*arrays)
    assert out.dtype == "bfloat16"
    lhs, rhs = (np.asarray(x, np.float64) for x in arrays)
    exact = lhs @ rhs
    error = np.abs(np.asarray(out, np.float64) - exact)
    assert (error <= 2**-8 * np.abs(exact) + 1e-5 * np.abs(exact).max()).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checked_gradients(name):
    _, function = over(name, 3, 1)
    arrays = operands(rows=6, inner=6, columns=6)
    check_grads(jax.jit(function), arrays, order=1, modes=["rev", "fwd"], rtol=1e-2)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("ranks", "cores", "channels"), [(5, 1, 1), (4, 2, 2)])
def test_what_crosses_the_wire(name, ranks, cores, channels):
    """`C (tp - 1)` permutes; with cores one gather of the result, one sum back."""
    mesh, function = over(name, ranks, cores)
    arrays = operands(rows=80, inner=40, columns=40)
    permutes = channels * (ranks - 1)
    forward = program(function, *arrays)
    backward = program(lambda *a: value_and_grads(function, a)[1], *arrays)
    exchanges = {"all-gather": 1} if cores == 2 else {}
    sums = {"all-reduce": 1} if cores == 2 else {}
    assert forward.counts() == {"collective-permute": permutes} | exchanges
    # The weights do not depend on the result: only gradients are left, in one ring.
    assert backward.counts() == {"collective-permute": _in_gradient(name, permutes)} | (
        sums
    )
    tensor = along(mesh, "tensor")
    assert forward.counts(tensor) == {"collective-permute": permutes}


def _in_gradient(name, permutes):
    """A ring of rows for `rhs` and one of sums for `lhs`; the mirror shares one."""
    return 2 * permutes if name == "CollectiveMatmul" else permutes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_emits_the_mirror(name):
    _, function = over(name, 4, 1)
    (mirror,) = FUNCTIONS.keys() - {name}

    def loss(lhs, rhs):
        return jnp.sum(jnp.sin(function(lhs, rhs)))

    found = neuronjax.trace(jax.grad(loss, (0, 1)), *operands())
    counts = {n: found.count(n) for n in found.names}
    assert counts == {name: 1, mirror: 1, "CollectiveMatmulBwd": 1}


def test_other_axes_of_a_mesh_hold_the_same():
    mesh = sharding.make_mesh(data=2, tensor=4)
    arrays = operands()
    for function in FUNCTIONS.values():
        out = jax.jit(functools.partial(function, mesh))(*arrays)
        np.testing.assert_allclose(out, arrays[0] @ arrays[1], rtol=1e-5, atol=1e-5)
