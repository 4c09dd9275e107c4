"""Row-tiled and column-tiled products against their equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax import emit
from neuronjax.primitives.probes.macro import FAMILIES
from tests.probe_equations import EMITTERS, NAMES, drawn, gradients, products

KINDS = sorted(EMITTERS)
# tiles, k, m, n, tile_size of row tiling, of column tiling, transpose
SIZES = [
    (1, 1, 1, 1, None, None, False),
    (3, 5, 7, 9, None, None, True),
    (5, 70, 33, 3, (64, 128), (128, 64), False),
    (5, 70, 33, 3, (64, 128), (128, 64), True),
    (2, 130, 129, 5, None, None, False),
    (9, 33, 17, 2, (128, 128), (128, 128), True),
]


def size_of(kind, row, column):
    return row if kind == "row" else column


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s[:4])))
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_equation(kind, sizes):
    tiles, k, m, n, row, column, transpose = sizes
    s, x = drawn(1, (tiles, k, m), (tiles, k, n))
    out = EMITTERS[kind](
        s, x, tile_size=size_of(kind, row, column), transpose=transpose
    )
    wanted = products(s, x, transpose=transpose)
    assert out.dtype == jnp.float32 and out.shape == wanted.shape
    np.testing.assert_allclose(out, wanted, atol=2e-6 * k, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_product_needs_no_axis_of_tiles(kind):
    s, x, psum = drawn(2, (5, 3), (5, 4), (3, 4))
    out = EMITTERS[kind](s, x, psum)
    wanted = products(s[None], x[None], psum[None])[0]
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    turned = EMITTERS[kind](s, x, psum.T, transpose=True)
    np.testing.assert_allclose(turned, wanted.T, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_operands_have_two_names(kind):
    s, x = drawn(2, (2, 5, 3), (2, 5, 4))
    size = (32, 128) if kind == "row" else (128, 32)
    out = EMITTERS[kind](lhs=s, rhs=x, tile_shape=size)
    np.testing.assert_array_equal(out, EMITTERS[kind](s, x, tile_size=size))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_psum_group_goes_on_where_the_last_call_left_it(kind, transpose):
    """Three passes of one group are three calls, each adding to the last, bit by bit.

    Bands of 64 positions leave a second group half empty.
    """
    s, x = drawn(3, (3, 300, 20), (3, 300, 6))
    kernel, parts = EMITTERS[kind], [(0, 128), (128, 256), (256, 300)]
    whole = kernel(s, x, tile_size=(128, 128), transpose=transpose)
    psum = None
    for first, end in parts:
        psum = kernel(
            *(s[:, first:end], x[:, first:end], psum),
            tile_size=(128, 128),
            transpose=transpose,
        )
    np.testing.assert_array_equal(psum, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [((96,)), (32, 0), (64, 96, 0), (0, 32, 64, 96)])
def test_no_band_changes_a_value(kind, positions):
    s, x, psum = drawn(4, (7, 40, 9), (7, 40, 5), (7, 9, 5))
    size = (32, 128) if kind == "row" else (128, 32)
    places = tuple((at, 0) if kind == "row" else (0, at) for at in positions)
    places = places[0] if len(places) == 1 else places
    out = EMITTERS[kind](s, x, psum, tile_size=size, tile_position=places)
    np.testing.assert_allclose(out, products(s, x, psum), atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaves_its_band(kind, bad):
    """A NaN or infinity in one tile reaches its own result alone."""
    s, x = drawn(5, (6, 20, 8), (6, 20, 5))
    clean = EMITTERS[kind](s, x)
    out = EMITTERS[kind](s.at[2].set(bad), x.at[4, 3].set(bad))
    for tile in (0, 1, 3, 5):
        np.testing.assert_array_equal(out[tile], clean[tile])
    for tile in (2, 4):
        assert not np.isfinite(out[tile]).any()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_equation(kind, transpose):
    shape = (4, 6, 5) if transpose else (4, 5, 6)
    s, x, d_out = drawn(6, (4, 40, 5), (4, 40, 6), shape)
    psum = jnp.zeros(shape)
    _, pull = jax.vjp(
        lambda *a: EMITTERS[kind](*a, transpose=transpose, num_stages=2), s, x, psum
    )
    d_s, d_x, d_psum = pull(d_out)
    d_mn = d_out.swapaxes(1, 2) if transpose else d_out
    for got, wanted in zip((d_s, d_x), gradients(s, x, d_mn), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    np.testing.assert_array_equal(d_psum, d_out)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_first_and_second_order(kind):
    operands = drawn(7, (3, 5, 2), (3, 5, 3), (3, 2, 3))

    def loss(*operands):
        return jnp.sin(EMITTERS[kind](*operands))

    check_grads(jax.jit(loss), operands, order=2, modes=["fwd", "rev"], rtol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_two_products_more_of_the_same_name(kind):
    s, x = drawn(8, (3, 5, 2), (3, 5, 3))

    def loss(s, x):
        return jnp.sum(jnp.sin(EMITTERS[kind](s, x, fuse_batches=True)))

    trace = neuronjax.trace(jax.grad(loss, (0, 1)), s, x)
    assert trace.count(NAMES[kind]) == 3 == sum(row.count for row in trace.rows)
    assert all(dict(row.config)["fuse_batches"] for row in trace.rows)
    twice = jax.hessian(lambda s: loss(s, x))
    assert {row.name for row in neuronjax.trace(twice, s).rows} <= {
        NAMES[kind],
        f"{NAMES[kind]}_tangent",
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_factors_are_summed_wide(kind, dtype):
    """Products of narrow values are exact in float32; only the sum rounds."""
    s, x = drawn(9, (2, 200, 9), (2, 200, 7), dtype=dtype)
    out = EMITTERS[kind](s, x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, products(s, x), atol=2e-4)
    d_s, d_x = jax.grad(lambda *a: EMITTERS[kind](*a).sum(), (0, 1))(s, x)
    assert d_s.dtype == d_x.dtype == dtype
    wanted = gradients(s, x, np.ones((2, 9, 7)))
    for got, exact in zip((d_s, d_x), wanted, strict=True):
        error = np.abs(np.asarray(got, np.float64) - exact).max()
        assert error <= 2.0**-8 * np.abs(exact).max()


@pytest.mark.parametrize("k", [1, 128, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_4096_ones_are_4096_however_they_are_cut(kind, k):
    """R-23: in tiles of `k` rows, the psum of one pass added to by the next."""
    one, psum = jnp.ones((1, k, 1), jnp.bfloat16), None
    step = jax.jit(EMITTERS[kind])
    for _ in range(4096 // k):
        psum = step(one, one, psum)
    assert float(psum[0, 0, 0]) == 4096.0


@pytest.mark.parametrize(("m", "k", "n"), [(5, 129, 3), (129, 127, 513)])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_fill_no_tile(kind, m, k, n):
    """R-25: the result and its gradients; the plan has the partial tiles."""
    s, x = drawn(15, (1, k, m), (1, k, n))
    out, pull = jax.vjp(EMITTERS[kind], s, x)
    np.testing.assert_allclose(out, products(s, x), atol=1e-4)
    wanted = gradients(s, x, np.ones((1, m, n)))
    for got, exact in zip(pull(jnp.ones_like(out)), wanted, strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-3)


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        s, x = drawn(10, (2, 50, 3), (2, 50, 4), dtype="float64")
        out = emit.row_tiled_mm_kernel(s, x)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, products(s, x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_probe_is_one_macro(kind):
    s, x = drawn(11, (4, 3, 5, 2), (3, 5, 6))
    mapped = jax.vmap(EMITTERS[kind], (0, None))
    assert neuronjax.trace(mapped, s, x).count(NAMES[kind]) == 1
    for got, one in zip(mapped(s, x), s, strict=True):
        np.testing.assert_allclose(got, products(one, x), atol=1e-5)


def test_devices_share_the_tiles():
    """Tiles split over a mesh need no exchange, forward or backward."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    s, x = drawn(12, (8, 20, 3), (8, 20, 4))

    def local(s, x):
        return jax.shard_map(
            emit.column_tiled_mm_kernel,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )(s, x)

    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(local(*a))), (0, 1)))
    np.testing.assert_allclose(local(s, x), products(s, x), atol=1e-5)
    d_out = np.cos(products(s, x))
    for got, wanted in zip(gradient(s, x), gradients(s, x, d_out), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (((0, 0), (48, 0)), r"tile 1 at \(48, 0\) must lie at multiples of its size"),
        (((0, 32),), r"tile 0 at \(0, 32\) must lie at multiples of its size"),
        (
            ((0, 0), (128, 0)),
            r"tile 1 at \(128, 0\) of size \(32, 128\) must lie inside",
        ),
        (((0, 0), (32, 0), (0, 0)), r"tile 2 at \(0, 0\) overlaps tile 0 there"),
        (((0, 0), (32,)), "must be \\(row, column\\), or a tuple of them"),
        (((0, 0), (32, 0), (64, 0), (96, 0)), "gives 4 bands to 3 tiles"),
        ((), "must be \\(row, column\\), or a tuple of them"),
    ],
)
def test_a_band_that_cannot_be_names_its_tile(positions, words):
    s, x = jnp.zeros((3, 5, 2)), jnp.zeros((3, 5, 4))
    with pytest.raises(ValueError, match=f"row_tiled_mm_kernel: .*{words}"):
        emit.row_tiled_mm_kernel(s, x, tile_size=(32, 128), tile_position=positions)


