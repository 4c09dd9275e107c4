"""The convolution over all channels, against its equation in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

import neuronjax
from neuronjax import emit
from neuronjax.kernels.conv import products
from neuronjax.kernels.conv.window import Window
from tests import conv_equations as equations
from tests.macro_case import error

FORMS = ("fast", "stacked")
# Channels of every stacking, tiles off 128, taps up to 100.
SHAPES = {
    "1 tap": ((1, 5, 9), (1, 5, 9)),
    "7 taps of 16 channels": ((2, 16, 20), (7, 16, 5)),
    "33 channels": ((1, 33, 12), (5, 33, 3)),
    "65 channels": ((1, 65, 6), (3, 65, 2)),
    "160 channels to 130": ((1, 160, 5), (3, 160, 130)),
    "100 taps": ((1, 2, 130), (100, 2, 3)),
}


def drawn(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(s), dtype) for s in shapes]


def both_forms(*arrays, **options):
    """The result of each form, compiled."""
    for form in FORMS:
        call = functools.partial(emit.conv1d_kernel, form=form, **options)
        yield form, jax.jit(call)(*arrays)


@pytest.mark.parametrize(
    ("shapes", "act"),
    list(zip(SHAPES.values(), [*equations.ACTIVATIONS, None], strict=True)),
    ids=SHAPES,
)
def test_both_forms_are_the_equation(shapes, act):
    """Swish is `x * sigmoid(1.702 x)`, as everywhere in the library."""
    x, w, bias = drawn(*shapes, shapes[1][-1:])
    wanted = equations.conv1d(x, w, bias, padding=(1, 2), act=act)
    for form, got in both_forms(x, w, bias, padding=(1, 2), activation_fn=act):
        assert got.dtype == jnp.float32
        assert error(got, wanted) < 2e-6, form


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3, 10])
def test_gradients_over_stride_dilation_and_padding(form, stride, dilation):
    """R-40."""
    x, w, bias = drawn((2, 3, 13), (3, 3, 4), (4,))
    for padding in ((0, 0), (1, 3), (4, 6)) if form == "fast" else ((1, 3),):
        moves = dict(stride=stride, padding=padding, dilation=dilation)
        call = functools.partial(emit.conv1d_kernel, form=form, **moves)

        def pulled(x, w, bias, call=call):
            out, pull = jax.vjp(call, x, w, bias)
            return out, pull(jnp.cos(out))

        out, grads = jax.jit(pulled)(x, w, bias)
        sums = equations.conv1d(x, w, bias, **moves)
        wanted = equations.conv1d_grads(np.cos(sums), x, w, **moves)
        assert error(out, sums) < 1e-6
        for got, exact in zip(grads, wanted, strict=True):
            assert got.dtype == jnp.float32 and got.shape == exact.shape
            assert error(got, exact) < 2e-6, moves


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "moves",
    [
        dict(stride=1, padding=(2, 2)),
        dict(stride=2, padding=(0, 3), dilation=3),
        dict(stride=10, padding=(4, 6), dilation=2),
        dict(stride=3, padding=(9, 0)),
    ],
    ids=str,
)
def test_gradients_by_products_of_a_sample(moves, batch, monkeypatch):
    """R-40: the form of large convolutions, also where taps read padding alone."""
    monkeypatch.setattr(products, "COLUMNS", 1)
    monkeypatch.setattr(products, "RESULTS", 1)
    x, w = drawn((batch, 3, 13), (3, 3, 4))
    assert products.by_products(jnp.asarray(x), jnp.asarray(w), Window(**moves))

    @jax.jit
    def pulled(x, w):
        out, pull = jax.vjp(lambda x, w: neuronjax.conv1d(x, w, **moves), x, w)
        return out, *pull(jnp.cos(out))

    sums = equations.conv1d(x, w, **moves)
    wanted = sums, *equations.conv1d_grads(np.cos(sums), x, w, **moves)[:2]
    for got, exact in zip(pulled(x, w), wanted, strict=True):
        assert got.dtype == jnp.float32 and error(got, exact) < 2e-6
    mapped = jax.vmap(lambda x: pulled(x, w))(jnp.stack([x, 2 * x]))
    alone = [jnp.stack(g) for g in zip(pulled(x, w), pulled(2 * x, w), strict=True)]
    for got, one in zip(mapped, alone, strict=True):
        assert error(got, one) < 2e-6


def test_products_of_a_sample_have_second_derivatives(monkeypatch):
    monkeypatch.setattr(products, "COLUMNS", 1)
    monkeypatch.setattr(products, "RESULTS", 1)

    def call(*arrays):
        out = neuronjax.conv1d(*arrays, padding=(1, 2), activation_fn="SiLU")
        return jnp.sum(jnp.sin(out))

    with jax.enable_x64(True):
        arrays = drawn((2, 2, 5), (2, 2, 3), dtype="float64")
        check_grads(jax.jit(call), arrays, 2, modes=("rev",), eps=1e-4)


@pytest.mark.parametrize(
    ("x", "w", "by_products"),
    [
        ((2, 8, 300), (3, 8, 64), True),
        ((2, 8, 300), (3, 8, 63), False),
        ((2, 8, 200), (3, 8, 64), False),
        ((1, 64, 4096), (100, 64, 64), False),
    ],
)
def test_products_are_taken_where_they_are_faster_and_fit(x, w, by_products):
    assert products.by_products(jnp.zeros(x), jnp.zeros(w), Window()) == by_products


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("moves", "wanted"),
    [
        (
            (2, (0, 0), 1),
            ([321, 543], [1, 10, 101, 10, 100, 0], [4, 6, 8]),
        ),
        (
            (2, (1, 1), 2),
            ([420, 642], [0, 11, 0, 110, 0, 100], [2, 6, 10]),
        ),
        (
            (3, (0, 1), 1),
            ([321, 654], [1, 10, 100, 1, 10, 100], [5, 7, 9]),
        ),
    ],
)
def test_stride_and_dilation_in_the_gradients(moves, wanted, form):
    """R-40: the numbers of the requirement, none of them rounded."""
    x = jnp.arange(1.0, 7.0).reshape(1, 1, 6)
    w = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    stride, padding, dilation = moves

    def call(x, w):
        return emit.conv1d_kernel(
            x, w, stride=stride, padding=padding, dilation=dilation, form=form
        )

    out, pull = jax.vjp(call, x, w)
    got = (out, *pull(jnp.ones_like(out)))
    assert [part.ravel().tolist() for part in got] == list(wanted)


@pytest.mark.parametrize(("form", "act"), [("fast", "GELU"), ("stacked", None)])
def test_derivatives_of_both_orders(form, act):
    """Gradient, gradient of the gradient and their numeric counterparts, in float64."""
    with jax.enable_x64(True):
        arrays = drawn((1, 2, 5), (2, 2, 3), (3,), dtype="float64")

        def call(*arrays):
            out = emit.conv1d_kernel(
                *arrays, stride=2, padding=(1, 2), activation_fn=act, form=form
            )
            return jnp.sum(
                jnp.sin(out) * jnp.cos(jnp.arange(out.size)).reshape(out.shape)
            )

        check_grads(jax.jit(call), arrays, 2, modes=("fwd", "rev"), eps=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_narrow_sums_are_wide_and_rounded_once(dtype, form):
    """300 ones and a bias: a running bfloat16 sum stops at 256, and 300.75 is 300."""
    x, w = np.ones((1, 100, 3), dtype), np.ones((3, 100, 2), dtype)
    bias = np.array([0.75, -300], dtype)
    got = emit.conv1d_kernel(x, w, bias, form=form)
    assert got.dtype == dtype
    wanted = np.array([300.75, 0.0]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got)[0, :, 0], wanted)


@pytest.mark.parametrize("form", FORMS)
def test_narrow_gradients_err_by_their_rounding(form):
    x, w, bias = drawn((2, 5, 9), (3, 5, 4), (4,), dtype="bfloat16")
    moves = dict(stride=2, padding=(2, 1))

    def call(*arrays):
        return emit.conv1d_kernel(*arrays, form=form, **moves)

    out, pull = jax.vjp(call, x, w, bias)
    seed = np.cos(np.asarray(out, np.float64)).astype("bfloat16")
    wanted = equations.conv1d_grads(np.asarray(seed, np.float64), x, w, **moves)
    for got, exact in zip(pull(jnp.asarray(seed)), wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.asarray(got), exact.astype(np.float32).astype("bfloat16")
        )


def test_positions_that_no_window_reads_are_not_read():
    """Nothing behind the last window counts, and a NaN stays in the windows over it."""
    x, w = drawn((1, 2, 9), (2, 2, 3))
    x[0, 0, 8], x[0, 1, 2] = np.nan, np.inf
    for form, got in both_forms(x, w, stride=3):
        wanted = np.isfinite(np.asarray(got))
        np.testing.assert_array_equal(wanted, np.ones((1, 3, 3), bool), form)
    for _, got in both_forms(x, w, stride=2):
        finite = np.isfinite(np.asarray(got)).all((0, 1))
        np.testing.assert_array_equal(finite, [True, False, True, True])


def test_nothing_of_an_empty_batch():
    x, w, bias = drawn((0, 2, 5), (3, 2, 4), (4,))
    for form, got in both_forms(x, w, bias, activation_fn="SiLU"):
        assert got.shape == (0, 4, 3)

        def total(w, form=form):
            return jnp.sum(emit.conv1d_kernel(jnp.asarray(x), w, form=form))

        np.testing.assert_array_equal(
            jax.grad(total)(jnp.asarray(w)), np.zeros(w.shape)
        )


def test_shifted_input_gives_a_shifted_result():
    """A property: the convolution does not know where it is."""
    x, w = drawn((1, 3, 20), (4, 3, 2))
    whole = np.asarray(neuronjax.conv1d(x, w, activation_fn="GELU"))
    later = np.asarray(neuronjax.conv1d(x[..., 5:], w, activation_fn="GELU"))
    np.testing.assert_allclose(whole[..., 5:], later, 1e-5, 1e-6)


def test_options_take_members_names_and_numpy_integers():
    x, w = drawn((1, 2, 9), (3, 2, 4))
    wanted = neuronjax.conv1d(x, w, None, 2, (1, 2), 2, "Swish")
    got = neuronjax.conv1d(
        x,
        w,
        stride=np.int64(2),
        padding=[np.int32(1), 2],
        dilation=2,
        activation_fn=neuronjax.ActFnType.Swish,
        lnc_shard=True,
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "options",
    [
        dict(stride=True),
        dict(dilation=0),
        dict(stride=1.0),
        dict(padding=(1,)),
        dict(padding=2),
        dict(padding=(1.0, 0)),
        dict(activation_fn=3),
        dict(lnc_shard=1),
    ],
)
def test_settings_of_another_kind_are_refused(options):
    x, w = drawn((1, 2, 9), (3, 2, 4))
    (name,) = options
    with pytest.raises(ValueError, match=f"conv1d: .*{name}"):
        neuronjax.conv1d(x, w, **options)


def test_a_window_that_does_not_fit_names_its_sizes():
    x, w = drawn((1, 2, 6), (3, 2, 4))
    message = "window of dilation .* = 9 positions .* got L = 6 with padding"
    with pytest.raises(ValueError, match=message):
        neuronjax.conv1d(x, w, padding=(1, 1), dilation=4)
    assert neuronjax.conv1d(x, w, padding=(1, 2), dilation=4).shape == (1, 4, 1)


def test_the_backward_is_a_macro_and_the_activation_is_not_computed_twice():
    x, w = drawn((1, 2, 9), (3, 2, 4))

    def total(x, w):
        return jnp.sum(neuronjax.conv1d(x, w, activation_fn="GELU"))

    assert neuronjax.trace(total, x, w).names == ("Conv1D",)
    assert neuronjax.trace(jax.grad(total), x, w).names == ("Conv1D", "Conv1DBwd")


def test_unbatched_filters_get_an_unbatched_gradient():
    """R-42: filters that no axis maps keep their shape, and are not copied."""
    x, w = map(jnp.asarray, drawn((3, 2, 2, 7), (3, 2, 4)))

    def total(w):
        each = jax.vmap(neuronjax.conv1d, (0, None))(x, w)
        return jnp.sum(jnp.sin(each))

    wanted = sum(
        jax.grad(lambda w, one=one: jnp.sum(jnp.sin(neuronjax.conv1d(one, w))))(w)
        for one in x
    )
    got = jax.grad(total)(w)
    assert got.shape == w.shape and error(got, wanted) < 1e-5
    rows = jax.jit(jax.jacrev(lambda w: neuronjax.conv1d(x[0], w)[0, 0]))(w)
    assert rows.shape == (5, *w.shape)


def test_batch_and_length_may_be_symbolic():
    """R-49."""
    shape = (*export.symbolic_shape("b, n"),)
    x = jax.ShapeDtypeStruct((shape[0], 2, shape[1]), jnp.float32)
    w = drawn((3, 2, 4))[0]
    call = jax.jit(lambda x: neuronjax.conv1d(x, w, stride=2, padding=(1, 1)))
    held = export.export(call)(x)
    for batch, length in ((1, 7), (3, 10)):
        (given,) = drawn((batch, 2, length), seed=length)
        np.testing.assert_allclose(held.call(given), call(given), 1e-5, 1e-6)


def test_scalar_options_do_not_change_the_dtype():
    """R-48, R-47: the result's type is that of `x_in` under every transformation."""
    x, w, bias = drawn((1, 2, 9), (3, 2, 4), (4,), dtype="bfloat16")
    call = functools.partial(neuronjax.conv1d, activation_fn="SiLU", stride=np.int64(2))
    shape = jax.eval_shape(call, x, w, bias)
    assert (shape.shape, shape.dtype) == ((1, 4, 4), jnp.bfloat16)
    out, pull = jax.vjp(call, x, w, bias)
    assert out.dtype == jax.jit(call)(x, w, bias).dtype == jnp.bfloat16
    assert {grad.dtype for grad in pull(out)} == {jnp.dtype(jnp.bfloat16)}
