"""The convolution of each channel alone, against its equation in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax import emit
from neuronjax.kernels.conv import depthwise as kernel
from tests import conv_equations as equations
from tests.macro_case import error

# `(batch, channels, width, taps, stride, padding)`: few taps and many, more of them
# than the loops' turns and not a multiple, results shorter than the filter, and
# results longer than what is written out.
CASES = [
    (1, 4, 40, 3, 1, (0, 0)),
    (2, 3, 65, 20, 2, (5, 3)),
    (1, 2, 30, 5, 16, (0, 0)),
    (1, 3, 210, 100, 1, (2, 7)),
    (2, 2, 200, 70, 2, (0, 4)),
    (2, 3, 210, 197, 2, (4, 1)),
    (1, 2, 60, 60, 1, (0, 0)),
    (1, 2, 40, 33, 3, (60, 40)),
    (1, 2, 300, 4, 1, (3, 0)),
]


def drawn(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(s), dtype) for s in shapes]


def call(x, w, stride=1, padding=(0, 0)):
    """The public function, with the pairs that it takes."""
    return neuronjax.depthwise_conv1d_implicit_gemm(
        x, w, ((0, 0), padding), (1, stride), feature_group_count=x.shape[1]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_and_gradients_are_the_equations(case):
    batch, channels, width, taps, stride, padding = case
    x, w = drawn((batch, channels, 1, width), (channels, 1, 1, taps))
    moves = dict(stride=stride, padding=padding)

    @jax.jit
    def pulled(x, w):
        out, pull = jax.vjp(functools.partial(call, **moves), x, w)
        return out, pull(jnp.cos(out))

    out, grads = pulled(x, w)
    exact = equations.depthwise(x, w, **moves)
    assert out.dtype == jnp.float32 and error(out, exact) < 2e-6
    wanted = equations.depthwise_grads(np.cos(exact), x, w, **moves)
    for got, gradient in zip(grads, wanted, strict=True):
        assert got.shape == gradient.shape and error(got, gradient) < 4e-6


def test_the_cases_take_every_way_through_the_kernel():
    """Both orders of the sums, each written out and in a loop with a rest."""
    ways = set()
    for _, _, width, taps, stride, padding in CASES:
        results = equations.length(width, taps, stride, padding)
        short = results < taps and results <= kernel.UNROLLED
        looped = taps > kernel.UNROLLED
        ways.add((short, looped, bool(taps % kernel.CHUNK)))
    assert {(False, False, True), (False, True, True), (True, True, True)} <= ways
    assert (False, True, False) not in ways  # 100, 70 and 33 leave a rest
    assert any(taps > 128 for *_, taps, _, _ in CASES)


def test_taps_that_read_padding_alone():
    """Windows that begin or end outside of the image, wider than it is."""
    for width, taps, padding in ((2, 3, (5, 0)), (2, 3, (0, 6)), (1, 5, (4, 4))):
        x, w = drawn((1, 2, 1, width), (2, 1, 1, taps))
        out, pull = jax.vjp(lambda x, w, p=padding: call(x, w, padding=p), x, w)
        exact = equations.depthwise(x, w, padding=padding)
        assert error(out, exact) < 1e-6
        wanted = equations.depthwise_grads(np.cos(exact), x, w, padding=padding)
        for got, gradient in zip(pull(jnp.cos(out)), wanted, strict=True):
            assert error(got, gradient) < 2e-6


def test_no_padded_copy_of_the_image_is_stored():
    """Each shifted copy is read in place, forward; the gradient stores one of them."""
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 64, 1, 4096), (64, 1, 1, 4))
    ]
    found = jax.jit(lambda x, w: call(x, w, padding=(3, 0))).lower(*shapes).compile()
    assert found.memory_analysis().temp_size_in_bytes < 64 * 4096


def test_filters_stay_with_their_channel():
    """R-41."""
    x = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]).reshape(1, 2, 1, 3)
    w = jnp.array([[1.0, 2.0], [1.0, -1.0]]).reshape(2, 1, 1, 2)
    got = call(x, w, padding=(1, 0))
    assert got[0, :, 0].tolist() == [[2, 5, 8], [-10, -10, -10]]


@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_a_grouped_convolution(stride):
    """R-41: value and gradient of lax with `feature_group_count = C`."""
    x, w = map(jnp.asarray, drawn((2, 4, 1, 11), (4, 1, 1, 3)))

    def grouped(x, w):
        return lax.conv_general_dilated(
            x, w, (1, stride), [(0, 0), (2, 1)], feature_group_count=4
        )

    def ours(x, w):
        return call(x, w, stride, (2, 1))

    results = []
    for f in (ours, grouped):
        out, pull = jax.vjp(f, x, w)
        results.append([out, *pull(jnp.cos(out))])
    for got, wanted in zip(*results, strict=True):
        assert error(got, wanted) < 1e-6


def total(x, w):
    """A scalar of the result whose second derivative is not zero."""
    out = call(x, w, 1, (1, 0))
    weight = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return jnp.sum(jnp.sin(out) * weight)


def test_derivatives_of_both_orders():
    with jax.enable_x64(True):
        arrays = drawn((1, 2, 1, 6), (2, 1, 1, 3), dtype="float64")
        check_grads(jax.jit(total), arrays, 2, modes=("fwd", "rev"), eps=1e-4)


@pytest.mark.parametrize("width", [6, 16])
def test_sums_in_loops_have_second_derivatives(width, monkeypatch):
    """5 taps: 3 results, each summed at once, and 13, whose taps a loop adds."""
    for name, size in dict(UNROLLED=3, CHUNK=2, LANES=4).items():
        monkeypatch.setattr(kernel, name, size)

    def twice(*arrays):
        first = jax.grad(total, (0, 1))
        turned = lambda *a: sum(jnp.vdot(jnp.cos(g), g) for g in first(*a))  # noqa: E731
        return jax.grad(turned, (0, 1))(*arrays)

    with jax.enable_x64(True):
        arrays = drawn((1, 1, 1, width), (1, 1, 1, 5), dtype="float64")
        got = jax.jit(twice)(*arrays)
        with neuronjax.plain():
            wanted = jax.jit(lambda *a: twice(*a))(*arrays)
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("width", "taps"), [(301, 20), (300, 300), (600, 300)])
def test_narrow_sums_are_wide_and_rounded_once(dtype, width, taps):
    x, w = np.ones((1, 2, 1, width), dtype), np.ones((2, 1, 1, taps), dtype)
    w[1] = 1.0078125  # a running bfloat16 sum of it stops at 256
    got = np.asarray(call(x, w), np.float64)
    exact = equations.depthwise(x, w)
    assert call(x, w).dtype == dtype
    rounded = exact.astype(np.float32).astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(got, rounded)


@pytest.mark.parametrize(("width", "taps", "stride"), [(9, 2, 3), (70, 50, 2)])
def test_positions_that_no_window_reads_are_not_read(width, taps, stride):
    """A NaN and an infinity reach the windows over them and no other result."""
    x, w = drawn((1, 1, 1, width), (1, 1, 1, taps))
    x[..., -1], x[..., taps] = np.nan, np.inf
    count = equations.length(width, taps, stride, (0, 0))
    over = np.array(
        [
            {taps, width - 1} & set(range(q * stride, q * stride + taps))
            for q in range(count)
        ]
    )
    got = np.isfinite(np.asarray(call(x, w)))[0, 0, 0, ::stride]
    np.testing.assert_array_equal(got, [not reads for reads in over])


def test_the_gradient_is_zero_where_no_window_reads():
    x, w = map(jnp.asarray, drawn((1, 2, 1, 12), (2, 1, 1, 3)))
    grad = jax.grad(lambda x: jnp.sum(call(x, w, 4)))(x)
    np.testing.assert_array_equal(
        np.flatnonzero(grad[0, 0, 0]), [0, 1, 2, 4, 5, 6, 8, 9, 10]
    )


def test_a_channel_alone_needs_no_group_count():
    x, w = drawn((2, 1, 1, 7), (1, 1, 1, 3))
    got = neuronjax.depthwise_conv1d_implicit_gemm(x, w)
    assert error(got, equations.depthwise(x, w)) < 1e-6


def test_the_order_of_the_axes_may_be_said_and_not_changed():
    x, w = drawn((1, 2, 1, 7), (2, 1, 1, 3))
    said = dict(in_perm=(0, 1, 2, 3), kern_perm=[0, 1, 2, 3], out_perm=(0, 1, 2, 3))
    got = neuronjax.depthwise_conv1d_implicit_gemm(x, w, feature_group_count=2, **said)
    np.testing.assert_array_equal(got, call(x, w))
    with pytest.raises(ValueError, match=r"got out_perm = \(0, 3, 1, 2\)"):
        neuronjax.depthwise_conv1d_implicit_gemm(
            x, w, feature_group_count=2, out_perm=(0, 3, 1, 2)
        )


def test_the_default_group_count_is_refused_in_words():
    x, w = drawn((1, 2, 1, 7), (2, 1, 1, 3))
    with pytest.raises(ValueError, match="must be C = 2, .* got 1"):
        neuronjax.depthwise_conv1d_implicit_gemm(x, w)


def test_odd_channels_run_here_and_are_reported():
    x, w = drawn((1, 3, 1, 7), (3, 1, 1, 3))
    report = neuronjax.can("depthwise_conv1d_kernel", x, w)
    assert report and not report.on_chip and report.nearest == {"C": 4}
    got = emit.depthwise_conv1d_kernel(x, w)
    assert error(got, equations.depthwise(x, w)) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        dict(padding=(1, 1)),
        dict(padding=((0, 0), (0,))),
        dict(padding=((0, 0), (0, -1))),
        dict(stride=2),
        dict(stride=(1, 0)),
        dict(stride=(1, True)),
        dict(stride=(None, 1)),
        dict(lhs_dilation=(1, 2)),
        dict(rhs_dilation=1),
        dict(batch_group_count=None),
    ],
)
def test_settings_of_another_kind_are_refused(options):
    x, w = drawn((1, 2, 1, 7), (2, 1, 1, 3))
    with pytest.raises(ValueError, match="depthwise_conv1d_implicit_gemm: "):
        neuronjax.depthwise_conv1d_implicit_gemm(x, w, feature_group_count=2, **options)


def test_the_backward_is_a_macro():
    x, w = drawn((1, 2, 1, 7), (2, 1, 1, 3))
    names = neuronjax.trace(jax.grad(lambda x: call(x, w).sum()), x).names
    assert names == ("DepthwiseConv1D", "DepthwiseConv1DBwd")


def test_the_batch_may_be_symbolic_and_the_width_says_that_it_may_not():
    """R-49."""
    (w,) = drawn((2, 1, 1, 40))
    b, n = export.symbolic_shape("b, n")
    held = export.export(jax.jit(lambda x: call(x, w)))(
        jax.ShapeDtypeStruct((b, 2, 1, 90), jnp.float32)
    )
    (x,) = drawn((3, 2, 1, 90))
    np.testing.assert_allclose(held.call(x), call(x, w), 1e-5, 1e-6)
    with pytest.raises(ValueError, match="W and S must be known while tracing"):
        call(jax.ShapeDtypeStruct((1, 2, 1, n), jnp.float32), w)


def test_a_filter_as_long_as_the_image_compiles_to_a_small_program():
    """4093 taps and 4 results, the largest of the vendor's: no loop over taps."""
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 8, 1, 4096), (8, 1, 1, 4093))
    ]
    traced = jax.jit(functools.partial(call)).trace(*shapes)
    text = str(traced.jaxpr)
    assert "while" not in text and "scan" not in text and len(text) < 20000
    x, w = drawn((1, 2, 1, 4096), (2, 1, 1, 4093))
    assert error(jax.jit(call)(x, w), equations.depthwise(x, w)) < 2e-5


@pytest.mark.parametrize("width", [7, 17])
def test_loops_are_mapped_and_differ_over_a_mesh(width, monkeypatch):
    """R-42, R-43: an axis of `vmap`, and filters that all devices share."""
    for name, size in dict(UNROLLED=3, CHUNK=2, LANES=4).items():
        monkeypatch.setattr(kernel, name, size)
    x, w = map(jnp.asarray, drawn((2, 3, 1, 2, 1, width), (2, 2, 1, 1, 5)))

    def one(x, w):
        out, pull = jax.vjp(call, x, w)
        return out, *pull(jnp.cos(out))

    got = jax.jit(jax.vmap(one))(x[:, 0], w)
    wanted = [jnp.stack(found) for found in zip(*map(one, x[:, 0], w), strict=True)]
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-6

    mesh = jax.make_mesh((3,), ("data",), (AxisType.Auto,), devices=jax.devices()[:3])
    split = jax.shard_map(
        call, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    results = []
    for f in (split, call):
        scalar = lambda x, w, f=f: jnp.sum(jnp.sin(f(x, w)))  # noqa: E731
        results.append(jax.jit(jax.value_and_grad(scalar, (0, 1)))(x[0, :, 0], w[0]))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert error(a, b) < 1e-5
