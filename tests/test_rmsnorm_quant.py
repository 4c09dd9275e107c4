"""RMSNorm with fp8 results: its equations in float64, every fp8 value, refusals."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import MemrefTile, RmsNormQuantKernelArgs, emit
from neuronjax.kernels.quantization.fp8 import e4m3_bytes
from neuronjax.sharding.mesh import make_mesh

E4M3 = ml_dtypes.float8_e4m3


def operands(shape=(2, 5, 96), dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x, gain = rng.standard_normal(shape), 1 + rng.standard_normal(shape[-1]) / 4
    return jnp.asarray(x, dtype), jnp.asarray(gain, dtype)


def reference(x, gain, kargs, scale=None):
    """The equations of the specification, row by row."""
    x = np.asarray(x, np.float64)
    n = x
    if kargs.norm_type == "RMS_NORM":
        mean = (x**2).mean(-1, keepdims=True)
        n = x / np.sqrt(mean + kargs.eps) * np.asarray(gain, np.float64).reshape(-1)
    if scale is not None:
        return np.clip(n / scale, -240, 240), None
    top = np.abs(n).max(-1, keepdims=True)
    if kargs.lower_bound > 1e-6:
        top = np.minimum(top, kargs.lower_bound)
        n = np.clip(n, -kargs.lower_bound, kargs.lower_bound)
    scale = np.maximum(top / 240, 1e-6)
    return n / scale, scale


def assert_codes(got, wanted):
    """Equal to the rounded values but for ties: one step in a thousand of them."""
    codes = np.asarray(got).view(np.uint8).astype(int)
    expected = np.asarray(wanted, E4M3).view(np.uint8).astype(int)
    apart = np.abs(codes - expected)
    assert apart.max() <= 1 and (apart > 0).sum() <= max(1, apart.size // 1000)


SETTINGS = [
    dict(),
    dict(lower_bound=0.5),
    dict(lower_bound=1e-4),
    dict(norm_type="NO_NORM"),
    dict(norm_type="NO_NORM", lower_bound=0.75),
]


def settings(**given):
    return RmsNormQuantKernelArgs(**(dict(norm_type="RMS_NORM") | given))


@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 96), (1, 7, 100), (2, 2, 3, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_equal_the_equations(given, shape, dtype):
    x, gain = operands(shape, dtype)
    kargs = settings(eps=1e-5, **given)
    gain = None if kargs.norm_type == "NO_NORM" else gain
    packed = jax.jit(lambda x, g: neuronjax.rmsnorm_quant(x, g, kargs))(x, gain)
    assert packed.shape == (*shape[:-1], shape[-1] + 4) and packed.dtype == E4M3
    codes, scale = neuronjax.unpack_rows(packed)
    wanted, expected = reference(x, gain, kargs)
    np.testing.assert_allclose(scale, expected, rtol=1e-5)
    assert_codes(codes, wanted)
    apart = neuronjax.rmsnorm_quant(x, gain, kargs, packed=False)
    np.testing.assert_array_equal(apart[0], codes)
    np.testing.assert_array_equal(apart[1], scale)
    again = neuronjax.pack_rows(*apart)
    np.testing.assert_array_equal(*(np.asarray(z).view("u1") for z in (again, packed)))


@pytest.mark.parametrize("norm", ["RMS_NORM", "NO_NORM"])
def test_static_values_equal_the_equations(norm):
    x, gain = operands((3, 96))
    gain = gain[None] if norm == "RMS_NORM" else None
    kargs = settings(norm_type=norm, quantization_type="STATIC")
    scale = jnp.full((128, 1), 0.005)
    got = neuronjax.rmsnorm_quant(x, gain, kargs, scale)
    wanted, _ = reference(x, gain, kargs, scale=np.float64(np.float32(0.005)))
    assert (np.abs(wanted) == 240).any()
    assert got.shape == x.shape
    assert_codes(got, wanted)


def test_every_float32_pattern_rounds_as_its_cast():
    """Each 4099th of all bit patterns, subnormals, ties and NaN among them."""
    patterns = np.arange(0, 2**32, 4099, np.uint64).astype(np.uint32)
    values = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(s * np.inf)) for s in (-1, 1)]
    x = np.concatenate([patterns.view(np.float32), values, middles, *beside])
    x = x.astype(np.float32)
    got = np.asarray(jax.jit(e4m3_bytes)(jnp.asarray(x)))
    nan = np.isnan(x)
    wanted = np.clip(x[~nan], -240, 240).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(got[~nan], wanted)
    assert np.isnan(got[nan].view(E4M3).astype(np.float32)).all()


def test_a_row_of_zeros_has_finite_codes_and_scale():
    """R-21, with limit 240."""
    rows = jnp.array([[0.0, 0, 0, 0], [1, 2, 5, 8]])
    codes, scale = neuronjax.rmsnorm_quant(
        rows, None, settings(norm_type="NO_NORM"), packed=False
    )
    wide = codes.astype(jnp.float32)
    assert wide.tolist() == [[0, 0, 0, 0], [30, 60, 144, 240]]
    np.testing.assert_allclose(scale[:, 0], [1e-6, 8 / 240], rtol=1e-6)
    np.testing.assert_allclose((wide * scale)[1], [1, 2, 4.8, 8], rtol=1e-6)
    for eps in (0.0, 1e-6):
        codes, scale = neuronjax.rmsnorm_quant(
            rows, jnp.ones(4), settings(eps=eps), packed=False
        )
        assert not codes[0].astype(jnp.float32).any()
        np.testing.assert_allclose(scale[0], 1e-6)


def test_values_past_the_end_saturate_and_nan_stays():
    """R-22, with limit 240."""
    x = jnp.array([[448, 464, 465, 1000, -1000, jnp.nan, jnp.inf, -jnp.inf]])
    kargs = settings(norm_type="NO_NORM", quantization_type="STATIC")
    got = neuronjax.rmsnorm_quant(x, None, kargs, jnp.ones((128, 1)))
    wanted = [240, 240, 240, 240, -240, np.nan, 240, -240]
    np.testing.assert_array_equal(got[0].astype(jnp.float32), wanted)
    kargs = settings(norm_type="NO_NORM")
    codes, scale = neuronjax.rmsnorm_quant(x, None, kargs, packed=False)
    np.testing.assert_allclose(scale, [[1000 / 240]], rtol=1e-6)
    assert codes[0, 3:].astype(jnp.float32).tolist()[:2] == [240, -240]
    assert np.isnan(codes[0, 5].astype(jnp.float32))
    assert codes[0, 6:].astype(jnp.float32).tolist() == [240, -240]


@pytest.mark.parametrize("width", [96, 100])
@pytest.mark.parametrize("place", [0, 17, 95])
def test_a_nan_or_infinity_stays_in_its_row_and_out_of_the_scale(width, place):
    """Under jit, where XLA fuses the maximum: it may drop what stands beside a NaN."""
    x, gain = operands((6, width))
    broken = x.at[2, place].set(jnp.nan).at[4, place].set(-jnp.inf)
    for norm in ("RMS_NORM", "NO_NORM"):
        kargs, given = settings(norm_type=norm), gain if norm == "RMS_NORM" else None
        run = jax.jit(
            lambda x, g=given, kargs=kargs: neuronjax.rmsnorm_quant(
                x, g, kargs, packed=False
            )
        )
        (codes, scale), (wanted, expected) = run(broken), run(x)
        whole = np.array([0, 1, 3, 5])
        np.testing.assert_array_equal(codes[whole], wanted[whole])
        np.testing.assert_array_equal(scale[whole], expected[whole])
        assert np.isfinite(scale).all()
        wide = np.asarray(codes, np.float32)
        if norm == "NO_NORM":
            rest = np.delete(np.asarray(x), place, axis=1)
            top = np.abs(rest[[2, 4]]).max(-1, keepdims=True)
            np.testing.assert_allclose(scale[np.array([2, 4])], top / 240, rtol=1e-6)
            assert np.isnan(wide[2]).sum() == 1 and wide[4, place] == -240
        else:  # the mean of squares is NaN, or infinite
            assert np.isnan(wide[2]).all()
            assert np.isnan(wide[4, place]) and not np.delete(wide[4], place).any()
    gain = gain.at[place].set(jnp.nan)
    codes, scale = jax.jit(lambda x: neuronjax.rmsnorm_quant(x, gain, packed=False))(x)
    (_, expected) = reference(x, gain.at[place].set(0), settings())
    np.testing.assert_allclose(scale, expected, rtol=1e-5)
    assert (np.isnan(np.asarray(codes, np.float32)).sum(0) > 0).sum() == 1


def test_float16_squares_do_not_overflow():
    """R-19: 300 squared is past float16."""
    x = jnp.full((1, 4), 300, jnp.float16)
    codes, scale = neuronjax.rmsnorm_quant(x, jnp.ones(4, "float16"), packed=False)
    np.testing.assert_allclose(codes.astype(jnp.float32) * scale, 1, rtol=1e-6)


def test_scales_may_be_rounded_to_bfloat16():
    x, gain = operands((4, 64))
    (codes, scale), (_, exact) = (
        emit.rmsnorm_quant_kernel(x, gain, dst_dtype=d) for d in ("bfloat16", "float32")
    )
    np.testing.assert_array_equal(scale, exact.astype("bfloat16").astype("float32"))
    n, wanted = reference(x, gain, settings())
    assert_codes(codes, np.clip(n * wanted / np.asarray(scale), -240, 240))


@pytest.mark.parametrize("form", ["rows", "static"])
@pytest.mark.parametrize("shape", [(3, 256), (2, 3, 128), (5, 24)])
def test_tiles_equal_tensors(form, shape):
    x, gain = operands(shape)
    scale = jnp.full((128, 1), 0.01) if form == "static" else None
    wanted = emit.rmsnorm_quant_kernel(x, gain, scale)
    axis = len(shape) - 1
    tiles = [MemrefTile.from_tensor(x, axis), MemrefTile.from_tensor(gain, 0)]
    tiles += [] if scale is None else [MemrefTile.from_tensor(scale, 0)]
    got = emit.rmsnorm_quant_kernel(*tiles)
    assert len(got) == len(wanted)
    assert_codes(got[0].to_tensor(), wanted[0])
    if scale is None:
        np.testing.assert_allclose(got[1].to_tensor(), wanted[1], rtol=1e-6)
    counts = neuronjax.trace(lambda t: emit.rmsnorm_quant_kernel(*t), tiles)
    assert counts.count("TiledNativeKernelRMSNormQuant") == 1


def test_a_tiled_leaf_keeps_its_operands_tiled():
    x, gain = operands((3, 256))
    data = [MemrefTile.from_tensor(x, 1).data, MemrefTile.from_tensor(gain, 0).data]
    family = neuronjax.primitives.registry.resolve_family("RMSNormQuant")
    name = "TiledNativeKernelRMSNormQuant"

    def run(*data):
        return family.leaf(
            *data, None, name=name, norm="rms", eps=1e-6, is_static=False, is_tiled=True
        )

    jaxpr = jax.make_jaxpr(run)(*data).jaxpr
    for eqn in jaxpr.eqns:
        if set(map(id, eqn.invars)) & set(map(id, jaxpr.invars)):
            assert eqn.primitive.name not in ("reshape", "transpose"), eqn


def test_the_emitter_refuses_in_the_contract_s_words():
    x, gain = operands((2, 8))
    for given, words in (
        (dict(eps=1), "Expecting eps input to have type float"),
        (dict(dst_dtype="float16"), "dst_dtype must be float32 or bfloat16."),
    ):
        with pytest.raises(ValueError) as refusal:
            emit.rmsnorm_quant_kernel(x, gain, **given)
        assert words in str(refusal.value).splitlines()


def test_what_the_peer_s_tests_refuse_is_reported():
    """Sizes are the chip's: they run here; a negative bound never does."""
    gain = jax.ShapeDtypeStruct((16385,), "float32")
    wide = jax.ShapeDtypeStruct((1, 128, 16385), "float32")
    long = jax.ShapeDtypeStruct((1, 32769, 16384), "float32")
    many = jax.ShapeDtypeStruct((3, 128, 16384), "float32")
    short = jax.ShapeDtypeStruct((16384,), "float32")
    for x, g, nearest in (
        (wide, gain, {"H": 16384}),
        (long, short, {"S": 32768}),
        (many, short, {"B": 2}),
    ):
        report = neuronjax.can("rmsnorm_quant", x, g)
        assert bool(report) and not report.on_chip and report.nearest == nearest
    with pytest.raises(ValueError, match="lower_bound must not be negative"):
        neuronjax.rmsnorm_quant(*operands(), settings(lower_bound=-0.1))


