"""fp8 values and products, against ml_dtypes and float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import neuronjax  # noqa: F401  jaxtyping checks its kernels
from neuronjax.kernels.quantization import fp8
from neuronjax.kernels.quantization.linear import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    scaled_linear_bwd,
    scaled_linear_fwd,
    split,
)

HOST = {kind: np.dtype(getattr(ml_dtypes, kind.name)) for kind in fp8.FP8}


def _f64(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize(
    ("limit", "wanted"), [(448.0, [56, 112, 288, 448]), (240.0, [30, 60, 144, 240])]
)
def test_a_row_of_zeros_has_a_finite_scale(limit, wanted):
    """R-21."""
    rows = jnp.array([[0.0, 0, 0, 0], [1, 2, 5, 8]])
    codes, scale = fp8.quantize_rows(rows, fp8.E4M3FN, limit=limit)
    assert not _f64(codes[0]).any() and scale[0, 0] == np.float32(fp8.FLOOR)
    np.testing.assert_array_equal(_f64(codes[1]), wanted)
    back = _f64(codes) * _f64(scale)
    third = {448.0: 5.142857, 240.0: 4.8}[limit]
    np.testing.assert_allclose(back, [[0, 0, 0, 0], [1, 2, third, 8]], rtol=1e-6)


def test_values_beyond_the_end_saturate_and_nan_stays():
    """R-22."""
    x = jnp.array([448.0, 464, 465, 1000, -1000, jnp.nan])
    for limit in (448.0, 240.0):
        for given in (x, x.astype(jnp.float16), x.astype(jnp.bfloat16)):
            got = _f64(fp8.saturate(given, fp8.E4M3FN, limit=limit))
            np.testing.assert_array_equal(got, [limit] * 4 + [-limit, np.nan])
    np.testing.assert_array_equal(
        _f64(fp8.saturate(x)), [240, 240, 240, 240, -240, np.nan]
    )
    assert [fp8.largest(kind) for kind in fp8.FP8] == [240, 448, 57344]


@pytest.mark.parametrize("kind", fp8.FP8, ids=str)
def test_rounding_is_to_nearest_and_ties_to_even(kind):
    """Every value, every midpoint, and their neighbours; subnormals among them."""
    codes = np.arange(256, dtype=np.uint8).view(HOST[kind]).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middles]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf)])
    x = x[np.abs(x) <= fp8.largest(kind)]
    got = fp8.saturate(jnp.asarray(x), kind)
    np.testing.assert_array_equal(_f64(got), _f64(x.astype(HOST[kind])))


def test_an_infinity_saturates_and_a_nan_stays_alone():
    row = jnp.array([[1.0, jnp.inf, -2.0, jnp.nan]])
    codes, scale = fp8.quantize_rows(row)
    np.testing.assert_allclose(scale, [[2 / 240]], rtol=1e-6)
    np.testing.assert_array_equal(_f64(codes), [[120, 240, -240, np.nan]])


def test_a_bound_clips_before_the_scale():
    codes, scale = fp8.quantize_rows(jnp.array([[1.0, 6.0, -0.5]]), bound=2.0)
    np.testing.assert_allclose(scale, [[2 / 240]], rtol=1e-6)
    np.testing.assert_array_equal(_f64(codes), [[120, 240, -60]])


@pytest.mark.parametrize("kind", fp8.FP8[:2], ids=str)
def test_packed_rows_come_back(kind):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32)
    codes, scale = fp8.quantize_rows(x, kind)
    packed = fp8.pack_rows(codes, scale)
    assert packed.shape == (2, 3, 12) and packed.dtype == kind
    raw = np.asarray(packed).view(np.uint8)[..., 8:]
    np.testing.assert_array_equal(raw.copy().view("<f4"), scale)
    for got, wanted in zip(fp8.unpack_rows(packed), (codes, scale), strict=True):
        np.testing.assert_array_equal(_f64(got), _f64(wanted))


def test_a_split_row_is_the_sum_of_its_parts():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 500)), jnp.float32)
    parts = jax.jit(split)(x)
    assert parts.dtype == jnp.bfloat16
    np.testing.assert_array_equal(_f64(parts).reshape(3, 2, 500).sum(0), _f64(x))
    edge = jnp.array([[jnp.inf, jnp.nan]])
    sums = _f64(split(edge)).reshape(3, 2).sum(0)
    np.testing.assert_array_equal(sums, [np.inf, np.nan])


def _operands(rows, d_in, d_out, dtype="float32", kind=fp8.E4M3):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(*rows, d_in)), dtype)
    w = jnp.asarray(rng.normal(size=(d_in, d_out)) * 9, jnp.float32).astype(kind)
    scale = jnp.asarray(rng.uniform(0.5, 2, d_out), jnp.float32)
    return x, w, scale


# Sizes below a block, of whole blocks, and with a rest on both axes.
SIZES = [(12, 7), (2 * BLOCK_ROWS, 2 * BLOCK_COLUMNS), (519, 1031), (90, 3001)]


@pytest.mark.parametrize(
    ("sizes", "kind"),
    list(zip(SIZES, (fp8.E4M3FN, fp8.E4M3) * 2, strict=True)),
)
@pytest.mark.parametrize("rows", [(), (1, 1), (3, 2), (129,)])
def test_products_are_as_good_as_float32(rows, sizes, kind):
    x, w, scale = _operands(rows, *sizes, kind=kind)
    y = jax.jit(functools.partial(scaled_linear_fwd, dtype=x.dtype))(x, w, scale)
    wanted = _f64(x) @ _f64(w) * _f64(scale)
    assert y.dtype == jnp.float32 and y.shape == wanted.shape
    assert np.abs(y - wanted).max() <= 2e-6 * np.abs(wanted).max()
    dx = jax.jit(functools.partial(scaled_linear_bwd, dtype=x.dtype))(y, w, scale)
    wanted = (_f64(y) * _f64(scale)) @ _f64(w).T
    assert np.abs(dx - wanted).max() <= 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", fp8.E4M3])
@pytest.mark.parametrize("rows", [(1,), (200,)])
def test_narrow_activations_are_exact(rows, dtype):
    x, w, _ = _operands(rows, 600, 600, dtype)
    y = scaled_linear_fwd(x, w, jnp.float32(2), dtype="float32")
    wanted = _f64(x) @ _f64(w) * 2
    assert y.dtype == jnp.float32
    assert np.abs(y - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_the_factors_are_rounded_to_a_narrower_dtype():
    x, w, scale = _operands((5,), 600, 600)
    got = scaled_linear_fwd(x, w, scale, dtype="bfloat16")
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    wanted = scaled_linear_fwd(rounded, w, scale, dtype="float32")
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 2048])
@pytest.mark.parametrize("product", ["forward", "backward"])
def test_no_weight_is_widened_as_a_whole(product, rows):
    """Temporaries are about one widened block, less than the weight's own bytes."""
    d_in, d_out = 2048, 4096
    w = jax.ShapeDtypeStruct((d_in, d_out), fp8.E4M3)
    fun, width = {
        "forward": (scaled_linear_fwd, d_in),
        "backward": (scaled_linear_bwd, d_out),
    }[product]
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    scale = jax.ShapeDtypeStruct((d_out,), jnp.float32)
    call = jax.jit(functools.partial(fun, dtype=jnp.float32))
    used = call.lower(x, w, scale).compile().memory_analysis().temp_size_in_bytes
    block = 4 * max(BLOCK_ROWS * d_out, BLOCK_COLUMNS * d_in)
    # The product before its scale, and in backward the scaled cotangent.
    activations = 4 * rows * (d_in + d_out)
    assert used <= 1.25 * block + activations
    if rows == 1:
        assert used < d_in * d_out


