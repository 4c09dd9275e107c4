"""Linear layers over ranks: the whole product, its gradients, and what crosses."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from neuronjax import nn
from tests.hlo import collectives
from tests.nn_twins import draw

ROWS, WIDTH, INNER = 8, 6, 8


def mesh_of(ranks):
    devices = jax.devices()[:ranks]
    return jax.make_mesh((ranks,), ("tensor",), (AxisType.Auto,), devices=devices)


def block_of(**options):
    """Columns, then rows: a feed-forward block of two products."""
    rngs = nnx.Rngs(0)
    return (
        nn.ColumnParallel(WIDTH, INNER, **options, rngs=rngs),
        nn.RowParallel(INNER, WIDTH, **options, rngs=rngs),
    )


def over(mesh, layers, ndim=2):
    """The block inside `shard_map`, its rows divided: `call(states, x)`."""
    graphs, states = zip(*map(nnx.split, layers), strict=True)
    rows = P(*(None,) * (ndim - 2), "tensor")

    def call(states, x):
        up, down = (nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
        return down(jnp.tanh(up(x)))

    specs = tuple(map(nnx.get_partition_spec, states))
    options = dict(in_specs=(specs, rows), out_specs=rows)
    return states, jax.jit(jax.shard_map(call, mesh=mesh, **options))


def plain(states, x):
    up, down = (nnx.to_pure_dict(s)["kernel"] for s in states)
    return jnp.tanh(x @ up) @ down


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_over_ranks_is_the_block(ranks, bidirectional):
    states, call = over(mesh_of(ranks), block_of(bidirectional=bidirectional))
    x = draw(ROWS, WIDTH)
    np.testing.assert_allclose(call(states, x), plain(states, x), rtol=1e-5, atol=1e-5)
    loss = lambda f: lambda *args: jnp.sin(f(*args)).sum()  # noqa: E731
    got = jax.jit(jax.grad(loss(call), (0, 1)))(states, x)
    wanted = jax.grad(loss(plain), (0, 1))(states, x)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_only_permutes_cross():
    states, call = over(mesh_of(4), block_of())
    counts = collectives(call, states, draw(ROWS, WIDTH))
    assert counts.keys() == {"collective-permute"}
    assert counts["collective-permute"] % (4 - 1) == 0


def test_leading_axes_are_mapped_over():
    states, call = over(mesh_of(2), block_of(), ndim=3)
    x = draw(3, ROWS, WIDTH)
    np.testing.assert_allclose(call(states, x), plain(states, x), rtol=1e-5, atol=1e-5)


def test_an_axis_has_several_rings():
    """Two rings of two ranks: each has the whole weight and a batch of its own."""
    layers = block_of(num_groups=2)
    graphs, states = zip(*map(nnx.split, layers), strict=True)
    kernels = [nnx.to_pure_dict(s)["kernel"] for s in states]
    x = draw(2, ROWS, WIDTH)

    def call(up, down, x):
        kernels = zip(graphs, states, (up, down), strict=True)
        columns, rows = (  # the kernel is all that a state holds
            nnx.merge(graph, jax.tree.map(lambda _, own=own: own, state))
            for graph, state, own in kernels
        )
        return rows(jnp.tanh(columns(x)))

    twice = jnp.tile(kernels[0], (1, 2)), jnp.tile(kernels[1], (2, 1))
    specs = P(None, "tensor"), P("tensor", None), P("tensor")
    run = jax.shard_map(call, mesh=mesh_of(4), in_specs=specs, out_specs=P("tensor"))
    got = jax.jit(run)(*twice, x.reshape(-1, WIDTH)).reshape(x.shape)
    np.testing.assert_allclose(got, plain(states, x), rtol=1e-5, atol=1e-5)


def test_outside_of_shard_map_one_rank_has_all():
    layers, x = block_of(bidirectional=True, lnc_axis="lnc"), draw(ROWS, WIDTH)
    states = [nnx.split(layer)[1] for layer in layers]
    got = layers[1](jnp.tanh(layers[0](x)))
    np.testing.assert_allclose(got, plain(states, x), rtol=1e-5, atol=1e-5)
