"""Quantized QKV against its equations in float64: scales, clips, gradients, memory."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import MemrefTile, emit
from tests.macro_case import error
from tests.qkv_case import (
    call,
    emitter_arguments,
    operands,
    reference,
    tiles_of,
)

HEADS = (3, 2, 6)
E4M3 = ml_dtypes.float8_e4m3


def quantized(arrays, options, kind, dtype="float8_e4m3", in_scale=1 / 32, rows=1):
    """The same call with a weight of fp8 values and the scales of `kind`."""
    weight = arrays["fused_qkv_weights"].astype("float8_e4m3").astype(dtype)
    columns = weight.shape[1] if kind == "ROW" else 3
    scale = np.linspace(0.5, 1.5, columns, dtype="float32")
    scales = dict(qkv_w_scale=jnp.tile(scale, (rows, 1)))
    if kind == "STATIC":
        scales["qkv_in_scale"] = jnp.full((rows, 1), in_scale, "float32")
    options = dict(options, quantization_type=kind)
    return dict(arrays, fused_qkv_weights=weight) | scales, options


def static_codes(in_scale, rounds):
    """`clip(x / in_scale, -240, 240)`, rounded where the weight is fp8, times it."""

    def codes(rows):
        clipped = np.clip(rows / in_scale, -240, 240)
        return (clipped.astype(E4M3).astype("f8") if rounds else clipped) * in_scale

    return codes


def wanted(arrays, options, in_scale=1 / 32):
    """The reference of a quantized call: the dequantized weight, the codes."""
    arrays, kind = dict(arrays), options["quantization_type"]
    nq, nkv, d = (options[k] for k in ("num_q_heads", "num_kv_heads", "d_head"))
    scale = np.asarray(arrays.pop("qkv_w_scale"), "f8")[0]
    arrays.pop("qkv_in_scale", None)
    weight = arrays["fused_qkv_weights"]
    rounds = weight.dtype.itemsize == 1
    scale = scale if kind == "ROW" else scale.repeat([nq * d, nkv * d, nkv * d])
    arrays["fused_qkv_weights"] = np.asarray(weight, "f8") * scale
    codes = static_codes(in_scale, rounds) if kind == "STATIC" else lambda rows: rows
    return reference(arrays, options, codes=codes)


def weighted(out):
    """A linear loss: its cotangent is exact in bfloat16, whatever the output is."""
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype("bfloat16")
    return (weights.astype("float32") * out.astype("float32")).sum()


KINDS = [
    ("ROW", "float8_e4m3", 2e-6),
    ("ROW", "float32", 2e-6),
    ("STATIC", "float32", 2e-6),
    # Out comes in bfloat16, and a code may round the other way behind a norm.
    ("STATIC", "float8_e4m3", 6e-3),
]


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(
    ("norm", "layout", "add", "rope"),
    [
        ("RMS_NORM", "BSD", False, False),
        ("LAYER_NORM", "NBSd", True, True),
        ("NO_NORM", "BSD", False, True),
        ("RMS_NORM_SKIP_GAMMA", "NBSd", True, False),
    ],
)
def test_both_kinds_equal_the_equations(
    kind, dtype, tolerance, norm, layout, add, rope
):
    """R-21 to R-25: a scale of each column or group, behind the product."""
    plain = call(operands((2, 3, 96), HEADS), HEADS, norm, layout, add, rope)
    arrays, options = quantized(*plain, kind, dtype)
    out = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))(arrays)
    narrow = kind == "STATIC" and dtype == "float8_e4m3"
    assert out.dtype == (jnp.bfloat16 if narrow else jnp.float32)
    assert error(out, wanted(arrays, options)[0]) < tolerance


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), KINDS)
def test_decode_takes_both_kinds_and_returns_the_sum(kind, dtype, tolerance):
    plain = call(operands((2, 3, 96), HEADS), HEADS, rope=False)
    arrays, options = quantized(*plain, kind, dtype)
    out, total = neuronjax.qkv(**arrays, **options)
    expected = wanted(arrays, options)
    assert error(out, expected[0]) < tolerance and error(total, expected[1]) < 1e-6
    assert total.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_a_scale_on_128_equal_rows_is_the_scale_on_one(kind):
    plain = call(operands((2, 3, 96), HEADS), HEADS)
    outs = [
        neuronjax.qkv_cte(**arrays, **options)
        for arrays, options in (quantized(*plain, kind, rows=n) for n in (1, 128))
    ]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
@pytest.mark.parametrize("dtype", ["float8_e4m3", "float32"])
def test_tiles_equal_tensors(kind, layout, dtype):
    heads = (1, 1, 128)
    plain = call(operands((2, 3, 256), heads), heads, "NO_NORM", layout)
    arrays, options = quantized(*plain, kind, dtype, in_scale=1.0)

    def run(x, tiled):
        moved = dict(arrays, input=x)
        given = emitter_arguments(tiles_of(moved) if tiled else moved, options)
        out = emit.qkv_fused_add_kernel(**given)
        assert isinstance(out, MemrefTile) is tiled
        return out.to_tensor() if tiled else out

    def loss(x, tiled):
        return weighted(run(x, tiled))

    x, narrow = arrays["input"], kind == "STATIC" and dtype != "float32"
    whole, tiled = (run(x, tiled) for tiled in (False, True))
    assert error(tiled, whole) < (4e-3 if narrow else 1e-5)
    whole, tiled = (jax.grad(loss)(x, tiled) for tiled in (False, True))
    assert error(tiled, whole) < 1e-5


@pytest.mark.parametrize("width", [576, 1024, 8192])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_real_sizes(width, dtype, kind):
    """At most twice the error of the plain computation in the same dtype."""
    heads = (2, 1, 128)
    x = operands((1, 4, width), heads, dtype)
    x["fused_qkv_weights"] = x["fused_qkv_weights"] * width**-0.5
    arrays, options = quantized(*call(x, heads, rope=False), kind)
    run = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))
    got = run(arrays)
    with neuronjax.plain():
        plain = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))(arrays)
    expected, _ = wanted(arrays, options)
    assert error(got, expected) <= 2 * error(plain, expected) + 1e-6
    assert error(got, expected) < (5e-6 if got.dtype == jnp.float32 else 2e-2)


def differentiable(arrays):
    constant = ("fused_qkv_weights", "qkv_w_scale", "qkv_in_scale")
    return {k: v for k, v in arrays.items() if k not in constant}


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
@pytest.mark.parametrize("norm", ["RMS_NORM", "LAYER_NORM"])
def test_gradients_are_those_of_the_dequantized_computation(kind, norm):
    """Without a rounding (a wider weight) they are the numeric ones, twice."""
    plain = call(operands(scale=0.7), (2, 1, 4), norm, eps=1e-2)
    arrays, options = quantized(*plain, kind, "float32")
    held = {k: v for k, v in arrays.items() if k not in differentiable(arrays)}

    def run(live):
        return neuronjax.qkv_cte(**held, **live, **options)

    live = differentiable(arrays)
    check_grads(jax.jit(run), (live,), 1, ["rev", "fwd"], atol=2e-2, rtol=2e-2)
    with jax.enable_x64(True):
        wide = {k: v.astype("float64") for k, v in live.items()}
        check_grads(jax.jit(run), (wide,), order=2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_a_rounding_passes_straight_through(kind):
    """A linear loss has the gradient of the same call without the rounding."""
    plain = call(operands((2, 3, 96), HEADS), HEADS, rope=False)
    grads = []
    for dtype in ("float8_e4m3", "float32"):
        arrays, options = quantized(*plain, kind, dtype)
        held = {k: v for k, v in arrays.items() if k not in differentiable(arrays)}

        def run(live, held=held, options=options):
            return weighted(neuronjax.qkv_cte(**held, **live, **options))

        grads.append(jax.jit(jax.grad(run))(differentiable(arrays)))
    for name, wide in grads[1].items():
        assert error(grads[0][name], wide) < 2e-6, name


def test_beyond_the_clip_the_gradient_is_zero():
    x = jnp.array([[[1.0, -300.0, 239.0, 500.0]]])
    weight = jnp.ones((4, 3), "float8_e4m3")
    scales = dict(qkv_w_scale=jnp.ones((1, 3)), qkv_in_scale=jnp.ones((1, 1)))
    counts = dict(d_head=1, num_q_heads=1, num_kv_heads=1)

    def run(x):
        out = neuronjax.qkv(x, weight, quantization_type="STATIC", **scales, **counts)
        return out.astype("float32").sum()

    np.testing.assert_array_equal(jax.grad(run)(x), [[[3.0, 0.0, 3.0, 0.0]]])


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_weight_and_scales_are_constants(kind):
    """R-45: fp8 weights have no tangent, wider ones and scales a zero gradient."""
    plain = call(operands(), (2, 1, 4))
    for dtype in ("float32", "float8_e4m3"):
        arrays, options = quantized(*plain, kind, dtype)
        _, pull = jax.vjp(lambda a, o=options: neuronjax.qkv_cte(**a, **o), arrays)
        out = jax.eval_shape(lambda a, o=options: neuronjax.qkv_cte(**a, **o), arrays)
        (grads,) = pull(jnp.ones(out.shape, out.dtype))
        for name in set(arrays) - set(differentiable(arrays)):
            assert not np.asarray(grads[name], "float32").any()
        assert np.asarray(grads["input"]).any()


def test_zeros_infinities_and_nan():
    """R-21, R-22: a row of zeros is the bias; infinities saturate; NaN stays alone."""
    x = jnp.array([[[0.0, 0.0], [jnp.inf, 0.0], [-1e9, 0.0], [jnp.nan, 0.0], [1, 2]]])
    counts = dict(d_head=1, num_q_heads=1, num_kv_heads=1)
    weight, bias = jnp.ones((2, 3), "float8_e4m3"), jnp.full((1, 3), 5.0)
    scales = dict(qkv_w_scale=jnp.ones((1, 3)), qkv_in_scale=jnp.ones((1, 1)))
    given = dict(scales, **counts, quantization_type="STATIC", bias=bias)
    for w in (weight, weight.astype("float32")):
        out = np.asarray(neuronjax.qkv(x, w, **given), "float32")[0, :, 0]
        np.testing.assert_allclose(out, [5, 245, -235, np.nan, 8], rtol=8e-3)
    # ROW quantizes no activation: an infinity is seen in the output, as is NaN.
    scales = dict(qkv_w_scale=jnp.ones((1, 3)))
    out = neuronjax.qkv(x, weight, quantization_type="ROW", **scales, bias=bias)
    assert np.isinf(out[0, 1]).all() and np.isnan(out[0, 3]).all()
    np.testing.assert_array_equal(out[0, 0], bias[0])


def test_a_zero_row_behind_a_norm_is_the_bias():
    heads = (2, 1, 4)
    plain = call(operands((1, 2, 6), heads), heads, "RMS_NORM", add=False, rope=False)
    for kind in ("ROW", "STATIC"):
        arrays, options = quantized(*plain, kind)
        arrays["input"] = arrays["input"].at[0, 0].set(0)
        out = neuronjax.qkv_cte(**arrays, **options)
        np.testing.assert_array_equal(out[0, 0], arrays["bias"][0].astype(out.dtype))


@pytest.mark.parametrize("function", ["qkv", "qkv_cte"])
def test_an_fp8_input_counts_as_its_values(function):
    heads = (2, 1, 4)
    plain = call(operands(), heads, add=False, rope=False)
    arrays, options = quantized(*plain, "ROW")
    arrays["input"] = arrays["input"].astype("float8_e4m3")
    out = getattr(neuronjax, function)(**arrays, **options)
    wide = dict(arrays, input=arrays["input"].astype("bfloat16"))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, neuronjax.qkv_cte(**wide, **options))


def test_a_divisor_that_is_known_and_not_positive_is_refused():
    x, weight = jnp.ones((1, 2, 4)), jnp.ones((4, 3), "float8_e4m3")
    counts = dict(d_head=1, num_q_heads=1, num_kv_heads=1)
    for value in (0.0, -1.0, jnp.nan, jnp.inf):
        scales = dict(
            qkv_w_scale=jnp.ones((1, 3)), qkv_in_scale=jnp.full((1, 1), value)
        )
        with pytest.raises(ValueError, match="^qkv: qkv_in_scale must be positive"):
            neuronjax.qkv(x, weight, quantization_type="STATIC", **scales, **counts)


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_the_name_stays_and_the_scales_are_appended(kind):
    arrays, options = quantized(*call(operands(), (2, 1, 4)), kind)
    jaxpr = jax.make_jaxpr(lambda a: neuronjax.qkv_cte(**a, **options))(arrays)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "qkv"]
    config = dict(eqn.params["config"])
    assert eqn.params["name"] == "QKV"
    assert (config["quantization"], config["is_fp8_kernel"]) == (kind, True)
    assert len(eqn.invars) == len(arrays)
    assert eqn.invars[-1].aval.shape == ((1, 16) if kind == "ROW" else (1, 1))


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
def test_no_weight_is_dequantized_as_a_whole(rows, kind):
    """Decode and prefill, forward and backward: less than a byte a weight is taken."""
    width, heads = 2048, dict(d_head=128, num_q_heads=16, num_kv_heads=8)
    columns = 32 * 128
    shapes = [((1, rows, width), "bfloat16"), ((width, columns), "float8_e4m3")]
    shapes += [((1, columns if kind == "ROW" else 3), "float32"), ((1, 1), "float32")]
    x, w, scale, one = (jax.ShapeDtypeStruct(*s) for s in shapes)

    def run(x, w, scale, one):
        given = dict(heads, qkv_w_scale=scale, quantization_type=kind)
        given |= dict(qkv_in_scale=one) if kind == "STATIC" else {}
        return neuronjax.qkv(x, w, **given)

    def gradient(x, *rest):
        return jax.grad(lambda x: run(x, *rest).astype("float32").sum())(x)

    activations = 4 * rows * (width + 2 * columns)
    for fun in (run, gradient):
        compiled = jax.jit(fun).lower(x, w, scale, one).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        assert used < width * columns + activations