@pytest.mark.parametrize("rows", [1, 3])
def test_derivatives_are_those_of_the_wide_product(rows):
    """Forward and reverse, twice; the split of a row costs no digits."""
    x, w, scale = _operands((rows,), 519, 1031)
    wide = _f64(w) * _f64(scale)
    fun = functools.partial(scaled_linear_fwd, w=w, scale=scale, dtype=x.dtype)
    dx = jnp.cos(x)
    _, moved = jax.jvp(fun, (x,), (dx,))
    np.testing.assert_allclose(moved, _f64(dx) @ wide, rtol=1e-4, atol=1e-2)
    y, pull = jax.vjp(fun, x)
    np.testing.assert_allclose(
        pull(jnp.cos(y))[0], np.cos(_f64(y)) @ wide.T, rtol=1e-3, atol=0.1
    )
    back = functools.partial(scaled_linear_bwd, w=w, scale=scale, dtype=x.dtype)
    _, moved = jax.jvp(back, (y,), (jnp.cos(y),))
    np.testing.assert_allclose(moved, np.cos(_f64(y)) @ wide.T, rtol=1e-3, atol=0.1)


def test_products_map_over_activations_and_weights():
    x, w, scale = _operands((2, 1), 519, 1031)
    stacked = jnp.stack([w, w[::-1]])
    call = functools.partial(scaled_linear_fwd, scale=scale, dtype=x.dtype)
    for dims, pairs in (
        ((0, None), [(x[0], w), (x[1], w)]),
        ((None, 0), [(x, stacked[0]), (x, stacked[1])]),
        ((0, 0), [(x[0], stacked[0]), (x[1], stacked[1])]),
    ):
        given = (x if dims[0] == 0 else x, stacked if dims[1] == 0 else w)
        got = jax.vmap(lambda x, w: call(x, w), dims)(*given)
        wanted = jnp.stack([call(*pair) for pair in pairs])
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-2)