def test_options_without_a_use_are_refused():
    """R-27."""
    x, gain = operands((2, 8))
    static = settings(quantization_type="STATIC", lower_bound=0.5)
    scale = jnp.ones((128, 1))
    for args, words in (
        ((x, gain, settings(norm_type="NO_NORM")), "None with NO_NORM"),
        ((x, gain, static, scale), "must be 0 for STATIC"),
        ((x, gain, settings(), scale), "None for ROW"),
    ):
        with pytest.raises(ValueError, match=words):
            neuronjax.rmsnorm_quant(*args)


def test_differentiating_refuses_with_the_reason():
    """R-27: zeros would be silent."""
    x, gain = operands((2, 8))
    run = lambda x: neuronjax.rmsnorm_quant(x, gain, packed=False)[1].sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="fp8 codes carry no derivative"):
        jax.grad(run)(x)


@pytest.mark.parametrize("eps", [1e-5, np.float64(1e-5), np.float32(1e-5)])
def test_scalars_of_any_kind_give_one_dtype(eps):
    """R-48."""
    x, gain = operands((2, 8), "bfloat16")
    codes, scale = neuronjax.rmsnorm_quant(x, gain, settings(eps=eps), packed=False)
    assert (codes.dtype, scale.dtype) == (E4M3, "float32")


