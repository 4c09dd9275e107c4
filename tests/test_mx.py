"""MX blocks: codes, scales, layouts and products, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import neuronjax
from neuronjax.kernels.mx import formats, layout, linear, product, quantize
from neuronjax.primitives import registry
from tests import mx_equations as equations
from tests.mx_equations import FORMATS, normal, weight

ORDERS = [
    ("hidden", 1024),
    ("contiguous", 96),
    ("interleaved", 64),
    ("intermediate", 64),
    ("intermediate", 90),
    ("intermediate", 512),
    ("intermediate", 552),
]

forward = jax.jit(linear.mx_linear_fwd, static_argnames=("kind", "order"))
backward = jax.jit(linear.mx_linear_bwd, static_argnames=("kind", "order"))
pack_weight = jax.jit(layout.pack_weight, static_argnums=(1, 2))
unpack_weight = jax.jit(layout.unpack_weight, static_argnums=(2, 3, 4))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_its_value(name):
    kind = formats.FORMATS[name]
    codes = jnp.arange(2**kind.bits, dtype=jnp.uint8)
    got = np.asarray(jax.jit(lambda c: formats.decode(c, kind))(codes))
    wanted = equations.all_values(name)
    np.testing.assert_array_equal(got, wanted)
    signs = (np.signbit(x)[~np.isnan(wanted)] for x in (got, wanted))
    np.testing.assert_array_equal(*signs)


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_rounds_to_nearest_even_and_saturates(name):
    """R-22: bit for bit, on all float32 exponents, ties and their neighbours."""
    kind, rng = formats.FORMATS[name], np.random.default_rng(1)
    values = equations.all_values(name)
    values = np.sort(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / np.float32(2)
    near = [np.nextafter(ties, np.float32(side)) for side in (np.inf, -np.inf)]
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    ends = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45], np.float32)
    x = np.concatenate([values, ties, *near, bits[~np.isnan(bits)], ends])
    got = np.asarray(jax.jit(lambda x: formats.encode(x, kind))(x))
    np.testing.assert_array_equal(got, equations.cast(x, name).view(np.uint8))


def test_overflow_saturates_and_nan_stays():
    """R-22."""
    x = jnp.array([[448, 464, 465, 1000, -1000, jnp.nan, jnp.inf, 0]])
    got = neuronjax.unpack_mx(neuronjax.pack_mx(x))[0]
    wanted = [448, 448, 448, 448, -448, np.nan, 448, 0]
    np.testing.assert_array_equal(got, np.float32(wanted))
    x = jnp.array([[jnp.nan, 7, -jnp.inf, 0.2]])
    packed = neuronjax.pack_mx(x, "float4_e2m1fn")
    got = neuronjax.unpack_mx(packed, "float4_e2m1fn")[0]
    np.testing.assert_array_equal(got, np.float32([6, 6, -6, 0]))


@pytest.mark.parametrize("name", FORMATS)
def test_containers_are_little_endian(name):
    kind = formats.FORMATS[name]
    codes = np.random.default_rng(2).integers(0, 2**kind.bits, (6, 24), dtype=np.uint8)
    packed = formats.pack(jnp.asarray(codes), kind)
    if kind.bits == 8:
        wanted = codes.view("<u4")
    else:
        wanted = (codes[:, ::2] | codes[:, 1::2] << 4).view("<u2")
    np.testing.assert_array_equal(packed, wanted)
    assert packed.dtype == wanted.dtype
    np.testing.assert_array_equal(formats.unpack(packed, kind), codes)
    for q in range(4):
        np.testing.assert_array_equal(formats.element(packed, kind, q), codes[:, q::4])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantizing_follows_its_equations(name, dtype):
    x = normal(16, 24) * 2.0 ** np.random.default_rng(3).integers(-9, 9, (16, 24))
    x = jnp.asarray(x.astype(np.float32)).astype(dtype)
    packed, scale = neuronjax.quantize_to_mx(x, f"{name}_x4")
    blocks = np.asarray(x, np.float32).reshape(2, 8, 6, 4).transpose(0, 2, 1, 3)
    values, wanted = equations.quantize(blocks.reshape(2, 6, 32), name)
    np.testing.assert_array_equal(scale, wanted[..., 0])
    values = values.reshape(2, 6, 8, 4).transpose(0, 2, 1, 3).reshape(16, 24)
    np.testing.assert_array_equal(neuronjax.unpack_mx(packed, name), values)
    powers = np.repeat(np.repeat(wanted[..., 0], 8, 0), 4, 1) - 127.0
    got = neuronjax.dequantize_mx(packed, scale, getattr(ml_dtypes, name))
    np.testing.assert_array_equal(got, values * 2.0**powers)


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_of_a_block_is_off_by_at_most_what_saturates(name):
    x = normal(8, 400)
    packed, scale = neuronjax.quantize_to_mx(x, name)
    got = np.asarray(neuronjax.dequantize_mx(packed, scale, name))
    blocks, values = (z.reshape(8, 100, 4) for z in (x, got))
    size = np.abs(blocks).max((0, 2))
    # Half a step of the mantissa, or the end of it: 2 to the format's largest mantissa.
    bound = 1 - equations.LARGEST[name] / 2.0 ** (equations.MAX_EXPONENT[name] + 1)
    assert (np.abs(blocks - values).max((0, 2)) <= bound * size).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zero_blocks_stay_zero_and_finite(name):
    """R-21."""
    x = np.zeros((16, 8), np.float32)
    x[8:, 4:] = 3.0
    packed, scale = neuronjax.quantize_to_mx(x, name)
    assert scale[0].tolist() == [0, 0] and not np.asarray(packed[:8]).any()
    np.testing.assert_array_equal(neuronjax.dequantize_mx(packed, scale, name), x)


def test_infinity_and_nan_are_never_silent():
    x = np.ones((8, 12), np.float32)
    x[0, 0], x[1, 5] = -np.inf, np.nan
    for name in FORMATS:
        packed, scale = neuronjax.quantize_to_mx(x, name)
        got = np.asarray(neuronjax.dequantize_mx(packed, scale, name))
        assert np.isnan(got[1, 5]) and not np.isnan(got[:, :4]).any()
        assert got[0, 0] <= -1.5 * 2.0**127
        assert got[0, 0] == -np.inf or name == "float4_e2m1fn"
        np.testing.assert_array_equal(got[:, 8:], 1)
    assert scale[0, 1] == 255 and np.isnan(got[:, 4:8]).all(), "float4: the block"


@pytest.mark.parametrize("kind", ["float8_e4m3fn_x4", "float4_e2m1fn_x4"])
def test_a_nan_stays_one_in_every_projection(kind):
    """The block-scaled leaves decode a NaN code as NaN, under jit too."""
    good, dense = normal(1, 4, 32, 4), normal(128, 6)
    heads, bad = good.copy(), dense.copy()
    heads[0, 0, 0, 0] = bad[3, 2] = np.nan

    def project(attention, weight):
        packed, scale = neuronjax.quantize_mx_weight(weight, "contiguous", kind)
        out = neuronjax.output_projection_cte(
            jnp.asarray(attention), packed, None, "MX", weight_scales=scale
        )
        return out.astype("float32")

    for run in (project, jax.jit(project)):
        out = np.asarray(run(heads, dense))
        assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1:]).all()
        out = np.asarray(run(good, bad))
        assert np.isnan(out[..., 2]).all() and np.isfinite(out[..., :2]).all()


def test_tiny_blocks_are_exact_down_to_the_stored_scale():
    """The smallest scale is a subnormal power; its values are normal float32."""
    x = np.full((8, 4), 448 * 2.0**-127, np.float32)
    packed, scale = neuronjax.quantize_to_mx(x)
    assert scale[0, 0] == 0
    np.testing.assert_array_equal(neuronjax.dequantize_mx(packed, scale), x)
    # Below it the vendor's stored scale ends, and the block comes back too large.
    packed, scale = neuronjax.quantize_to_mx(x / 4)
    assert scale[0, 0] == 0
    np.testing.assert_array_equal(neuronjax.dequantize_mx(packed, scale), x)


def test_the_top_scale_reads_as_nan():
    packed = neuronjax.pack_mx(jnp.array([[0.0, 1.0, 2.0, 3.0]] * 8))
    got = neuronjax.dequantize_mx(packed, jnp.array([[255]], jnp.uint8))
    assert np.isnan(got).all()


def test_scales_lie_on_top_of_their_quadrants():
    packed, scale = neuronjax.quantize_mx(normal(96, 8))
    plain, wanted = neuronjax.quantize_to_mx(normal(96, 8))
    np.testing.assert_array_equal(packed, plain)
    for block in range(12):
        row = 32 * (block // 4) + block % 4
        np.testing.assert_array_equal(scale[row], wanted[block])
        scale = scale.at[row].set(0)
    assert not np.asarray(scale).any()
    back = quantize.from_hardware_scale(quantize.to_hardware_scale(wanted))
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.parametrize(("order", "size"), ORDERS)
def test_a_contraction_axis_fills_its_blocks(order, size):
    x = jnp.arange(1.0, size + 1)
    blocks = layout.to_blocks(x, order)
    p, r = equations.shape_of(order, size)
    assert blocks.shape == (4, p, r)
    np.testing.assert_array_equal(layout.from_blocks(blocks, order, size), x)
    held = np.asarray(blocks)
    for q, i, j in np.ndindex(*held.shape):
        row = equations.row_of(order, size, q, i, j)
        assert held[q, i, j] == (0 if row is None else row + 1)


@pytest.mark.parametrize(("order", "size"), ORDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_packed_and_comes_back(order, size, name):
    kind, w = formats.FORMATS[name], normal(size, 5)
    packed, scale = pack_weight(jnp.asarray(w), order, kind)
    wanted = equations.packed_weight(w, order, name)
    np.testing.assert_array_equal(packed, wanted[0])
    np.testing.assert_array_equal(scale, wanted[1])
    back = unpack_weight(packed, scale, order, kind, size)
    np.testing.assert_array_equal(back, equations.rounded_rows(w.T, order, name).T)


def test_the_public_weight_has_the_shape_that_its_projection_reads():
    for order, size, shape in [
        ("hidden", 512, (128, 1, 6)),
        ("intermediate", 64, (16, 1, 6)),
        ("intermediate", 1024, (128, 2, 6)),
        ("contiguous", 64, (16, 6)),
        ("interleaved", 64, (16, 6)),
    ]:
        packed, scale = neuronjax.quantize_mx_weight(normal(size, 6), order)
        assert packed.shape == shape and packed.dtype == jnp.uint16
        assert scale.shape == (shape[0] // 8, *shape[1:])


def test_hidden_columns_are_swizzled_and_back():
    x = jnp.arange(2048.0).reshape(2, 1024)
    y = neuronjax.swizzle_hidden(x)
    np.testing.assert_array_equal(neuronjax.unswizzle_hidden(y), x)
    held = np.asarray(y[1])
    for q, t, p in np.ndindex(4, 2, 128):
        assert held[(q * 2 + t) * 128 + p] == 1024 + 512 * t + 4 * p + q


@pytest.mark.parametrize("size", [32, 64, 90, 552])
def test_a_bias_lies_as_the_result_does(size):
    row = jnp.arange(1.0, size + 1)
    bias = layout.row_to_bias(row)
    np.testing.assert_array_equal(layout.bias_to_row(bias, size), row)
    result = layout.to_partitions(layout.to_blocks(row[None], "intermediate"))
    np.testing.assert_array_equal(result[: bias.shape[0], :, 0], bias)


def test_the_swizzled_load_transposes_and_quantizes_each_group():
    x = normal(128, 1024, dtype=ml_dtypes.bfloat16)
    data, scale = neuronjax.mxfp_load_performance_wrapper(jnp.asarray(x))
    assert data.shape == scale.shape == (128, 256)
    for group in (0, 1):
        part = x[:, 512 * group : 512 * (group + 1)].reshape(128, 128, 4)
        part = np.ascontiguousarray(part.transpose(1, 0, 2)).reshape(128, 512)
        wanted = neuronjax.quantize_mx(jnp.asarray(part))
        columns = slice(128 * group, 128 * (group + 1))
        np.testing.assert_array_equal(data[:, columns], wanted[0])
        np.testing.assert_array_equal(scale[:, columns], wanted[1])


@pytest.mark.parametrize(("order", "size"), [ORDERS[0], ORDERS[2], ORDERS[4]])
def test_the_derivative_passes_straight_through(order, size):
    """Zero where a value saturates, the dequantized weight's elsewhere."""
    kind = formats.E4M3FN
    packed, scale, dense = weight(size, 7, order, kind.name)
    x, dy, dx = normal(9, size, seed=8), normal(9, 7), normal(9, size)

    def run(x):
        return linear.mx_linear_fwd(x, packed, scale, kind=kind, order=order)

    y, pull = jax.vjp(jax.jit(run), jnp.asarray(x))
    pull = jax.jit(pull)
    np.testing.assert_allclose(
        y, equations.rounded_rows(x, order) @ dense, rtol=1e-5, atol=1e-4
    )
    live = ~equations.saturated_rows(x, order)
    assert 0 < live.sum() < live.size
    np.testing.assert_allclose(
        pull(jnp.asarray(dy))[0], live * (dy @ dense.T), rtol=1e-4, atol=1e-4
    )
    _, tangent = jax.jit(lambda *a: jax.jvp(run, a[:1], a[1:]))(x, dx)
    np.testing.assert_allclose(tangent, (live * dx) @ dense, rtol=1e-4, atol=1e-4)
    operands = jnp.asarray(dy), jnp.asarray(x), packed, scale
    dx = backward(*operands, kind=kind, order=order)
    np.testing.assert_allclose(dx, live * (dy @ dense.T), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 300), (3, 128), (3, 1100)])
