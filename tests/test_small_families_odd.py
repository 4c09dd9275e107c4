"""Probes, reductions and linear layers: odd settings, shapes, meshes and values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.primitives.options import odd_dtype

X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 3)), jnp.float32)
W = jnp.asarray(np.random.default_rng(2).standard_normal((3, 5)), jnp.float32)
DOUBLE = jnp.ones((2, 2, 3))


@pytest.mark.parametrize("k", [64, 70, 128])
@pytest.mark.parametrize("flat", [False, True])
def test_gradients_of_tiles_with_any_number_of_double_rows(k, flat):
    rng = np.random.default_rng(k)
    s, x = (jnp.asarray(rng.standard_normal((k, 2, n)), jnp.float32) for n in (3, 2))
    given, shape = (s, None) if not flat else (s.swapaxes(1, 2).reshape(k, 6), (3, 2))

    def tiled(s, x):
        s, x = (MemrefTile.from_tensor(y, 0) for y in (s, x))
        out = emit.packed_cayman_pe_tp_kernel(s, x, lhs_free_and_double_row_shape=shape)
        return jnp.sum(jnp.sin(out.to_tensor()))

    ds, dx = jax.grad(tiled, (0, 1))(given, x)
    s64, x64 = (np.asarray(y, np.float64) for y in (s, x))
    slope = np.cos(np.einsum("krm,krn->mn", s64, x64))
    wanted = np.einsum("krn,mn->krm", x64, slope)
    wanted = wanted.swapaxes(1, 2).reshape(k, 6) if flat else wanted
    np.testing.assert_allclose(ds, wanted, rtol=1e-3, atol=1e-4)
    wanted = np.einsum("krm,mn->krn", s64, slope)
    np.testing.assert_allclose(dx, wanted, rtol=1e-3, atol=1e-4)


def test_a_merge_that_does_not_fit_psum_is_refused():
    half = MemrefTile.from_tensor(jnp.zeros((256, 2048)), 0, buffer="psum")
    with pytest.raises(ValueError, match="matmult_tiles: tiles must fit PSUM of gen3"):
        neuronjax.combine_trn2_double_row_matmult_tiles([half, half])


@pytest.mark.parametrize(
    ("sizes", "settings", "words"),
    [
        ((2, 3, np.int64(300)), {}, "m must be at most 128"),
        ((np.int64(1), 3, 3), dict(tile_position=((0, 0), (32, 0))), "2 bands to 1 "),
    ],
)
def test_a_plan_checks_integers_of_numpy(sizes, settings, words):
    with pytest.raises(ValueError, match=f"probe_plan: .*{words}"):
        neuronjax.probe_plan("row", *sizes, **settings)


WORDS = np.array(["add", "rms"])
PACKED = functools.partial(emit.packed_cayman_pe_tp_kernel, DOUBLE, DOUBLE)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PACKED(perf_mode=WORDS), "perf_mode must be .* got an array"),
        (lambda: PACKED(target=WORDS), "target must be .* got ndarray"),
        (
            lambda: PACKED(lhs_free_and_double_row_shape=(2, 2)),
            r"must be \(m, 2\), .* got \(2, 2\) for .*",
        ),
        (lambda: neuronjax.reduce(X, WORDS), "op must be one of .* got 'ndarray'"),
        (lambda: neuronjax.reduce(X, "add", norm=WORDS), "norm must be .* 'ndarray'"),
        (lambda: neuronjax.reduce(X, "norm", norm="l2", eps="1"), "eps of type str"),
        (lambda: neuronjax.rms_norm(X, None, eps=True), "eps of type bool"),
        (lambda: neuronjax.fused_linear([[1.0]], W), "arrays, got x of type list"),
        (lambda: neuronjax.fused_linear(X, None), "arrays, got w of type NoneType"),
        (lambda: neuronjax.fused_linear(X, W, w_scale=True), "w_scale of type bool"),
        (lambda: neuronjax.fused_linear(X, W, bias=[0.0] * 5), "bias of type list"),
    ],
)
def test_settings_and_operands_of_odd_types_are_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_what_has_no_dtype_is_no_float():
    assert odd_dtype(dict(x=X, w=None)) == ""
    assert odd_dtype(dict(x=X, w=[1.0])) == "w of type list"


def test_a_norm_of_nothing_is_told_by_can_as_by_the_call():
    empty = jnp.zeros((3, 0))
    assert not neuronjax.can("reduce", empty, "norm", 1, norm="rms")
    with pytest.raises(ValueError, match="^reduce: norm with norm rms has no value"):
        neuronjax.reduce(empty, "norm", 1, norm="rms")
    assert neuronjax.reduce(empty, "add", 1).shape == (3,)


def test_batches_of_many_axes_go_backward():
    x = X[0].reshape(*[1] * 24, 4, 3)
    got = jax.grad(lambda w: neuronjax.fused_linear(x, w).sum())(W)
    np.testing.assert_allclose(got, np.outer(X[0].sum(0), np.ones(5)), rtol=1e-5)


@pytest.mark.parametrize(
    ("op", "nan"),
    [
        ("add", [False, False, False]),
        ("mul", [False, True, True]),
        ("sumsq", [True, False, False]),
        ("max", [True, True, True]),
        ("absmax", [True, True, True]),
    ],
)
def test_which_gradients_a_nan_reaches_is_as_the_docstring_says(op, nan):
    x = jnp.array([jnp.nan, 1.0, 2.0])
    assert np.isnan(neuronjax.reduce(x, op))
    assert np.isnan(jax.grad(lambda x: neuronjax.reduce(x, op))(x)).tolist() == nan


def _scaled(x, scale):
    return neuronjax.reduce(x, "absmax", 2, scale=scale)


def _gained(x, gain):
    return neuronjax.reduce(x, "norm", (0, 1), norm="l2", scale=gain)


def _multiplied(x, scale):
    return neuronjax.reduce(x, "mul", (0, 1), norm="rms", scale=scale)


def _added(x, residual):
    return neuronjax.fused_linear(x, W, residual=residual, activation_fn="SiLU")


@pytest.mark.parametrize(
    ("fun", "shape"),
    [
        (_scaled, (2, 4)),
        (_gained, (2, 4)),
        (_multiplied, (3,)),
        (_added, (2, 4, 5)),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_operands_that_an_explicit_mesh_does_not_divide_have_whole_gradients(
    fun, shape, axis
):
    whole = jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(fun(*a))), (0, 1)))
    wanted = gradient(X, whole)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = P(*[None] * axis, "data")
        x = jax.device_put(X, NamedSharding(mesh, spec))
        got = gradient(x, jax.device_put(whole, NamedSharding(mesh, P())))
        assert not any(jax.typeof(got[1]).sharding.spec)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
