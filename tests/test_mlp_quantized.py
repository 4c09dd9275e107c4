"""`mlp` with fp8 weights: ROW and STATIC, decode and prefill, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import MemrefTile
from neuronjax.emit import quant_mlp_fused_add_kernel, quant_mlp_kernel
from neuronjax.kernels.mlp import quantized
from neuronjax.kernels.mlp.operands import Operands
from neuronjax.kernels.quantization import fp8
from neuronjax.sharding.mesh import make_mesh
from tests.mlp_equations import (
    COMBINATIONS,
    FULL,
    ids,
    quantized_call,
    quantized_equations,
)

KINDS = ("ROW", "STATIC")
# Each norm, each form of addition that `mlp` has, with and without a gate.
SOME = [c for i, c in enumerate(COMBINATIONS) if c[1] != "epilogue" and i % 5 == 0]


def _errors(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        yield np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combination", SOME, ids=ids)
def test_values_follow_the_equations(combination, kind, prefill):
    """In float64, where no rounding to fp8 falls on the other side."""
    with jax.enable_x64(True):
        arrays, settings, _ = quantized_call(kind, combination)
        if "up_clamp_lower_limit" in settings:  # 0.5 to 0.6 falls between two codes
            settings["up_clamp_lower_limit"] = -0.57
        got = neuronjax.mlp(**arrays, **settings, force_cte_mode=prefill)
    wanted = quantized_equations(arrays | settings, prefill)
    assert max(_errors(got, wanted)) < 1e-12


@pytest.mark.parametrize("codes", ["float8_e4m3", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [1, 96, 97])
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_96_rows_are_prefill(kind, rows, codes):
    arrays, settings, _ = quantized_call(
        kind, codes=codes, lead=(rows,), d_model=24, d_ff=20, dtype="float32"
    )
    got = neuronjax.mlp(**arrays, **settings)
    near, far = (
        max(_errors(got, quantized_equations(arrays | settings, prefill)))
        for prefill in (rows > 96, rows <= 96)
    )
    # A gated value in the middle of two fp8 ones may round to the other.
    assert near < (2e-3 if rows > 96 else 1e-5) < far


def test_weights_beyond_240_keep_their_value():
    """R-22: float8_e4m3fn ends at 448."""
    arrays, settings, _ = quantized_call(
        "ROW", codes="float8_e4m3fn", lead=(3,), dtype="float32"
    )
    arrays["up_proj_weights_tensor"] = jnp.full((12, 7), 448, jnp.float8_e4m3fn)
    got = neuronjax.mlp(**arrays, **settings)
    assert max(_errors(got, quantized_equations(arrays | settings, False))) < 1e-5


def _prequantized(kind, rows=97, dtype="float32"):
    arrays, settings, _ = quantized_call(
        kind, lead=(1, rows), d_model=24, d_ff=20, dtype=dtype
    )
    hidden = arrays["hidden_tensor"]
    if kind == "ROW":
        arrays["hidden_tensor"] = fp8.pack_rows(*fp8.quantize_rows(hidden))
    else:
        arrays["hidden_tensor"] = fp8.saturate(hidden * 64)
    return arrays, settings | dict(output_dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_come_quantized(kind, dtype):
    arrays, settings = _prequantized(kind, dtype=dtype)
    got = neuronjax.mlp(**arrays, **settings)
    assert got[0].dtype == dtype and got[0].shape == (1, 97, 24)
    wanted = quantized_equations(arrays | settings, True)
    tolerance = dict(float32=2e-3, bfloat16=1e-2)[dtype]
    assert max(_errors(got, wanted)) < tolerance
    with neuronjax.plain():
        assert max(_errors(neuronjax.mlp(**arrays, **settings), wanted)) < tolerance


def test_a_row_of_zeros_stays_zero():
    """R-21: of the gated values, whose largest is the scale."""
    arrays, settings, _ = quantized_call("ROW", lead=(2,), dtype="float32")
    arrays["hidden_tensor"] = arrays["hidden_tensor"].at[0].set(0)
    (out,) = neuronjax.mlp(**arrays, **settings, force_cte_mode=True)
    assert not out[0].any() and out[1].all()


def test_static_mx_is_static_with_its_weights_in_another_order():
    """The stored order, by the view and transposition that define it."""
    size = 512
    arrays, settings, _ = quantized_call(
        "STATIC", lead=(97,), d_model=size, d_ff=size, dtype="bfloat16"
    )
    stored = dict(arrays)
    view = (2, size // 512, 128, 2, size // 512, 128, 4)
    for which in ("gate", "up"):
        key = f"{which}_proj_weights_tensor"
        lanes = arrays[key].reshape(view).transpose(2, 1, 4, 6, 5, 0, 3)
        stored[key] = lanes.reshape(size, size)
    key = "down_proj_weights_tensor"
    lanes = arrays[key].reshape(size // 512, 128, 4, size).transpose(1, 0, 3, 2)
    stored[key] = lanes.reshape(size, size)
    wanted = neuronjax.mlp(**arrays, **settings)
    settings |= dict(quantization_type="STATIC_MX")
    got = neuronjax.mlp(**stored, **settings)
    np.testing.assert_array_equal(got[0], wanted[0])


def test_block_formats_of_rows_are_no_path():
    arrays, settings, _ = quantized_call("ROW", dtype="float32")
    with pytest.raises(ValueError, match="ROW_MX is taken by no path"):
        neuronjax.mlp(**arrays, **settings | dict(quantization_type="ROW_MX"))


def _dense(arrays, settings):
    """The call with dequantized weights: what the derivative is taken of."""
    dense = {k: x for k, x in arrays.items() if not k.endswith("_scale")}
    for which in ("gate", "up", "down"):
        key = f"{which}_proj_weights_tensor"
        scale = arrays[f"{which}_w_scale"][:1].astype(jnp.float64)
        dense[key] = arrays[key].astype(jnp.float64) * scale
    return dense, {k: v for k, v in settings.items() if "quant" not in k}


LIVE = ("hidden_tensor", "normalization_weights_tensor", "fused_add_tensor")
LIVE += tuple(f"{which}_proj_bias_tensor" for which in ("gate", "up", "down"))


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_dequantized_block(kind, prefill):
    """Where no clip cuts, a rounding passes the gradient straight through."""
    with jax.enable_x64(True):
        arrays, settings, _ = quantized_call(kind, FULL)
        if kind == "STATIC":
            arrays["down_in_scale"] = jnp.ones((128, 1), jnp.float32)
        dense, options = _dense(arrays, settings)
        live = {key: arrays[key] for key in LIVE}
        outs, pull = jax.vjp(
            lambda live: neuronjax.mlp(
                **(arrays | live), **settings, force_cte_mode=prefill
            ),
            live,
        )
        seeds = [
            jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape) for o in outs
        ]
        (got,) = pull(seeds)
        _, pull = jax.vjp(lambda live: neuronjax.mlp(**(dense | live), **options), live)
        (wanted,) = pull(seeds)
    for key, grad in got.items():
        np.testing.assert_allclose(grad, wanted[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_passes_no_gradient_from_outside(kind):
    one, eye = jnp.ones((128, 1)), jnp.eye(2).astype(jnp.float8_e4m3)
    wide = one if kind == "STATIC" else jnp.ones((128, 2))
    limits = dict(
        ROW=dict(quant_clipping_bound=1.0),
        STATIC=dict(gate_up_in_scale=one, down_in_scale=one / 240),
    )[kind]
    call = functools.partial(
        neuronjax.mlp,
        gate_proj_weights_tensor=None,
        up_proj_weights_tensor=eye,
        down_proj_weights_tensor=eye,
        up_w_scale=wide,
        down_w_scale=wide,
        quantization_type=kind,
        skip_gate_proj=True,
        force_cte_mode=True,
        **limits,
    )
    x = jnp.array([[3.0, 0.5]])
    (out,) = call(x)
    np.testing.assert_allclose(out, [[1.0, 0.5 * jax.nn.sigmoid(0.5)]], rtol=0.07)
    gradient = jax.grad(lambda x: call(x)[0].sum())(x)
    slope = jax.grad(jax.nn.silu)(0.5)
    np.testing.assert_allclose(gradient, [[0, slope]], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_scales_are_constants(kind):
    """R-45: a gradient is asked of all; quantized values and scales have none."""
    arrays, settings, _ = quantized_call(kind, FULL, dtype="bfloat16")
    outs, pull = jax.vjp(lambda a: neuronjax.mlp(**a, **settings), arrays)
    (grads,) = pull(outs)
    for key, grad in grads.items():
        constant = key.endswith("_scale") or "proj_weights" in key
        assert grad.dtype == arrays[key].dtype
        assert np.any(np.asarray(grad, np.float32)) != constant, key


def test_the_backward_repeats_no_product_of_the_forward():
    arrays, settings, _ = quantized_call("ROW", dtype="float32")
    seen = neuronjax.trace(
        jax.grad(lambda a: neuronjax.mlp(**(arrays | a), **settings)[0].sum()),
        dict(hidden_tensor=arrays["hidden_tensor"]),
    )
    assert seen.count("MLP") == 1 and seen.count("MLPBwd") == 1
    weights = [arrays[f"{w}_proj_weights_tensor"] for w in ("gate", "up", "down")]
    scales = jnp.ones((2, 7)), jnp.ones((1, 12)), None, None
    hidden, up = arrays["hidden_tensor"], jnp.ones((2, 3, 7))

    def backward(hidden, up, out):
        ops = Operands(hidden, *weights, *[None] * 7, *scales)
        config = dict(quantization="ROW", prefill=True, name="MLPBwd")
        return quantized.quantized_mlp_bwd(*ops, out, up, up, out, None, None, **config)

    program = jax.jit(backward).lower(hidden, up, hidden).compile().as_text()
    assert program.count(" dot(") == 3


@pytest.mark.parametrize("rows", [1, 256])
def test_no_weight_is_widened_as_a_whole(rows):
    """Temporaries are blocks and activations, less than one bfloat16 weight."""
    d_model, d_ff = 2048, 4096
    arrays, settings, _ = quantized_call(
        "ROW", lead=(rows,), d_model=d_model, d_ff=d_ff, dtype="bfloat16"
    )
    call = jax.jit(functools.partial(neuronjax.mlp, **settings))
    compiled = call.lower(**arrays).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 2 * d_model * d_ff + 4 * rows * (3 * d_ff + d_model)


def emitted_call(kind, d_model=128, d_ff=256, combination=FULL, prefill=False):
    """The emitter's arguments, untiled and tiled."""
    arrays, settings, _ = quantized_call(
        kind, combination, d_model=d_model, d_ff=d_ff, dtype="float32"
    )
    get = arrays.get
    tensors = dict(
        hidden=get("hidden_tensor"),
        gate_w=get("gate_proj_weights_tensor"),
        up_w=get("up_proj_weights_tensor"),
        down_w=get("down_proj_weights_tensor"),
        gate_up_w_scale=jnp.concatenate(
            [arrays[f"{w}_w_scale"][:1] for w in ("gate", "up")]
        ),
        down_w_scale=arrays["down_w_scale"][:1],
        gamma=get("normalization_weights_tensor"),
        gate_b=get("gate_proj_bias_tensor"),
        up_b=get("up_proj_bias_tensor"),
        down_b=get("down_proj_bias_tensor"),
    )
    if kind == "STATIC":
        tensors |= {k: arrays[k][:1] for k in ("gate_up_in_scale", "down_in_scale")}
    tensors = {key: x for key, x in tensors.items() if x is not None}
    weights = ("gate_w", "up_w", "down_w")
    tiles = {
        key: MemrefTile.from_tensor(x, 0 if key in weights else -1)
        for key, x in tensors.items()
    }
    config = dict(norm="rms", eps=1e-3, quant_type=kind, force_cte_mode=prefill)
    return config, tensors, tiles


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_tiles_of_the_same_values(kind, prefill):
    config, tensors, tiles = emitted_call(kind, prefill=prefill)
    emit = functools.partial(quant_mlp_kernel, **config)
    got, wanted = emit(**tiles), emit(**tensors)
    assert isinstance(got, MemrefTile)
    tolerance = 2e-3 if prefill else 2e-5
    assert np.abs(got.to_tensor() - wanted).max() <= tolerance * np.abs(wanted).max()
    seen = neuronjax.trace(lambda t: emit(**t), tiles)
    assert seen.count("TiledNativeKernelMLP") == 1

    def gradient(given, of):
        live = {k: x for k, x in given.items() if x.dtype == jnp.float32}
        loss = lambda live: jnp.sin(of(emit(**(given | live)))).sum()  # noqa: E731
        return jax.grad(loss)(live)

    whole = gradient(tensors, lambda out: out)
    for key, grad in gradient(tiles, lambda out: out.data).items():
        scale = np.abs(whole[key]).max() + 1e-3
        assert np.abs(grad.to_tensor() - whole[key]).max() <= 5e-3 * scale, key