def test_columns_that_do_not_fill_a_block_are_multiplied(rows, columns, monkeypatch):
    """R-25."""
    monkeypatch.setattr(product, "DECODED", 1 << 12)
    jax.clear_caches()
    packed, scale, dense = weight(64, columns, "contiguous", "float8_e5m2")
    kind, x = formats.E5M2, jnp.asarray(normal(rows, 64))
    y = forward(x, packed, scale, kind=kind, order="contiguous")
    wanted = equations.rounded_rows(np.asarray(x), "contiguous") @ dense
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)
    dx = jax.jit(functools.partial(product.product_bwd, kind=kind))(y, packed, scale)
    dx = layout.from_blocks(dx, "contiguous", 64)
    np.testing.assert_allclose(dx, np.float64(y) @ dense.T, rtol=1e-5, atol=1e-3)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        packed, scale, dense = weight(64, 5, "contiguous", "float8_e4m3fn")
        x = jnp.asarray(normal(2, 64), jnp.float64)
        run = jax.jit(
            lambda x: linear.mx_linear_fwd(
                x, packed, scale, kind=formats.E4M3FN, order="contiguous"
            )
        )
        y, pull = jax.vjp(run, x)
        wanted = equations.rounded_rows(np.asarray(x), "contiguous") @ dense
        assert y.dtype == pull(y)[0].dtype == jnp.float64
        np.testing.assert_allclose(y, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backward", [False, True])
def test_a_weight_is_never_widened_as_a_whole(backward):
    """What XLA keeps beside the operands is one block, not the matrix."""
    k, n = 1024, 8192
    packed = jax.ShapeDtypeStruct((k // 4, 1, n), jnp.uint32)
    scale = jax.ShapeDtypeStruct((k // 32, 1, n), jnp.uint8)
    x = jax.ShapeDtypeStruct((2, n) if backward else (2, 4, k // 4, 1), jnp.float32)
    run = product.product_bwd if backward else product.product_fwd
    run = functools.partial(run, kind=formats.E4M3FN)
    lowered = jax.jit(run).lower(x, packed, scale)
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    assert used < k * n * 2 / 3, f"{used} bytes; the weight in bfloat16 has {k * n * 2}"


def test_block_scaled_instructions_are_no_macros():
    assert not {"MatMulMX", "QuantizeMX"} & registry.CATALOG.keys()


def test_a_suggested_size_passes():
    """R-26."""
    report = neuronjax.can("quantize_mx", np.zeros((40, 6), np.float32))
    assert dict(report.nearest) == {"P": 32, "F": 8}
    assert neuronjax.quantize_mx(np.zeros((32, 8), np.float32))[0].shape == (32, 2)


def test_quantizing_maps_and_compiles():
    x = jnp.asarray(normal(3, 8, 8))
    wanted = [neuronjax.quantize_to_mx(part) for part in x]
    packed, scale = jax.jit(jax.vmap(neuronjax.quantize_to_mx))(x)
    np.testing.assert_array_equal(packed, jnp.stack([w[0] for w in wanted]))
    np.testing.assert_array_equal(scale, jnp.stack([w[1] for w in wanted]))