def test_a_mapped_call_equals_a_loop():
    """R-42."""
    x, gain = operands((4, 3, 64))
    run = lambda x, g: neuronjax.rmsnorm_quant(x, g)  # noqa: E731
    codes, scale = neuronjax.unpack_rows(jax.vmap(run, (0, None))(x, gain))
    for i, rows in enumerate(x):
        wanted = neuronjax.unpack_rows(run(rows, gain))
        assert_codes(codes[i], wanted[0])
        np.testing.assert_allclose(scale[i], wanted[1], 1e-6)


def test_scale_bytes_that_read_as_nan_survive():
    """XLA moves fp8 through float16 and gives every NaN one byte."""
    raw = np.arange(0x3B7A7B7C, 0x3B7A7B7C + 2048, dtype=np.uint32)
    raw = np.concatenate([raw, raw * np.uint32(257) & np.uint32(0x7F7FFFFF)])
    scale = jnp.asarray(raw.view(np.float32)[:, None])
    codes = jnp.ones((len(raw), 3), E4M3)
    for run in (lambda f, *a: f(*a), lambda f, *a: jax.jit(f)(*a)):
        packed = run(neuronjax.pack_rows, codes, scale)
        assert np.isnan(packed.astype(jnp.float32)).any()
        again, got = run(neuronjax.unpack_rows, packed)
        np.testing.assert_array_equal(got, scale)
        np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("explicit", [False, True])
