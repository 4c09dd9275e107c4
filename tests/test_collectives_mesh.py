"""Rings on one axis of a larger mesh, over whole arrays, and without a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import sharding
from neuronjax.primitives.collectives import names
from neuronjax.sharding import make_mesh
from tests.hlo import along, program
from tests.macro_case import error
from tests.ring_case import AXIS, FAMILIES, Call, Sizes, equation

ROWS, WIDTH, COLUMNS = 240, 3, 120
MESHES = [dict(tensor=2), dict(tensor=5), dict(tensor=4, lnc=2, explicit=True)]


def _whole(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (ROWS, WIDTH), (WIDTH, COLUMNS), (ROWS, COLUMNS), (COLUMNS, WIDTH)
    return [
        jnp.asarray(np.rint(2 * rng.standard_normal(s)), jnp.float32) for s in shapes
    ]


def _products(mesh, lnc=None, **options):
    gather = functools.partial(sharding.sharded_allgather_matmul, mesh, lnc=lnc)
    scatter = functools.partial(sharding.sharded_matmul_reduce_scatter, mesh, lnc=lnc)

    def run(a, b, c, d):
        return gather(a, b, **options), scatter(c, d, **options)

    return run


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_products_of_whole_arrays_are_rings(sizes):
    """R-50: on either kind of mesh the values and gradients of one device.

    And how results lie, and what crosses the wire.
    """
    mesh, ranks = make_mesh(**sizes), sizes["tensor"]
    lnc = "lnc" if "lnc" in sizes else None
    run = _products(mesh, lnc, bidirectional=ranks % 2 == 1)
    lies = P(AXIS), P(None, AXIS), P(None, AXIS), P(AXIS)
    given = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(_whole(), lies, strict=True)
    ]
    a, b, c, d = map(np.asarray, given)

    def both(*given):
        outs, pull = jax.vjp(run, *given)
        return outs, pull(outs)

    (ab, cd), (da, db, dc, dd) = jax.jit(both)(*given)
    wanted = a @ b, c @ d, a @ b @ b.T, a.T @ a @ b, c @ d @ d.T, c.T @ c @ d
    for got, exact in zip((ab, cd, da, db, dc, dd), wanted, strict=True):
        np.testing.assert_array_equal(got, exact)
    for got, spec in zip((ab, cd), (P(None, AXIS), P(AXIS)), strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        if "explicit" in sizes:
            assert jax.typeof(got).sharding.spec == P(*spec, *[None] * (2 - len(spec)))
    found = program(run, *given)
    channels = 2 if lnc else 1
    moves = 2 * channels * (ranks - 1)
    kinds = {"collective-permute": moves} if moves else {}
    assert found.counts(along(mesh, AXIS)) == kinds
    assert found.counts() == kinds | ({"all-gather": 2} if lnc else {})


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_ring_turns_on_either_axis_of_a_mesh(axis):
    """Each line of devices along the axis is a ring of its own."""
    mesh, other = make_mesh(data=2, tensor=4), {"data": "tensor", "tensor": "data"}
    ranks, lines = mesh.shape[axis], mesh.shape[other[axis]]
    lhs, rhs = Call(names.MATMUL, groups=(tuple(range(ranks)),)).drawn(8)
    order = np.arange(8).reshape(2, 4)
    groups = order.T if axis == "data" else order

    def local(lhs, rhs):
        ring = functools.partial(neuronjax.allgather_compute_matmul, lhs[0], rhs[0])
        return ring(ranks, 1, axis=axis)[None]

    spec = P(("data", "tensor"))
    split = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    got = jax.jit(split)(lhs, rhs)
    np.testing.assert_array_equal(got, equation(names.MATMUL, (lhs, rhs), groups))
    found = program(split, lhs, rhs)
    assert len(groups) == lines
    assert found.counts(along(mesh, axis)) == {"collective-permute": ranks - 1}
    assert found.counts() == {"collective-permute": ranks - 1}


def test_weights_that_replicas_share_are_summed_over_them_alone():
    """Batch over `data`, ring over `tensor`: one all-reduce for each weight."""
    mesh, rng = make_mesh(data=2, tensor=4), np.random.default_rng(0)
    x, up, down = (
        jnp.asarray(np.rint(rng.standard_normal(s)), jnp.float32)
        for s in [(2, 8, 3), (3, 8), (8, 3)]
    )

    def local(x, up, down):
        wide = neuronjax.allgather_compute_matmul(x[0], up, 4, 1)
        return neuronjax.matmul_reduce_scatter(wide, down, 4, 1)[None]

    specs = P("data", AXIS), P(None, AXIS), P(AXIS)
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])

    def loss(fun):
        return lambda *args: jnp.sum(
            fun(*args) * jnp.cos(jnp.arange(48.0)).reshape(x.shape)
        )

    given = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip((x, up, down), specs, strict=True)
    ]
    gradient = jax.grad(loss(split), (0, 1, 2))
    got = jax.jit(gradient)(*given)
    wanted = jax.grad(loss(lambda x, up, down: x @ up @ down), (0, 1, 2))(x, up, down)
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) <= 1e-5
    found = program(gradient, *given)
    assert set(found.counts(along(mesh, "data"))) == {"all-reduce"}
    assert set(found.counts(along(mesh, AXIS))) == {"collective-permute"}
    assert set(found.counts()) == {"all-reduce", "collective-permute"}


def test_an_axis_may_be_manual_beside_one_that_xla_divides():
    mesh = make_mesh(data=2, tensor=3)
    lhs = jnp.arange(36.0).reshape(12, 3)
    rhs = jnp.arange(18.0).reshape(3, 6)

    def local(lhs, rhs):
        return neuronjax.allgather_compute_matmul(lhs, rhs, 3, 1)

    specs = P(AXIS), P(None, AXIS)
    split = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs[1], axis_names={AXIS}
    )
    np.testing.assert_array_equal(jax.jit(split)(lhs, rhs), lhs @ rhs)
    got = jax.jit(jax.grad(lambda *a: jnp.sum(split(*a) ** 2)))(lhs, rhs)
    np.testing.assert_array_equal(got, 2 * (lhs @ rhs) @ rhs.T)


def _ring(mesh, *manual):
    """A product on three ranks; of whole arrays."""
    return jax.shard_map(
        lambda lhs, rhs: neuronjax.allgather_compute_matmul(lhs, rhs, 3, 1),
        mesh=mesh,
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS),
        axis_names=set(manual or mesh.axis_names),
    )


def test_a_map_over_another_mesh_axis_has_gradients():
    mesh = make_mesh(data=2, tensor=3)
    lhs = jnp.arange(36.0).reshape(2, 6, 3)
    rhs = jnp.arange(18.0).reshape(3, 6)

    def grads(fun):
        def loss(lhs, rhs):
            return jnp.sum(jnp.sin(fun(lhs, rhs)))

        return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    mapped = jax.vmap(_ring(mesh), (0, None), spmd_axis_name="data")
    for got, wanted in zip(grads(mapped), grads(jnp.matmul), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_columns_may_be_divided_further_over_an_explicit_axis():
    """R-50: inside, `tensor` is manual and `data` stays explicit."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 3), ("data", AXIS), kinds, devices=jax.devices()[:6])
    lhs, rhs = jnp.arange(24.0).reshape(6, 4), jnp.arange(24.0).reshape(4, 6)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((lhs, P(AXIS)), (rhs, P(None, (AXIS, "data"))))
        ]
        got = jax.jit(_ring(mesh, AXIS))(*placed)
    np.testing.assert_array_equal(jax.device_get(got), np.matmul(lhs, rhs))


