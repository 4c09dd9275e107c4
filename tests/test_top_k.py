"""The k largest of each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.sharding.mesh import make_mesh


def wanted_places(row, k):
    """By descending value, the lowest place first among equals."""
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:k]


@pytest.mark.parametrize(("shape", "k"), [((4, 200), 8), ((2, 3, 50), 9), ((1, 5), 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_order", [True, False])
def test_it_equals_a_stable_sort(shape, k, dtype, in_order):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, shape), dtype)  # ties
    values, places = jax.jit(lambda x: neuronjax.topk(x, k, in_order))(x)
    assert (values.dtype, places.dtype) == (dtype, "int32")
    for row, got in zip(x.reshape(-1, shape[-1]), places.reshape(-1, k), strict=True):
        assert got.tolist() == wanted_places(row, k)
    np.testing.assert_array_equal(values, jnp.take_along_axis(x, places, -1))


def test_ties_go_to_the_lowest_index():
    """R-34: plain, under jit, vmap and a split of the rows."""
    x = jnp.tile(jnp.array([1.0, 3, 3, 2, 3, -0.0, 0.0]), (4, 1))
    run = lambda x: neuronjax.topk(x, 2)[1]  # noqa: E731
    split = jax.shard_map(
        run, mesh=make_mesh(data=4), in_specs=P("data"), out_specs=P("data")
    )
    mapped = jax.vmap(lambda row: run(row[None])[0])
    for f in (run, jax.jit(run), split, jax.jit(mapped)):
        assert f(x).tolist() == [[1, 2]] * 4
    assert neuronjax.topk(x[:, 5:], 2)[1].tolist() == [[0, 1]] * 4


def test_infinities_are_values_and_a_nan_ranks_first():
    x = jnp.array([[-jnp.inf, 1.0, jnp.nan, -jnp.inf, jnp.inf]])
    for nan in (x, -x.at[0, 4].set(-jnp.inf).at[0, ::3].set(jnp.inf).at[0, 1].set(-1)):
        values, places = neuronjax.topk(nan, 5)
        assert places.tolist() == [[2, 4, 1, 0, 3]]
        np.testing.assert_array_equal(values[0, 3:], [-np.inf, -np.inf])


def test_gradients_flow_to_the_chosen():
    """R-45: places are integers, and have none."""
    x = jnp.array([[3.0, 1.0, 2.0]])
    grad = jax.grad(lambda x: (neuronjax.topk(x, 2)[0] * jnp.array([5.0, 7.0])).sum())
    assert grad(x).tolist() == [[5, 0, 7]]
    run = lambda x: jnp.sin(neuronjax.topk(x, 2)[0])  # noqa: E731
    check_grads(run, (x,), 2, modes=["rev", "fwd"], rtol=1e-2, atol=1e-2)
    tied = jax.grad(lambda x: neuronjax.topk(x, 1)[0].sum())(jnp.zeros((1, 2)))
    assert tied.tolist() == [[1, 0]]


def test_indices_may_be_unsigned():
    _, places = neuronjax.topk(
        jnp.array([[1.0, 2.0]]), np.int64(1), index_dtype="uint32"
    )
    assert places.dtype == "uint32"


def test_the_chip_s_limits_are_reported():
    for width in (16000, 151936):
        rows = jax.ShapeDtypeStruct((8, width), "float32")
        report = neuronjax.can("topk", rows, 256)
        assert bool(report) and report.on_chip
    wide = jax.ShapeDtypeStruct((1, 128 * 16384 + 1), "float32")
    assert not neuronjax.can("topk", wide, 8).on_chip


def test_indices_that_their_dtype_cannot_hold_are_refused():
    row = jnp.arange(300.0)[None]
    with pytest.raises(ValueError, match="index_dtype must hold the largest index"):
        neuronjax.topk(row, 3, index_dtype="int8")
    _, places = neuronjax.topk(row[:, :128], 2, index_dtype="int8")
    assert places.tolist() == [[127, 126]]