def test_rows_may_be_split_over_a_mesh(explicit):
    x, gain = operands((4, 3, 64))
    wanted = neuronjax.rmsnorm_quant(x, gain)
    mesh = make_mesh(data=2, explicit=explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        whole = jax.jit(neuronjax.rmsnorm_quant)(placed, gain)
        local = jax.shard_map(
            neuronjax.rmsnorm_quant, in_specs=(P("data"), P()), out_specs=P("data")
        )
        split = jax.jit(local)(placed, gain)
    for got in (whole, split):
        codes, scale = neuronjax.unpack_rows(jax.device_get(got))
        expected = neuronjax.unpack_rows(wanted)
        np.testing.assert_array_equal(codes, expected[0])
        np.testing.assert_allclose(scale, expected[1], rtol=1e-6)


def test_symbolic_rows_export():
    """R-49."""
    x, gain = operands((3, 64))
    (rows,) = export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((rows, 64), "float32"), gain
    run = jax.jit(neuronjax.rmsnorm_quant)
    saved = export.export(run, platforms=["cpu", "tpu", "cuda"])(*shapes)
    got = export.deserialize(saved.serialize()).call(x, gain)
    np.testing.assert_array_equal(
        *(np.asarray(z).view("u1") for z in (got, run(x, gain)))
    )


@pytest.mark.parametrize("plain", [False, True])
def test_float64_rows_beyond_a_float32_scale_saturate(plain):
    largest = float(np.finfo(np.float32).max)
    with jax.enable_x64(True):
        x = jnp.array([[1e100, -1e100, 1e40], [-2.0, 1.0, 0.0]])
        with neuronjax.plain() if plain else contextlib.nullcontext():
            codes, scale = neuronjax.rmsnorm_quant(
                x, None, settings(norm_type="NO_NORM"), packed=False
            )
        assert scale[0] == largest and scale.dtype == "float32"
        wide = codes.astype(jnp.float64)
        wanted = np.asarray(1e40 / largest, E4M3)
        assert wide[0].tolist() == [240, -240, float(wanted)]
        assert wide[1].tolist() == [-240, 120, 0]


@pytest.mark.parametrize("kargs", [{}, None])
def test_settings_of_another_type_are_refused(kargs):
    x, gain = operands((2, 8))
    with pytest.raises(ValueError, match="^rmsnorm_quant: kargs must be an Rms"):
        neuronjax.rmsnorm_quant(x, gain, kargs)


def test_tiles_are_refused_by_the_public_function():
    x, gain = operands((2, 8))
    with pytest.raises(ValueError, match="^rmsnorm_quant: its operands must be"):
        neuronjax.rmsnorm_quant(MemrefTile.from_tensor(x, 1), gain)


def test_rows_whose_squares_overflow_are_zeros_as_stated():
    x = jnp.array([[1e30, -2e30], [1e18, -2e18]])
    codes, scale = neuronjax.rmsnorm_quant(x, jnp.ones(2), settings(), packed=False)
    assert codes.astype(jnp.float32).tolist() == [[0, 0], [120, -240]]
    np.testing.assert_allclose(scale[:, 0], [1e-6, 2 / 2.5**0.5 / 240], rtol=1e-6)