def test_ranks_are_counted_along_the_mesh_whatever_the_devices_numbers_are():
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]]
    lhs = jnp.arange(8.0).reshape(4, 2)
    split = jax.shard_map(
        lambda x: neuronjax.fine_grained_allgather(x, 4)[None],
        mesh=Mesh(devices, (AXIS,)),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
    )
    for own in jax.jit(split)(lhs):
        np.testing.assert_array_equal(own, lhs)


def test_without_a_mesh_ranks_are_an_axis_of_vmap():
    """Every macro, with its gradient."""
    calls = [
        Call(name, i % 2 == 1, sizes=Sizes(2, 3, 2)) for i, name in enumerate(FAMILIES)
    ]
    given = [call.drawn(3) for call in calls]

    def loss(runs):
        def total(given):
            return sum(
                jnp.sum(jnp.sin(run(*own)) * np.float32(i + 1))
                for i, (run, own) in enumerate(zip(runs, given, strict=True))
            )

        return total

    mapped = [jax.vmap(call.run, axis_name=AXIS) for call in calls]
    plain = [lambda *own, c=call: equation(c.name, own, None, jnp) for call in calls]
    got, wanted = (jax.jit(jax.value_and_grad(loss(f)))(given) for f in (mapped, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) <= 2e-5


@pytest.mark.parametrize("ranks", [9, 16])
def test_more_ranks_than_devices_may_be_an_axis_of_vmap(ranks):
    calls = [Call(names.MATMUL, bidirectional=True), Call(names.COLUMNS)]
    given = [call.drawn(ranks) for call in calls]

    def run(given):
        ring = functools.partial(neuronjax.allgather_compute_matmul, *given[0])
        columns = neuronjax.allgather_sb2sb(*given[1], [[*range(ranks)]], ranks)
        return ring(ranks, 1, bidirectional=True), columns

    outs = jax.jit(jax.vmap(run, axis_name=AXIS))(given)
    for call, own, got in zip(calls, given, outs, strict=True):
        np.testing.assert_array_equal(got, call.wanted(own))


def test_a_mapped_ring_takes_operands_that_are_alike_on_all_ranks():
    ones = jnp.ones((2, 3))

    def run(_):
        return (
            neuronjax.allgather_compute_matmul(ones, ones.T, 3, 1),
            neuronjax.matmul_reduce_scatter(ones.reshape(3, 2), ones, 3, 1),
            neuronjax.fine_grained_allgather(ones, 3),
        )

    found = jax.jit(jax.vmap(run, axis_name=AXIS))(jnp.arange(3))
    assert [x.shape for x in found] == [(3, 6, 2), (3, 1, 3), (3, 6, 3)]
    assert [set(np.ravel(x).tolist()) for x in found] == [{3.0}, {6.0}, {1.0}]


def test_tangents_alone_may_be_mapped():
    def push(tangent):
        gather = lambda x: neuronjax.fine_grained_allgather(x, 3)  # noqa: E731
        return jax.jvp(gather, (jnp.ones((2, 3)),), (tangent,))[1]

    tangents = jnp.arange(18.0).reshape(3, 2, 3)
    found = jax.jit(jax.vmap(push, axis_name=AXIS))(tangents)
    np.testing.assert_array_equal(found, [tangents.reshape(6, 3)] * 3)


def test_results_of_two_cores_are_typed_alike_on_both():
    """They fit an output that the axis of the cores does not divide."""
    mesh, x = make_mesh(tensor=2, lnc=2), jnp.arange(16.0).reshape(8, 2)

    def local(x):
        ring = functools.partial(neuronjax.allgather_compute_matmul, x, jnp.eye(2))
        return ring(2, 1, lnc_axis="lnc")[None]

    split = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    for own in jax.jit(split)(x):
        np.testing.assert_array_equal(own, x)
