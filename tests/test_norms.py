"""RMSNorm and LayerNorm, against float64 equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax.kernels.reduce.leaf import reduce_bwd

SHAPES = [(3, 5, 96), (2, 128), (7,)]
EPS = 1e-5


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _rms(x, scale, offset=0.0, count=None):
    """Zhang and Sennrich 2019, equation 4."""
    square = (x**2).sum(-1, keepdims=True) / (count or x.shape[-1])
    return x / np.sqrt(square + EPS) * (scale + offset)


def _layer(x, scale, bias):
    """Ba, Kiros and Hinton 2016, equation 4."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + EPS) * scale + bias


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2**-7), ("float16", 2e-3)]
)
def test_norms_follow_their_equations(shape, dtype, tolerance):
    x, scale, bias = (
        jnp.asarray(_draw(*s, seed=i), dtype)
        for i, s in enumerate([shape, shape[-1:], shape[-1:]])
    )
    wide = [np.asarray(t, np.float64) for t in (x, scale, bias)]
    pairs = [
        (neuronjax.rms_norm(x, scale, eps=EPS), _rms(*wide[:2])),
        (neuronjax.rms_norm(x, None, eps=EPS), _rms(wide[0], 1.0)),
        (neuronjax.layer_norm(x, scale, bias, eps=EPS), _layer(*wide)),
        (neuronjax.layer_norm(x, scale, eps=EPS), _layer(*wide[:2], 0.0)),
        (neuronjax.layer_norm(x, None, eps=EPS), _layer(wide[0], 1.0, 0.0)),
    ]
    for got, wanted in pairs:
        assert got.dtype == x.dtype and got.shape == x.shape
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_squares_are_not_summed_in_the_input_dtype():
    """R-19: 300**2 overflows float16."""
    x = jnp.full(4, 300, jnp.float16)
    got = neuronjax.rms_norm(x, jnp.ones(4, jnp.float16), eps=1e-6)
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(got, jnp.ones(4, jnp.float16))


def test_the_gain_has_an_offset():
    """R-20."""
    x, w = jnp.array([3.0, 4.0]), jnp.zeros(2)
    got = neuronjax.rms_norm(x, w, eps=0.0, offset=1.0)
    np.testing.assert_allclose(got, [0.848528, 1.131371], rtol=1e-6)
    np.testing.assert_array_equal(neuronjax.rms_norm(x, w, eps=0.0), [0.0, 0.0])


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
def test_both_cast_orders_are_there_and_differ(compile):
    """R-20: rounded before the gain, 1.131371 becomes 1.1328125."""
    x, w = jnp.array([3.0, 4.0], jnp.bfloat16), jnp.array([1.0, 3.0], jnp.bfloat16)
    norm = lambda before: compile(  # noqa: E731
        lambda x, w: neuronjax.rms_norm(x, w, eps=0.0, cast_before_scale=before)
    )(x, w)
    hat = (np.float32([3, 4]) / np.sqrt(np.float32(12.5))).astype(np.float32)
    once = jnp.asarray(hat * np.float32([1, 3]), jnp.bfloat16)
    twice = jnp.asarray(hat, jnp.bfloat16) * w
    assert (once != twice).any()
    np.testing.assert_array_equal(norm(False), once)
    np.testing.assert_array_equal(norm(True), twice)


def test_padding_columns_do_not_count_in_the_mean():
    x = np.pad(_draw(3, 6), ((0, 0), (0, 2)))
    scale = _draw(8, seed=1)
    got = neuronjax.rms_norm(*map(jnp.float32, (x, scale)), eps=EPS, hidden_actual=6)
    np.testing.assert_allclose(got, _rms(x, scale, count=6), rtol=1e-5, atol=1e-6)


NORMS = {
    "rms": lambda x, s, b: neuronjax.rms_norm(x, s, eps=EPS, offset=1.0),
    "rms of six": lambda x, s, b: neuronjax.rms_norm(x, s, eps=EPS, hidden_actual=6),
    "no gain": lambda x, s, b: neuronjax.rms_norm(x, None, eps=EPS),
    "layer": lambda x, s, b: neuronjax.layer_norm(x, s, b, eps=EPS),
    "layer, no offset": lambda x, s, b: neuronjax.layer_norm(x, s, eps=EPS),
}


@pytest.mark.parametrize("norm", NORMS)
def test_first_and_second_derivatives(norm):
    with jax.enable_x64(True):
        operands = tuple(
            jnp.asarray(_draw(*s, seed=i))
            for i, s in enumerate([(2, 3, 8), (8,), (8,)])
        )
        check_grads(jax.jit(NORMS[norm]), operands, 2, modes=["fwd", "rev"])


