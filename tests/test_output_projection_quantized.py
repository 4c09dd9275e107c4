"""The quantized output projection against its equations in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.output_projection import sharded_output_projection
from tests.macro_case import error
from tests.test_output_projection import (
    FORMS,
    operands,
    reference,
    tiles_of,
    transposed,
)

KINDS = ["ROW", "STATIC", "STATIC_MX"]
CODES = dict(STATIC=(240, "float8_e4m3"), STATIC_MX=(448, "float8_e4m3fn"))
IN_SCALE = 1 / 64


def interleaved(weight):
    """The stored form of STATIC_MX: `[rows/4, H, 4]` holds row `4r + j` at `j`."""
    rows, width = weight.shape
    stored = np.zeros((rows // 4, width, 4), weight.dtype)
    for r, j in np.ndindex(rows // 4, 4):
        stored[r, :, j] = weight[4 * r + j]
    return stored.reshape(rows, width)


def quantized(
    kind, held=None, rows=1, form="BNDS", sizes=(2, 3, 8, 5), width=6, **more
):
    """Operands with the scales of `kind`, and the logical weight in float64.

    The weight's fp8 values are held in the dtype `held`.
    """
    attention, weight, bias = operands(form, sizes, width, **more)
    narrow = CODES.get(kind, (0, "float8_e4m3"))[1]
    weight = np.asarray(weight.astype(narrow))
    stored = interleaved(weight) if kind == "STATIC_MX" else weight
    stored = jnp.asarray(stored).astype(held or narrow)
    scale = np.linspace(0.5, 1.5, width) if kind == "ROW" else np.array([0.75])
    scales = [jnp.tile(jnp.asarray(scale, "float32"), (rows, 1)), None]
    if kind != "ROW":
        scales[1] = jnp.full((rows, 1), IN_SCALE, "float32")
    return [attention, stored, bias, *scales], np.asarray(weight, "f8")


def wanted(kind, form, arrays, weight):
    """`(codes @ W) * scale + bias`; codes are rounded where the weight is fp8."""
    attention, stored, bias, scale, _ = arrays
    a, scale = np.asarray(attention, "f8"), np.asarray(scale, "f8")[0]
    if kind in CODES:
        limit, dtype = CODES[kind]
        a = np.clip(a / IN_SCALE, -limit, limit)
        if stored.dtype.itemsize == 1:
            a = a.astype(getattr(ml_dtypes, dtype)).astype("f8")
        scale = scale * IN_SCALE
    return reference(form, a, weight * scale, bias)


def project(form, kind, attention, weight, bias, scale, in_scale, **options):
    """The public function of `form`."""
    names = ("weight_scale", "input_scale")
    names = [f"{name}s" for name in names] if form == "BNDS" else names
    scales = dict(zip(names, (scale, in_scale), strict=True))
    options |= dict(quantization_type=kind, **scales)
    return FORMS[form](attention, weight, bias, **options)


CASES = [(kind, form) for kind in KINDS for form in FORMS]
CASES.remove(("STATIC_MX", "DBNS"))


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (None, (2, 3, 8, 5)),
        (None, (3, 5, 96, 2)),
        ("float8_e4m3fn", (1, 2, 6, 1)),
        ("float32", (2, 3, 8, 5)),
    ],
)
def test_every_kind_equals_the_equation(kind, form, dtype, sizes):
    """Both fp8 types; the bias, far from zero, comes behind the scales."""
    arrays, weight = quantized(kind, dtype, form=form, sizes=sizes)
    out = jax.jit(lambda *a: project(form, kind, *a))(*arrays)
    assert out.dtype == jnp.float32
    # A quotient on the edge between two codes may round the other way in float64.
    assert error(out, wanted(kind, form, arrays, weight)) < 4e-6


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
@pytest.mark.parametrize(("width", "cores"), [(256, None), (128, None), (512, 1)])
def test_the_transposed_output_of_a_quantized_product(kind, width, cores):
    arrays, weight = quantized(kind, form="DBNS", width=width)
    out = project("DBNS", kind, *arrays, TRANSPOSE_OUT=True, lnc=cores)
    cores = cores or (2 if width % 256 == 0 else 1)
    expected = transposed(wanted(kind, "DBNS", arrays, weight), cores)
    assert out.shape == expected.shape and error(out, expected) < 4e-6


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_scale_on_128_equal_rows_is_the_scale_on_one(kind, form):
    outs = [
        project(form, kind, *quantized(kind, rows=rows, form=form)[0])
        for rows in (1, 128)
    ]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_tiles_equal_tensors(kind, form, dtype):
    arrays, _ = quantized(kind, dtype, form=form, sizes=(2, 3, 8, 5), width=256)

    def run(attention, tiled):
        given = [attention, *arrays[1:]]
        if tiled:
            given[:3] = tiles_of(form, *given[:3])
            given[3:] = [
                None if x is None else MemrefTile.from_tensor(x, 1) for x in given[3:]
            ]
        out = emit.output_projection_kernel(*given, quantization_type=kind, form=form)
        return out.to_tensor() if tiled else out

    def loss(attention, tiled):
        return jnp.sin(run(attention, tiled)).sum()

    a = arrays[0]
    assert error(run(a, True), run(a, False)) < 1e-5
    assert error(jax.grad(loss)(a, True), jax.grad(loss)(a, False)) < 1e-4


@pytest.mark.parametrize("width", [576, 1024, 8192])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_real_sizes(width, dtype, kind, form):
    """512 rows; at most twice the error of the plain computation in the same dtype."""
    sizes = (1, 4, 128, 3)
    arrays, weight = quantized(kind, None, 1, form, sizes, width, dtype=dtype)
    arrays[2] /= 100
    got = jax.jit(lambda *a: project(form, kind, *a))(*arrays)
    with neuronjax.plain():
        plain = jax.jit(lambda *a: project(form, kind, *a))(*arrays)
    expected = wanted(kind, form, arrays, weight)
    assert got.dtype == jnp.dtype(dtype)
    assert error(got, expected) <= 2 * error(plain, expected) + 1e-6


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_gradients_are_those_of_the_dequantized_computation(kind, form):
    """Without a rounding (a wider weight) they are the numeric ones, twice."""
    arrays, _ = quantized(kind, "float32", form=form)
    arrays[2] /= 100

    def run(attention, bias):
        out = project(form, kind, attention, arrays[1], bias, *arrays[3:])
        return jnp.sin(out / 4)

    live = (arrays[0], arrays[2])
    check_grads(jax.jit(run), live, 1, ["rev", "fwd"], atol=2e-2, rtol=2e-2)
    with jax.enable_x64(True):
        check_grads(jax.jit(run), [x.astype("float64") for x in live], order=2)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_rounding_passes_straight_through(kind, form):
    """A linear loss has the gradient of the same call without the rounding."""

    def gradient(dtype):
        arrays, _ = quantized(kind, dtype, form=form)

        def loss(attention, bias):
            out = project(form, kind, attention, arrays[1], bias, *arrays[3:])
            return (jnp.cos(jnp.arange(out.size)).reshape(out.shape) * out).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(arrays[0], arrays[2])

    for narrow, wide in zip(gradient(None), gradient("float32"), strict=True):
        assert error(narrow, wide) < 2e-6


@pytest.mark.parametrize(("kind", "limit"), [("STATIC", 240), ("STATIC_MX", 448)])
def test_beyond_the_clip_values_saturate_and_gradients_are_zero(kind, limit):
    """R-22: infinities saturate, NaN stays alone, zeros are the bias (R-21)."""
    values = jnp.array([1.0, -500.0, 0.0, jnp.inf, jnp.nan, limit - 1.0])
    attention = jnp.zeros((1, 1, 4, 6)).at[0, 0, 0].set(values)
    weight, one = jnp.ones((4, 1), "float8_e4m3fn"), jnp.ones((1, 1))

    def run(attention):
        bias = jnp.full((1, 1), 2.0)
        return project("BNDS", kind, attention, weight, bias, one, one)[0, :, 0]

    # 447 rounds to 448 and 239 to 240: the largest code.
    expected = [3, 2 - limit, 2, 2 + limit, np.nan, 2 + limit]
    np.testing.assert_array_equal(run(attention), expected)
    grads = jax.grad(lambda a: run(a)[jnp.array([0, 1, 3, 5])].sum())(attention)
    np.testing.assert_array_equal(grads[0, 0, 0], [1, 0, 0, 0, 0, 1])


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_weight_and_scales_are_constants(kind, form):
    """R-45."""
    for dtype in (None, "float32"):
        arrays, _ = quantized(kind, dtype, form=form)
        out, pull = jax.vjp(lambda *a: project(form, kind, *a), *arrays)
        grads = pull(jnp.ones_like(out))
        constants = [grads[1], *[g for g in grads[3:] if g is not None]]
        assert not any(np.asarray(g, "float32").any() for g in constants)
        assert np.asarray(grads[0]).any() and np.asarray(grads[2]).any()


def test_output_dtype_is_honoured_and_bfloat16_stays():
    """R-24."""
    arrays, weight = quantized("STATIC")
    arrays = [a.astype("bfloat16") if i in (0, 2) else a for i, a in enumerate(arrays)]
    out = project("BNDS", "STATIC", *arrays, output_dtype="float32")
    assert out.dtype == jnp.float32
    assert error(out, wanted("STATIC", "BNDS", arrays, weight)) < 4e-6
    assert project("BNDS", "STATIC", *arrays).dtype == jnp.bfloat16
    grad = jax.grad(lambda a: project("BNDS", "STATIC", a, *arrays[1:]).sum())
    assert grad(arrays[0]).dtype == jnp.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_a_divisor_that_is_known_and_not_positive_is_refused(form):
    arrays, _ = quantized("STATIC", form=form)
    arrays[4] = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match="input_scales? must be positive and finite"):
        project(form, "STATIC", *arrays)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, [1.0], jnp.ones((1, 1), jnp.bfloat16)])
def test_a_scale_that_is_no_float32_array_is_refused_by_name(form, scale):
    arrays, _ = quantized("STATIC", form=form)
    kind = getattr(scale, "dtype", type(scale).__name__)
    for at, words in ((3, f"{kind} for weight_scale"), (4, f"{kind} for input_scale")):
        given = [*arrays[:at], scale, *arrays[at + 1 :]]
        with pytest.raises(ValueError, match=f"must be float32, got .*{words}"):
            project(form, "STATIC", *given)


def test_the_chips_own_limits_are_reported():
    arrays, _ = quantized("ROW")
    given = dict(quantization_type="ROW", weight_scales=arrays[3])
    report = neuronjax.can("output_projection_cte", *arrays[:3], **given)
    assert report and not report.on_chip and "no quantization_type ROW" in str(report)


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_the_name_stays_and_the_scales_are_appended(kind):
    arrays, _ = quantized(kind)
    jaxpr = jax.make_jaxpr(lambda *a: project("BNDS", kind, *a))(*arrays)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "output_projection"]
    config = dict(eqn.params["config"])
    assert eqn.params["name"] == "OutputProjection"
    assert (config["quantization"], config["is_fp8_kernel"]) == (kind, True)
    assert len(eqn.invars) == sum(x is not None for x in arrays)


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize(("data", "tensor"), [(1, 3), (2, 2)])
def test_heads_and_batch_split_over_a_mesh(kind, form, data, tensor):
    """R-43: values and gradients are those of one device."""
    arrays, _ = quantized(kind, form=form, sizes=(2, 2 * tensor, 4, 3))
    mesh = make_mesh(data=data, tensor=tensor)

    def split(attention, bias):
        given = (attention, arrays[1], bias, *arrays[3:])
        more = dict(form=form, batch="data", quantization_type=kind)
        return sharded_output_projection(mesh, *given, **more)

    def whole(attention, bias):
        return project(form, kind, attention, arrays[1], bias, *arrays[3:])

    live = (arrays[0], arrays[2])
    out, pull = jax.vjp(jax.jit(split), *live)
    expected, plain_pull = jax.vjp(whole, *live)
    assert error(out, expected) < 1e-5
    for a, b in zip(pull(jnp.cos(out)), plain_pull(jnp.cos(out)), strict=True):
        assert error(a, b) < 1e-4


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_no_weight_is_dequantized_as_a_whole(kind, form):
    """Prefill and decode, forward and backward: less than two bytes a weight.

    STATIC_MX puts the rows of its weight in order, still in fp8: one byte a weight.
    """
    width, rows = 4096, 256 if form == "BNDS" else 4
    sizes = dict(B=1, N=16, D=128, S=rows)
    attention = jax.ShapeDtypeStruct(tuple(sizes[n] for n in form), "bfloat16")
    weight = jax.ShapeDtypeStruct((2048, width), "float8_e4m3fn")
    scale = jax.ShapeDtypeStruct((1, width if kind == "ROW" else 1), "float32")
    one = jax.ShapeDtypeStruct((1, 1), "float32")

    def run(attention, weight, scale, one):
        one = None if kind == "ROW" else one
        return project(form, kind, attention, weight, None, scale, one)

    def gradient(attention, *rest):
        return jax.grad(lambda a: run(a, *rest).astype("float32").sum())(attention)

    activations = 4 * rows * (2 * 2048 + width)
    ordered = weight.size if kind == "STATIC_MX" else 0
    for fun in (run, gradient):
        compiled = jax.jit(fun).lower(attention, weight, scale, one).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        assert used < 0.8 * weight.size + ordered + activations
