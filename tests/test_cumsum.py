"""Running sums: the equation in float64, the gradient, the carry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.sharding.mesh import make_mesh


def normal(shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 37), (2, 4, 130), (2, 1, 3, 257)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3)]
)
def test_it_equals_the_equation(shape, dtype, tolerance):
    x = normal(shape, dtype)
    wide = np.asarray(x, np.float64)
    wanted = np.zeros(shape)
    for i in range(shape[-1]):
        wanted[..., i] = wide[..., : i + 1].sum(-1)
    got = jax.jit(neuronjax.cumsum)(x)
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, np.float64) - wanted).max()
    assert error <= tolerance * max(1, np.abs(wanted).max())
    np.testing.assert_array_equal(neuronjax.cumsum(x, axis=x.ndim - 1), got)


def test_a_long_bfloat16_row_keeps_its_carry():
    """Ones: a bfloat16 carry stops at 256."""
    got = neuronjax.cumsum(jnp.ones((1, 8192), jnp.bfloat16))
    assert got[0, -1] == 8192
    exact = np.arange(1, 8193).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got[0], exact)


def test_the_gradient_is_the_reversed_running_sum():
    x, c = normal((2, 5)), normal((2, 5)) + 1
    grad = jax.grad(lambda x: (neuronjax.cumsum(x) * c).sum())(x)
    wanted = np.asarray(c, np.float64)[:, ::-1].cumsum(-1)[:, ::-1]
    np.testing.assert_allclose(grad, wanted, rtol=1e-6, atol=1e-6)
    run = lambda x: jnp.sin(neuronjax.cumsum(x))  # noqa: E731
    check_grads(jax.jit(run), (x,), order=2, modes=["rev", "fwd"], rtol=1e-2, atol=1e-2)
    program = neuronjax.trace(jax.grad(lambda x: run(x).sum()), x)
    assert (program.count("CumSum"), program.count("CumSumBwd")) == (1, 1)


def test_a_nan_reaches_only_what_follows():
    got = neuronjax.cumsum(jnp.array([1.0, 2.0, jnp.nan, 4.0]))
    np.testing.assert_array_equal(got, [1, 3, np.nan, np.nan])


def test_a_mapped_call_equals_a_loop():
    """R-42."""
    x = normal((3, 2, 6))
    for axis in (0, 1):
        got = jax.vmap(neuronjax.cumsum, axis, axis)(x)
        rows = [neuronjax.cumsum(r) for r in jnp.moveaxis(x, axis, 0)]
        np.testing.assert_allclose(got, jnp.stack(rows, axis), rtol=1e-6, atol=1e-6)
    twice = jax.vmap(jax.vmap(neuronjax.cumsum))
    np.testing.assert_allclose(twice(x), neuronjax.cumsum(x), rtol=1e-6, atol=1e-6)
    assert neuronjax.trace(twice, x).count("CumSum") == 1


def test_rows_may_be_split_over_a_mesh():
    x = normal((4, 6))
    split = jax.shard_map(
        neuronjax.cumsum,
        mesh=make_mesh(data=4),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    np.testing.assert_allclose(split(x), neuronjax.cumsum(x), rtol=1e-6)


def test_symbolic_rows_export_with_the_gradient():
    """R-49."""
    (n,) = export.symbolic_shape("n")
    run = jax.jit(jax.grad(lambda x: jnp.sin(neuronjax.cumsum(x)).sum()))
    saved = export.export(run, platforms=["cpu", "tpu", "cuda"])(
        jax.ShapeDtypeStruct((n, 6), "float32")
    )
    x = normal((3, 6))
    got = export.deserialize(saved.serialize()).call(x)
    np.testing.assert_allclose(got, run(x), rtol=1e-5, atol=1e-6)


def test_another_axis_is_refused():
    with pytest.raises(
        ValueError, match="axis must be the last one, -1 or 2 - 1, got 0"
    ):
        neuronjax.cumsum(normal((2, 3)), axis=0)
    with pytest.raises(ValueError, match="axis must be the last one"):
        neuronjax.cumsum(normal((2, 3)), axis=-2)
    with pytest.raises(ValueError, match="axis must be the last one"):
        neuronjax.cumsum(normal((2, 3)), axis=-1.0)
