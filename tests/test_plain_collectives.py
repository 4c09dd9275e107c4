"""Sums, exchanges and the batch shard of queries, against NumPy on stacked ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import sharding
from tests.adapters.collectives import AXIS, on_ranks
from tests.hlo import collectives

GROUPS = {
    "one": None,
    "one, turned": [[3, 1, 0, 2, 5, 4, 7, 6]],
    "pairs": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mixed": [[5, 1, 0, 2], [3, 4, 7, 6]],
    "alone": [[i] for i in range(8)],
}


def drawn(*shape, dtype="float32"):
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.integers(-8, 9, shape), dtype)  # sums are exact


def summed(x, groups):
    """Every rank's sum over its group."""
    out = np.zeros(x.shape, np.float64)
    for group in groups or [range(len(x))]:
        out[list(group)] = np.asarray(x, np.float64)[list(group)].sum(0)
    return out


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (3, 5)), ("bfloat16", (7,)), ("int32", ())]
)
def test_all_reduce(groups, dtype, shape):
    x = drawn(8, *shape, dtype=dtype)
    got = on_ranks(lambda x: sharding.all_reduce(x, AXIS, groups), x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), summed(x, groups))


@pytest.mark.parametrize("groups", [None, GROUPS["mixed"]], ids=["one", "mixed"])
def test_gradient_of_all_reduce(groups):
    """A sum is its own transpose."""
    x, weight = drawn(8, 3, 5), drawn(8, 3, 5) / 4

    def loss(x):
        out = on_ranks(lambda x: sharding.all_reduce(x, AXIS, groups), x)
        return jnp.sum(out * weight)

    np.testing.assert_array_equal(jax.grad(loss)(x), summed(weight, groups))


def test_wire_of_all_reduce():
    def cost(groups):
        mesh = sharding.make_mesh(tensor=8)
        spec = jax.sharding.PartitionSpec(AXIS)
        split = jax.shard_map(
            lambda x: sharding.all_reduce(x, AXIS, groups) + x * 0,
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
        return collectives(split, drawn(8, 4))

    assert cost(None) == {"all-reduce": 1}
    assert cost(GROUPS["mixed"]) == {"reduce-scatter": 1, "all-gather": 1}
    assert cost(GROUPS["alone"]) == {}


def test_a_sum_over_the_whole_axis_is_typed_alike():
    mesh, spec = sharding.make_mesh(tensor=4), jax.sharding.PartitionSpec
    split = jax.shard_map(
        lambda x: sharding.all_reduce(x, AXIS),
        mesh=mesh,
        in_specs=spec(AXIS),
        out_specs=spec(),
    )
    x = drawn(4, 3)
    np.testing.assert_array_equal(split(x)[0], np.asarray(x).sum(0))


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_all_to_all(ranks, dtype):
    x = drawn(ranks, 2 * ranks, 3, dtype=dtype)
    got = on_ranks(lambda x: sharding.all_to_all(x, AXIS), x)
    chunks = np.asarray(x, np.float64).reshape(ranks, ranks, 2, 3)
    wanted = chunks.swapaxes(0, 1).reshape(x.shape)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), wanted)
    # Twice is where it began.
    twice = on_ranks(
        lambda x: sharding.all_to_all(sharding.all_to_all(x, AXIS), AXIS), x
    )
    np.testing.assert_array_equal(np.asarray(twice, np.float64), np.asarray(x, float))


def batch_shard(q, layout, size):
    """What the peer's tests do: gather the heads of the group, slice the batch."""
    outs = []
    for rank in range(len(q)):
        first = rank // size * size
        group = np.asarray(q)[first : first + size]
        share = q.shape[2] // size
        own = slice((rank - first) * share, (rank - first + 1) * share)
        if layout == "NBSd":
            outs.append(np.concatenate([x[:, own] for x in group]))
        else:
            outs.append(np.stack([x[:, own, 0] for x in group]))
    return np.stack(outs)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["NBSd", "dBnS"])
def test_batch_shard_of_queries(size, layout):
    q = drawn(8, 3, 8, *((2, 5) if layout == "NBSd" else (1, 5)))

    def run(q):
        return on_ranks(
            lambda x: sharding.attn_q_batch_shard(x, layout, gqa_group_size=size), q
        )

    wanted = batch_shard(q, layout, size)
    np.testing.assert_array_equal(run(q), wanted)
    weight = drawn(*wanted.shape)
    grad = jax.grad(lambda q: jnp.sum(run(q) * weight))(q)
    # A permutation of elements: the gradient puts each weight where its element was.
    places = np.arange(q.size).reshape(q.shape)
    placed = np.zeros(q.size)
    placed[batch_shard(places, layout, size).ravel()] = np.asarray(weight).ravel()
    np.testing.assert_array_equal(grad, placed.reshape(q.shape))
    if size > 1:
        assert collectives(run, q) == {"all-to-all": 1}


ON_A_MAPPED_AXIS = {
    "all_to_all": lambda x: sharding.all_to_all(x, AXIS),
    "queries of pairs": lambda x: sharding.attn_q_batch_shard(
        x[None, :, :, None], gqa_group_size=2
    ),
    "sums of groups": lambda x: sharding.all_reduce(x, AXIS, [[3, 0], [2, 1]]),
    "columns of groups": lambda x: neuronjax.allgather_sb2sb(x, [[3, 0], [2, 1]], 2),
    "columns, turned": lambda x: neuronjax.allgather_sb2sb(x, [[1, 0, 3, 2]], 4),
}


@pytest.mark.parametrize("function", ON_A_MAPPED_AXIS.values(), ids=ON_A_MAPPED_AXIS)
def test_an_axis_of_vmap_is_like_one_of_a_mesh(function):
    def both(x):
        return on_ranks(function, x), jax.vmap(function, axis_name=AXIS)(x)

    x = drawn(4, 4, 3)
    on_mesh, mapped = both(x)
    np.testing.assert_array_equal(mapped, on_mesh)
    weight = drawn(*mapped.shape)
    grads = [jax.grad(lambda x, i=i: jnp.sum(both(x)[i] * weight))(x) for i in (0, 1)]
    np.testing.assert_array_equal(*grads)
    alike = jax.vmap(lambda _: function(x[1]), axis_name=AXIS)(jnp.arange(4))
    np.testing.assert_array_equal(alike, both(jnp.stack([x[1]] * 4))[0])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_exchanges_of_groups_can_be_mapped_on_a_mesh(wrap):
    shard = wrap(lambda q: sharding.attn_q_batch_shard(q, gqa_group_size=2))
    q = drawn(4, 3, 1, 4, 2, 1)  # ranks, what vmap maps, heads, batch
    got = on_ranks(jax.vmap(shard), q)
    for i in range(3):
        np.testing.assert_array_equal(got[:, i], batch_shard(q[:, i], "NBSd", 2))
    # A column of a Jacobian is the exchange of a basis vector, of all ranks at once.
    columns = on_ranks(jax.jacfwd(shard), q[:, 0])
    basis = np.eye(8).reshape(1, 4, 2, 1, 8)
    np.testing.assert_array_equal(
        columns.reshape(4, 2, 2, 2, 8),
        batch_shard(np.stack([basis] * 4), "NBSd", 2).reshape(4, 2, 2, 2, 8),
    )