def test_the_emitters_keep_the_name_and_append_the_scales():
    """R-27: `quant_mode`, `is_fp8_kernel`; no add equation for the residual."""
    config, tensors, _ = emitted_call("ROW", d_model=12, d_ff=7)
    residual = jnp.sin(tensors["hidden"])
    fused = lambda t, r: quant_mlp_fused_add_kernel(  # noqa: E731
        **t, mlp_out=jnp.full_like(r, jnp.nan), attn_out=r, **config
    )
    jaxpr = jax.make_jaxpr(fused)(tensors, residual)
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name != "broadcast_in_dim"]
    bag = dict(equation.params["config"])
    assert equation.params["name"] == "MLP" and bag["fused_add"] == "epilogue"
    assert bag["quant_mode"] == "QuantOnly" and bag["is_fp8_kernel"]
    assert len(equation.invars) == len(tensors) + 1
    wanted = quant_mlp_kernel(**tensors, **config) + residual
    np.testing.assert_allclose(fused(tensors, residual), wanted, rtol=1e-5, atol=1e-5)


def test_no_option_is_ignored():
    """R-27: scales, bounds and fp8 rows where nothing would read them."""
    arrays, settings, _ = quantized_call("ROW", dtype="float32")
    one = jnp.ones((128, 1), jnp.float32)
    codes = arrays["hidden_tensor"].astype(jnp.float8_e4m3)
    for change, message in (
        (dict(down_in_scale=one), "down_in_scale has no use"),
        (dict(gate_w_scale=None), "ROW needs gate_w_scale"),
        (dict(quantization_type="STATIC"), "STATIC needs gate_up_in_scale"),
        (dict(quantization_type="NONE"), "gate_w_scale.* has no use"),
        (dict(hidden_tensor=codes), "must be packed for ROW, .* decode .* takes no"),
        (dict(gate_w_scale=one), "gate_w_scale .128, 7., got"),
        (dict(quant_clipping_bound=-1.0), "quant_clipping_bound must be"),
    ):
        with pytest.raises(ValueError, match=message):
            neuronjax.mlp(**arrays | settings | change)


