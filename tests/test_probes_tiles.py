"""Probes on tiles: SBUF in, PSUM out, and what the chip refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import MemrefTile, emit
from tests.probe_equations import EMITTERS, double_products, drawn, products

KINDS = sorted(EMITTERS)


def tile(x, axis=1, buffer="sbuf"):
    return MemrefTile.from_tensor(x, axis, buffer=buffer)


def psum(x, axis=1):
    return tile(x, axis, "psum")


def loss(out):
    return jnp.sum(jnp.sin(out))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_a_tile_in_psum(kind, transpose):
    s, x, start = drawn(
        1, (5, 40, 9), (5, 40, 7), (5, 7, 9) if transpose else (5, 9, 7)
    )
    out = EMITTERS[kind](tile(s), tile(x), psum(start), transpose=transpose)
    assert (out.buffer, out.axis, out.dtype) == ("psum", 1, jnp.float32)
    assert out.data.shape[:2] == (start.shape[1], 1)
    wanted = products(s, x, start, transpose)
    np.testing.assert_allclose(out.to_tensor(), wanted, atol=2e-5)
    one = EMITTERS[kind](tile(s[0], 0), tile(x[0], 0), transpose=transpose)
    np.testing.assert_allclose(
        one.to_tensor(), (wanted - np.float64(start))[0], atol=2e-5
    )


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("flat", [None, (4, 2)])
def test_double_rows_of_tiles(flat, transpose):
    s, x = drawn(2, (3, 6, 2, 4), (3, 6, 2, 5))
    given = s if flat is None else s.swapaxes(2, 3).reshape(3, 6, 8)

    def call(given, x):
        return emit.packed_cayman_pe_tp_kernel(
            *(tile(given), tile(x)),
            transpose=transpose,
            lhs_free_and_double_row_shape=flat,
            stationary_index=(5, 1, 2, 3, 4, 0),
        )

    order = np.array((5, 1, 2, 3, 4, 0))
    out = call(given, x)
    assert out.buffer == "psum"
    wanted = double_products(s[:, order], x, transpose)
    np.testing.assert_allclose(out.to_tensor(), wanted, atol=1e-5)
    got = jax.grad(lambda *a: loss(call(*a).data), (0, 1))(given, x)

    def plain(given, x):
        s = given if flat is None else given.reshape(3, 6, 4, 2).swapaxes(2, 3)
        return loss(jnp.einsum("ckrm,ckrn->cmn", s[:, order], x))

    wanted = jax.grad(plain, (0, 1))(given, x)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("n", [6, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_tiles_are_tiled_where_a_tile_holds_them(kind, n):
    """`d_stationary` contracts n: more than 128 of them are passes over tensors."""
    s, x = drawn(3, (3, 5, 4), (3, 5, n))

    def tiled(s, x):
        return loss(EMITTERS[kind](tile(s), tile(x)).to_tensor())

    got = jax.grad(tiled, (0, 1))(s, x)
    wanted = jax.grad(lambda s, x: loss(jnp.einsum("tkm,tkn->tmn", s, x)), (0, 1))(s, x)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    rows = neuronjax.trace(jax.grad(tiled, (0, 1)), s, x).rows
    assert sum(row.count for row in rows) == 3
    assert sum(row.count for row in rows if row.tiled) == (3 if n == 6 else 2)


def test_a_tile_of_psum_is_no_tensor_on_the_composite_route():
    s, x = drawn(4, (3, 5, 4), (3, 5, 6))

    def stored(s, x, copied):
        out = emit.row_tiled_mm_kernel(tile(s), tile(x))
        return (out.to_sbuf() if copied else out).to_tensor()

    np.testing.assert_allclose(stored(s, x, False), products(s, x), atol=1e-5)
    with neuronjax.lowering("composite"):
        message = "^dma_copy cannot read from psum directly$"
        with pytest.raises(ValueError, match=message):
            stored(s, x, False)
        lowered = jax.jit(stored, static_argnums=2).lower(s, x, True)
        assert "neuron.RowTiledMM" in lowered.as_text()
        np.testing.assert_allclose(stored(s, x, True), products(s, x), atol=1e-5)
        gradient = jax.grad(lambda s: loss(stored(s, x, True)))(s)  # trips nothing
    np.testing.assert_allclose(
        gradient, jax.grad(lambda s: loss(stored(s, x, False)))(s), atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_operands_lie_in_sbuf_and_sums_in_psum(kind):
    s, x = drawn(5, (3, 5, 4), (3, 5, 6))
    start = jnp.zeros((3, 4, 6))
    wrong = {
        "moving must lie in SBUF: to_sbuf": (tile(s), psum(x)),
        "psum must lie in PSUM": (tile(s), tile(x), tile(start)),
        "moving must lie on axis 1, the k, got 2": (tile(s), tile(x, 2)),
        "psum must lie on axis 1, the rows of the result, got 0": (
            tile(s),
            tile(x),
            psum(start, 0),
        ),
    }
    for words, operands in wrong.items():
        with pytest.raises(ValueError, match=words):
            EMITTERS[kind](*operands)


@pytest.mark.parametrize(
    ("shapes", "settings", "words"),
    [
        (((1, 256, 4), (1, 256, 6)), {}, "contracts k up to 128"),
        (((1, 8, 256), (1, 8, 6)), {}, "m up to 128 columns"),
        (((1, 8, 4), (1, 8, 513)), {}, "holds n up to 512"),
        (((1, 8, 4), (1, 8, 129)), dict(transpose=True), "n up to 128 partitions"),
        (((32, 8, 4), (32, 8, 512)), {}, "tiles must fit PSUM of gen3: 16384 bytes"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_keep_the_limits_of_the_array(kind, shapes, settings, words):
    with pytest.raises(ValueError, match=words):
        EMITTERS[kind](*(tile(jnp.zeros(shape)) for shape in shapes), **settings)


def test_tiles_and_tensors_are_not_mixed():
    s, x = drawn(6, (3, 5, 4), (3, 5, 6))
    message = (
        "^Inputs/outputs to row_tiled_mm_kernel must be all tensors or all tiles, "
        "not a mix of both$"
    )
    with pytest.raises(ValueError, match=message):
        emit.row_tiled_mm_kernel(tile(s), x)


def test_tiles_are_mapped_jitted_and_merged():
    """Two halves of a result, computed under vmap, become one."""
    s, x = drawn(7, (2, 5, 4), (5, 6))

    def half(s):
        return emit.row_tiled_mm_kernel(tile(s, 0), tile(x, 0))

    both = jax.jit(jax.vmap(half))(s)
    halves = [jax.tree.map(lambda leaf, i=i: leaf[i], both) for i in (0, 1)]
    out = neuronjax.combine_trn2_double_row_matmult_tiles(halves).to_tensor()
    wanted = np.einsum("hkm,kn->hmn", np.float64(s), np.float64(x))
    np.testing.assert_allclose(out[0::2], wanted[0], atol=1e-5)
    np.testing.assert_allclose(out[1::2], wanted[1], atol=1e-5)
