"""Rings where types, maps and meshes meet: each case went wrong once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_the_gradient_of_a_wider_rhs_is_not_rounded_to_lhs(narrow):
    lhs, rhs = jnp.full((256, 1), 300, narrow), jnp.full((1, 2), 0.1, "float32")

    def total(call):
        def loss(rhs):
            return jnp.sum(call(lhs, rhs, 1, 1).astype("float32"))

        return jax.grad(loss)

    wanted = np.full((1, 2), 256 * 300.0)
    for call in neuronjax.allgather_compute_matmul, neuronjax.matmul_reduce_scatter:
        np.testing.assert_array_equal(total(call)(rhs), wanted)
        with neuronjax.plain():
            np.testing.assert_array_equal(total(call)(rhs), wanted)


def _ring(mesh, *manual):
    return jax.shard_map(
        lambda lhs, rhs: neuronjax.allgather_compute_matmul(lhs, rhs, 3, 1),
        mesh=mesh,
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
        axis_names=set(manual or mesh.axis_names),
    )


def test_a_map_over_another_mesh_axis_has_gradients():
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 3), ("data", "tensor"), kinds, devices=jax.devices()[:6])
    lhs = jnp.arange(36.0).reshape(2, 6, 3)
    rhs = jnp.arange(18.0).reshape(3, 6)

    def grads(fun):
        def loss(lhs, rhs):
            return jnp.sum(jnp.sin(fun(lhs, rhs)))

        return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    mapped = jax.vmap(_ring(mesh), (0, None), spmd_axis_name="data")
    for got, wanted in zip(grads(mapped), grads(jnp.matmul), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_mapped_ring_takes_operands_that_are_alike_on_all_ranks():
    ones = jnp.ones((2, 3))
    calls = [
        lambda _: neuronjax.allgather_compute_matmul(ones, ones.T, 3, 1),
        lambda _: neuronjax.matmul_reduce_scatter(ones.reshape(3, 2), ones, 3, 1),
        lambda _: neuronjax.fine_grained_allgather(ones, 3),
    ]
    found = [jax.vmap(call, axis_name="tensor")(jnp.arange(3)) for call in calls]
    assert [x.shape for x in found] == [(3, 6, 2), (3, 1, 3), (3, 6, 3)]
    assert [set(np.ravel(x).tolist()) for x in found] == [{3.0}, {6.0}, {1.0}]


def test_tangents_alone_may_be_mapped():
    def push(tangent):
        gather = lambda x: neuronjax.fine_grained_allgather(x, 3)  # noqa: E731
        return jax.jvp(gather, (jnp.ones((2, 3)),), (tangent,))[1]

    tangents = jnp.arange(18.0).reshape(3, 2, 3)
    found = jax.vmap(push, axis_name="tensor")(tangents)
    np.testing.assert_array_equal(found, [tangents.reshape(6, 3)] * 3)


def test_columns_may_be_divided_further_over_an_explicit_axis():
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 3), ("data", "tensor"), kinds, devices=jax.devices()[:6])
    lhs, rhs = jnp.arange(24.0).reshape(6, 4), jnp.arange(24.0).reshape(4, 6)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((lhs, P("tensor")), (rhs, P(None, ("tensor", "data"))))
        ]
        got = jax.jit(_ring(mesh, "tensor"))(*placed)
    np.testing.assert_array_equal(jax.device_get(got), np.matmul(lhs, rhs))