@pytest.mark.parametrize("sizes", [(5, 129, 3), (1, 1, 1), (129, 127, 513)])
def test_sizes_that_fill_no_tile(sizes):
    """R-25."""
    rows, d_model, d_ff = sizes
    arrays, settings, _ = quantized_call(
        "ROW", lead=(rows,), d_model=d_model, d_ff=d_ff, dtype="float32"
    )
    got = neuronjax.mlp(**arrays, **settings)
    wanted = quantized_equations(arrays | settings, rows > 96)
    assert max(_errors(got, wanted)) < 2e-3


def test_the_path_of_unknown_rows_must_be_named():
    """R-49: exported for any number of rows."""
    (rows,) = jax.export.symbolic_shape("b")
    arrays, settings, _ = quantized_call("ROW", lead=(4,), dtype="float32")
    x = jax.ShapeDtypeStruct((rows, 12), jnp.float32)
    weights = {k: v for k, v in arrays.items() if k != "hidden_tensor"}
    call = lambda x, **more: neuronjax.mlp(x, **weights, **settings, **more)[0]  # noqa: E731
    with pytest.raises(ValueError, match="force_cte_mode=True takes prefill"):
        jax.export.export(jax.jit(call))(x)
    prefill = functools.partial(call, force_cte_mode=True)
    saved = jax.export.export(jax.jit(prefill))(x)
    hidden = arrays["hidden_tensor"]
    np.testing.assert_allclose(
        saved.call(hidden), prefill(hidden), rtol=1e-3, atol=1e-3
    )


def test_it_runs_on_an_explicit_mesh():
    """R-50: the batch and the intermediate width are split."""
    arrays, settings, _ = quantized_call("ROW", lead=(2, 3), d_ff=8, dtype="float32")
    fun = jax.jit(lambda a: neuronjax.mlp(**a, **settings)[0])
    loss = lambda h, a: jnp.sin(fun(a | dict(hidden_tensor=h))).sum()  # noqa: E731
    grad = jax.jit(jax.grad(loss))
    wanted = fun(arrays), grad(arrays["hidden_tensor"], arrays)
    split, columns = P("data"), P(None, "tensor")
    specs = dict.fromkeys(arrays, columns) | dict(
        hidden_tensor=split, down_proj_weights_tensor=P("tensor"), down_w_scale=P()
    )
    mesh = make_mesh(explicit=True, data=2, tensor=2)
    with jax.set_mesh(mesh):
        given = {
            key: jax.device_put(x, NamedSharding(mesh, specs[key]))
            for key, x in arrays.items()
        }
        got = fun(given), grad(given["hidden_tensor"], given)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)