@pytest.mark.parametrize("kind", sorted(NAMES))
def test_a_foreign_name_is_refused_in_the_words_of_the_guard(kind):
    name = NAMES[kind]
    with pytest.raises(ValueError, match=f"^Must be {name} but got MLP$"):
        FAMILIES[name](jnp.zeros((2, 3)), jnp.zeros((2, 4)), None, name="MLP")


def test_the_array_of_a_chip_is_no_limit_for_tensors():
    s, x = jnp.ones((2, 300, 130)), jnp.ones((2, 300, 600))
    report = neuronjax.can("row_tiled_mm_kernel", s, x)
    assert report and not report.on_chip
    assert dict(report.nearest) == dict(k=128, m=128, n=512)
    out = emit.row_tiled_mm_kernel(s, x)
    assert out.shape == (2, 130, 600) and float(out.min()) == float(out.max()) == 300.0


def test_a_plain_probe_binds_no_macro():
    s, x = drawn(13, (3, 5, 2), (3, 5, 4))
    with neuronjax.plain():
        assert not neuronjax.trace(emit.row_tiled_mm_kernel, s, x).rows
        out = emit.row_tiled_mm_kernel(s, x)
    np.testing.assert_allclose(out, products(s, x), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_the_moving_operand_may_be_symbolic(kind):
    (n,) = export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct((2, 5, size), jnp.float32) for size in (3, n)]
    saved = export.export(jax.jit(EMITTERS[kind]))(*shapes)
    for size in (1, 4):
        s, x = drawn(14, (2, 5, 3), (2, 5, size))
        np.testing.assert_allclose(saved.call(s, x), products(s, x), atol=1e-5)
