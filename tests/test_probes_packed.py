"""Products of double rows: values, settings, the gate, the merge of two halves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import MemrefTile, emit
from tests.probe_equations import double_products, drawn

NAME = "CaymanPackedPETranspose"
kernel = emit.packed_cayman_pe_tp_kernel


def operands(channels=3, k=5, m=4, n=6, seed=0, dtype="float32"):
    return drawn(seed, (channels, k, 2, m), (channels, k, 2, n), dtype=dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        ((1, 1, 1, 1), "double_row_gen3"),
        ((6, 20, 7, 3), None),
        ((3, 150, 9, 5), "double_row_gen3"),
    ],
)
def test_products_are_those_of_the_equation(sizes, mode, transpose):
    s, x = operands(*sizes)
    out = kernel(s, x, perf_mode=mode, transpose=transpose, num_channels=sizes[0])
    wanted = double_products(s, x, transpose)
    assert out.dtype == jnp.float32 and out.shape == wanted.shape
    np.testing.assert_allclose(out, wanted, atol=1e-6 * sizes[1] + 2e-6)


def test_one_product_needs_no_axis_of_channels():
    s, x = operands(1)
    (wanted,) = double_products(s, x)
    for given in (None, 1):
        out = kernel(lhs=s[0], rhs=x[0], num_channels=given)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_an_identity_is_transposed_in_one_pass():
    """`[k, 2, m]` comes out as its 2 k logical rows, transposed, or as it is."""
    (x,) = drawn(1, (20, 2, 9))
    identity = jnp.eye(40).reshape(20, 2, 40)
    turned = kernel(x, identity)
    np.testing.assert_array_equal(turned, x.reshape(40, 9).T)
    np.testing.assert_array_equal(kernel(x, identity, transpose=True), x.reshape(40, 9))


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_which_rows_share_a_physical_row_changes_no_value(kind):
    """Small integers are summed exactly in any order."""
    s, x = (jnp.round(4 * a) for a in operands())
    order = np.random.default_rng(0).permutation(10).reshape(5, 2)
    indices = kind(order) if kind is np.array else tuple(map(tuple, order.tolist()))
    out = kernel(s, x, double_row_indices=indices)
    np.testing.assert_array_equal(out, double_products(s, x))
    gradient = jax.grad(lambda s: kernel(s, x, double_row_indices=indices).sum())(s)
    wanted = jax.grad(lambda s: kernel(s, x).sum())(s)
    np.testing.assert_array_equal(gradient, wanted)


def test_flat_operands_are_split_as_they_say():
    s, x = operands(3, 5, 4, 6)
    flat = jnp.stack([s[:, :, 0], s[:, :, 1]], -1).reshape(3, 5, 8)

    def loss(flat, x):
        return jnp.sum(jnp.sin(kernel(flat, x, lhs_free_and_double_row_shape=(4, 2))))

    np.testing.assert_array_equal(
        kernel(flat, x, lhs_free_and_double_row_shape=(4, 2)), kernel(s, x)
    )
    np.testing.assert_array_equal(
        kernel(flat[0], x[0], lhs_free_and_double_row_shape=(4, 2)), kernel(s[0], x[0])
    )
    d_out = np.cos(double_products(s, x))
    d_flat, d_x = jax.grad(loss, (0, 1))(flat, x)
    wanted = np.einsum("cmn,ckrn->ckmr", d_out, np.float64(x)).reshape(3, 5, 8)
    np.testing.assert_allclose(d_flat, wanted, atol=1e-5)
    wanted = np.einsum("cmn,ckrm->ckrn", d_out, np.float64(s))
    np.testing.assert_allclose(d_x, wanted, atol=1e-5)


def test_rows_are_read_from_the_partitions_of_an_index():
    s, x = operands()
    order = (3, 0, 1, 4, 2)
    out = kernel(s, x, stationary_index=order)
    np.testing.assert_allclose(out, double_products(s[:, order], x), atol=1e-5)
    out = kernel(s, x, moving_index=np.array(order))
    np.testing.assert_allclose(out, double_products(s, x[:, order]), atol=1e-5)
    # Of more than 32 partitions only i * 32 + j is read, which is their order.
    s, x = operands(1, 64)
    lanes = np.arange(64).reshape(2, 32)
    index = (lanes // 32 * 32 + lanes % 32).ravel()
    np.testing.assert_array_equal(
        kernel(s, x, stationary_index=index, moving_index=index), kernel(s, x)
    )
    message = (
        r"^moving must have indexing i \* 32 \+ j at partition dimension for src tensor"
        r" with more than 32 partitions but got \[1, 0, 2, 3, ...\]$"
    )
    with pytest.raises(ValueError, match=message):
        kernel(s, x, moving_index=(1, 0, *range(2, 64)))


@pytest.mark.parametrize("n", [4, 5])
def test_derivatives_of_first_and_second_order(n):
    """An odd number of columns is contracted in pairs too: a row of zeros is added."""
    s, x = operands(2, 3, 2, n)

    def call(s, x):
        return kernel(s, x, transpose=True, stationary_index=(2, 0, 1))

    check_grads(jax.jit(call), (s, x), order=2, modes=["fwd", "rev"], rtol=1e-2)
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(call(*a))), (0, 1))
    trace = neuronjax.trace(gradient, s, x)
    assert trace.count(NAME) == 3 == sum(row.count for row in trace.rows)


def test_a_group_goes_on_in_psum():
    s, x = operands(2, 192, 5, 3)
    whole = kernel(s, x, tile_size=(128, 128))
    first = kernel(s[:, :128], x[:, :128], tile_size=(128, 128))
    rest = kernel(s[:, 128:], x[:, 128:], first, tile_size=(128, 128))
    np.testing.assert_array_equal(rest, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_factors_are_summed_wide(dtype):
    s, x = operands(dtype=dtype)
    out = kernel(s, x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, double_products(s, x), atol=1e-5)
    d_s = jax.grad(lambda s: kernel(s, x).sum())(s)
    assert d_s.dtype == dtype


def test_generation_2_has_no_double_rows():
    s, x = operands()
    message = "^perf_mode=double_row_gen3 is not supported on gen2$"
    with neuronjax.target("gen2"):
        with pytest.raises(ValueError, match=message):
            kernel(s, x)
        out = kernel(s, x, perf_mode=None)
        np.testing.assert_allclose(out, double_products(s, x), atol=1e-5)
        kernel(s, x, target="gen3")
    with neuronjax.target("gen4"):
        kernel(s, x)
        with pytest.raises(ValueError, match=message):
            kernel(s, x, target="gen2")


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 1, 4)])
def test_the_first_free_axis_is_two(shape):
    message = "^first F dim of LHS and RHS of the double_row matmult must be 2$"
    good = jnp.zeros((5, 2, 4))
    for pair in ((jnp.zeros(shape), good), (good, jnp.zeros(shape))):
        with pytest.raises(ValueError, match=message):
            kernel(*pair)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (((0, 1), (2, 3)), "^Unexpected double row index size$"),
        (np.arange(10), "^Unexpected double row index size$"),
        (np.arange(12).reshape(6, 2), "^Unexpected double row index size$"),
        (np.arange(10).reshape(5, 2) + 1, "each of the 2k logical rows once"),
        (np.zeros((5, 2), np.int64), "each of the 2k logical rows once"),
        (np.zeros((5, 2)), "integers .* known while tracing"),
    ],
)
def test_an_index_of_another_size_is_refused(indices, words):
    with pytest.raises(ValueError, match=words):
        kernel(*operands(), double_row_indices=indices)


def test_two_halves_of_psum_are_merged_row_by_row():
    even, odd = drawn(2, (3, 64, 5), (3, 64, 5))
    halves = [MemrefTile.from_tensor(x, 1, buffer="psum") for x in (even, odd)]
    whole = neuronjax.combine_trn2_double_row_matmult_tiles(halves)
    assert (whole.buffer, whole.axis, whole.shape) == ("psum", 1, (3, 128, 5))
    np.testing.assert_array_equal(whole.to_tensor()[:, 0::2], even)
    np.testing.assert_array_equal(whole.to_tensor()[:, 1::2], odd)


@pytest.mark.parametrize("rows", [1, 5, 128, 256])
def test_halves_of_any_rows_that_fill_partitions_are_merged(rows):
    even, odd = drawn(3, (rows, 2), (rows, 2))
    halves = [MemrefTile.from_tensor(x, 0, buffer="psum") for x in (even, odd)]
    whole = neuronjax.combine_trn2_double_row_matmult_tiles(halves)
    wanted = jnp.stack([even, odd], 1).reshape(2 * rows, 2)
    again = MemrefTile.from_tensor(wanted, 0, buffer="psum")
    np.testing.assert_array_equal(whole.data, again.data)


def test_halves_that_are_none_are_refused():
    combine = neuronjax.combine_trn2_double_row_matmult_tiles
    tile = MemrefTile.from_tensor(jnp.zeros((4, 3)), 0, buffer="psum")
    other = MemrefTile.from_tensor(jnp.zeros((4, 2)), 0, buffer="psum")
    words = "tiles must be two MemrefTiles in PSUM"
    for given in ([tile], [tile, tile.to_sbuf()], [tile, jnp.zeros((4, 3))], tile, []):
        with pytest.raises(ValueError, match=words):
            combine(given)
    with pytest.raises(ValueError, match="one shape, dtype and axis"):
        combine([tile, other])
    odd = MemrefTile.from_tensor(jnp.zeros((100, 3)), 0, buffer="psum")
    with pytest.raises(ValueError, match="at most 128 rows or a multiple"):
        combine([odd, odd])