def test_the_statistics_have_derivatives_of_their_own():
    """A loss on rstd or mean alone: its cotangent counts in the backward."""
    from neuronjax.primitives.reduce import reduce_family

    with jax.enable_x64(True):
        x, s, b = (
            jnp.asarray(_draw(*t, seed=i)) for i, t in enumerate([(3, 8), (8,), (8,)])
        )
        config = dict(op="norm", norm="layer", eps=EPS)
        for which in (1, 2):

            def statistic(x, which=which):
                return reduce_family(x, s, b, name="NeuronReduceMacro", **config)[which]

            check_grads(jax.jit(statistic), (x,), 2)


def test_the_backward_macro_is_in_the_gradient():
    x, s = jnp.ones((2, 8)), jnp.ones(8)
    seen = neuronjax.trace(jax.grad(lambda x: neuronjax.rms_norm(x, s).sum()), x)
    assert seen.count("NeuronReduceMacro") == 1
    assert seen.count("NeuronReduceMacroBwd") == 1


@pytest.mark.parametrize("stat", [1, 2])
def test_a_poisoned_statistic_poisons_the_gradients_made_from_it(stat):
    """mean and rstd come from the forward: neither is computed again."""
    x, s, b, dy = (
        jnp.asarray(_draw(*t), "float32") for t in [(3, 8), (8,), (8,), (3, 8)]
    )
    config = dict(name="NeuronReduceMacroBwd", norm="layer", eps=EPS)
    outs = [dy, jnp.zeros((3, 1)), jnp.ones((3, 1))]
    outs[stat] = outs[stat] * jnp.nan
    dx, ds, db = reduce_bwd(x, s, b, *outs, dy, None, None, **config)
    assert jnp.isnan(dx).all() and jnp.isnan(ds).all() and jnp.isfinite(db).all()


def test_a_gain_keeps_its_dtype_in_the_gradient():
    """R-24: float32 gain with bfloat16 activations."""
    x, s = jnp.ones((2, 8), jnp.bfloat16), jnp.ones(8)
    loss = lambda x, s: neuronjax.rms_norm(x, s).astype(jnp.float32).sum()  # noqa: E731
    dx, ds = jax.grad(loss, (0, 1))(x, s)
    assert (dx.dtype, ds.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    "eps", [1e-6, np.float64(1e-6), np.float32(1e-6), 0, jnp.float32(1e-6)]
)
def test_a_scalar_of_any_kind_keeps_the_dtype(eps):
    """R-48."""
    x, s = jnp.ones((2, 8), jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            out, pull = jax.vjp(lambda x, s: neuronjax.rms_norm(x, s, eps=eps), x, s)
            assert {t.dtype for t in (out, *pull(out))} == {jnp.dtype(jnp.bfloat16)}


def test_each_row_has_length_sqrt_d_model():
    x = jnp.asarray(_draw(5, 96), "float32")
    rows = neuronjax.rms_norm(x, jnp.ones(96), eps=0.0)
    np.testing.assert_allclose(jnp.linalg.norm(rows, axis=-1), 96**0.5, rtol=1e-5)


def test_a_replicated_gain_and_sharded_rows():
    """R-43: the gain's gradient is the sum over devices."""
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    x, s = jnp.asarray(_draw(4, 3), "float32"), jnp.ones(3)
    split = jax.shard_map(
        lambda x, s: neuronjax.rms_norm(x, s),
        mesh=mesh,
        in_specs=(rows, whole),
        out_specs=rows,
    )
    got, wanted = (
        jax.grad(lambda s, f=f: f(x, s).sum())(s) for f in (split, neuronjax.rms_norm)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), -float("inf")])
def test_an_eps_that_has_no_root_is_refused(eps):
    x = jnp.ones((2, 8))
    for norm in (neuronjax.rms_norm, neuronjax.layer_norm):
        with pytest.raises(ValueError, match=f"{norm.__name__}: eps must be finite"):
            norm(x, jnp.ones(8), eps=eps)


def test_an_eps_of_none_is_refused():
    with pytest.raises(ValueError, match="got eps of type NoneType"):
        neuronjax.rms_norm(jnp.ones((2, 8)), None, eps=None)


def test_rows_whose_squares_overflow_are_zeros_as_stated():
    x = jnp.array([[1e18, -2e18], [1e30, -2e30]])
    wanted = np.array([1, -2]) / np.sqrt(2.5)
    got = neuronjax.rms_norm(x, None)
    np.testing.assert_allclose(got, [wanted, [0, 0]], rtol=1e-6)
    got = neuronjax.layer_norm(x, None, jnp.array([0.5, 2.0]))
    np.testing.assert_allclose(got, [[1.5, 1.0], [0.5, 2.0]], rtol=1e-6)
