"""The feed-forward block with block-scaled weights, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.kernels.mx import layout
from tests import mx_equations as equations
from tests.macro_case import error
from tests.mlp_equations import act

NAMES = dict(gate_proj_weights_tensor="gate", up_proj_weights_tensor="up")


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Block:
    """Random operands of one call, packed, and the matrices that they stand for."""

    def __init__(self, d_ff=32, width=512, name="float4_e2m1fn", norm="NO_NORM"):
        self.d_ff, self.width, self.norm, self.dense = d_ff, width, norm, {}
        self.arrays, self.settings = {}, dict(quantization_type="MX", eps=1e-3)
        self.settings |= dict(weight_dtype=name, normalization_type=norm)
        shapes = dict(gate=(width, d_ff), up=(width, d_ff), down=(d_ff, width))
        for seed, (key, (k, n)) in enumerate(shapes.items()):
            order = "intermediate" if key == "down" else "hidden"
            w = normal(k, n, seed=seed) / 16
            packed, scale = equations.packed_weight(w, order, name)
            self.dense[key] = equations.rounded_rows(w.T, order, name).T
            self.arrays[f"{key}_proj_weights_tensor"] = jnp.asarray(packed)
            self.arrays[f"{key}_w_scale"] = jnp.asarray(scale)
        if norm != "NO_NORM":
            gain = jnp.asarray(1 + normal(1, width, seed=7) / 4)
            self.arrays["normalization_weights_tensor"] = gain
        for key in ("gate", "up"):
            row = jnp.asarray(normal(d_ff, seed=len(key)))
            self.arrays[f"{key}_proj_bias_tensor"] = layout.row_to_bias(row)
            self.dense[f"{key}_bias"] = np.float64(row)
        down_bias = normal(1, width, seed=9)
        self.arrays["down_proj_bias_tensor"] = jnp.asarray(down_bias)

    def __call__(self, x, **more):
        return neuronjax.mlp(x, **self.arrays, **self.settings, **more)[0]

    def normed(self, x):
        x = np.float64(x)
        if self.norm == "NO_NORM":
            return np.float32(x)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)
        return np.float32(x * np.float64(self.arrays["normalization_weights_tensor"]))

    def equation(self, x, kind="SiLU", limits=(None, None)):
        left = equations.rounded_rows(self.normed(x), "hidden")
        gate = left @ self.dense["gate"] + self.dense["gate_bias"]
        up = left @ self.dense["up"] + self.dense["up_bias"]
        if limits != (None, None):
            gate, up = (np.clip(z, *limits) for z in (gate, up))
        middle = np.float32(np.float64(act(gate, kind)) * up)
        y = equations.rounded_rows(middle, "intermediate") @ self.dense["down"]
        return y + np.float64(self.arrays["down_proj_bias_tensor"])


@pytest.mark.parametrize(
    ("name", "d_ff", "norm", "kind"),
    [
        ("float4_e2m1fn", 32, "NO_NORM", "SiLU"),
        ("float8_e4m3fn", 96, "RMS_NORM", "Swish"),
        ("float8_e5m2", 512, "NO_NORM", "GELU"),
    ],
)
def test_the_block_follows_its_equations(name, d_ff, norm, kind):
    block = Block(d_ff, 1024, name, norm)
    x = normal(2, 3, 1024, seed=20)
    got = jax.jit(lambda x: block(x, activation_fn=kind))(x)
    assert got.dtype == jnp.float32
    # A value at a boundary may round the other way: one step of one of many.
    wanted = block.equation(x, kind)
    assert np.abs(got - wanted).max() <= 2e-3 * np.abs(wanted).max()
    assert np.median(np.abs(got - wanted)) <= 1e-5 * np.abs(wanted).max()


def test_clamps_apply_to_gate_and_up():
    block, x = Block(), normal(1, 4, 512, seed=21)
    limits = {
        f"{key}_clamp_{end}_limit": value
        for key in ("gate", "up")
        for end, value in (("lower", -0.5), ("upper", 0.75))
    }
    got = block(x, **limits)
    assert error(got, block.equation(x, limits=(-0.5, 0.75))) < 1e-5


def test_without_a_gate():
    block, x = Block(), normal(1, 2, 512, seed=22)
    for key in ("gate_proj_bias_tensor", "gate_w_scale"):
        del block.arrays[key]
    block.arrays["gate_proj_weights_tensor"] = None
    got = block(x, skip_gate_proj=True)
    up = equations.rounded_rows(x, "hidden") @ block.dense["up"]
    middle = np.float64(act(up + block.dense["up_bias"], "SiLU"))
    y = equations.rounded_rows(np.float32(middle), "intermediate")
    wanted = y @ block.dense["down"] + block.arrays["down_proj_bias_tensor"]
    assert error(got, wanted) < 1e-5


def test_the_derivative_is_that_of_the_dequantized_products():
    """Straight through the two roundings, zero where a value saturates."""
    block, x = Block(norm="RMS_NORM"), normal(1, 3, 512, seed=23)
    keys = ("gate_proj_bias_tensor", "up_proj_bias_tensor", "down_proj_bias_tensor")
    keys += ("normalization_weights_tensor",)
    dense = {k: jnp.asarray(v, jnp.float32) for k, v in block.dense.items()}
    ct = jnp.asarray(normal(1, 3, 512, seed=24))

    def masked(x, order):
        live = ~equations.saturated_rows(np.asarray(x), order)
        moved = equations.rounded_rows(np.asarray(x), order) - live * np.asarray(x)
        return x * live.astype(np.float32) + moved.astype(np.float32)

    def equation(x, rows):
        gate_b, up_b, down_b, gain = rows
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * gain
        x = _frozen(masked, x, "hidden")
        gate, up = x @ dense["gate"] + gate_b, x @ dense["up"] + up_b
        middle = _frozen(masked, jax.nn.silu(gate) * up, "intermediate")
        return middle @ dense["down"] + down_b

    def run(x, arrays):
        block.arrays |= dict(zip(keys, arrays, strict=True))
        return block(x)

    arrays = [block.arrays[key] for key in keys]
    rows = [dense["gate_bias"], dense["up_bias"], *arrays[2:]]
    got = jax.vjp(run, jnp.asarray(x), arrays)[1](ct)
    wanted = jax.vjp(equation, jnp.asarray(x), rows)[1](ct)
    biases = [layout.bias_to_row(b, 32) for b in got[1][:2]]
    for a, b in zip(
        (got[0], *biases, *got[1][2:]), jax.tree.leaves(wanted), strict=True
    ):
        assert error(a, b) < 1e-4


def _frozen(masked, x, order):
    """`masked` with what it masks and moves taken from the value of `x`."""
    value = jax.lax.stop_gradient(x)
    live = ~equations.saturated_rows(np.asarray(value), order)
    at = masked(value, order)
    return jnp.where(live, x + (at - value), at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_activations_keep_their_dtype(dtype):
    block, x = Block(norm="RMS_NORM"), jnp.asarray(normal(1, 2, 512, seed=25), dtype)
    got = block(x)
    assert got.dtype == dtype
    wanted = block.equation(np.asarray(x, np.float32))
    assert error(np.asarray(got, np.float64), wanted) < 2e-2
    assert block(x, output_dtype="float32").dtype == jnp.float32


def test_no_weight_is_widened_as_a_whole():
    """What XLA keeps beside the operands is less than one weight in bfloat16."""
    width, d_ff = 1024, 8192
    shapes = dict(
        gate_proj_weights_tensor=("uint32", 128, width // 512, d_ff),
        up_proj_weights_tensor=("uint32", 128, width // 512, d_ff),
        down_proj_weights_tensor=("uint32", 128, d_ff // 512, width),
        gate_w_scale=("uint8", 16, width // 512, d_ff),
        up_w_scale=("uint8", 16, width // 512, d_ff),
        down_w_scale=("uint8", 16, d_ff // 512, width),
    )
    arrays = {k: jax.ShapeDtypeStruct(s, dtype) for k, (dtype, *s) in shapes.items()}
    x = jax.ShapeDtypeStruct((1, 2, width), jnp.float32)

    def run(x, arrays):
        return neuronjax.mlp(x, **arrays, quantization_type="MX")[0]

    used = jax.jit(run).lower(x, arrays).compile().memory_analysis()
    assert used.temp_size_in_bytes < width * d_ff * 2


def test_nan_stays_in_its_row():
    block, x = Block(), normal(1, 3, 512, seed=26)
    wanted = block(x)
    got = block(jnp.asarray(x).at[0, 1, 7].set(jnp.nan))
    assert np.isnan(got[0, 1]).all()
    np.testing.assert_array_equal(got[0, ::2], wanted[0, ::2])


def test_a_suggested_width_passes():
    """R-26."""
    block = Block()
    report = neuronjax.can("mlp", np.zeros((1, 2, 500)), **block.arrays)
    assert not report
    shapes = dict(block.arrays, **block.settings)
    report = neuronjax.can("mlp", jnp.zeros((1, 2, 500)), **shapes)
    assert report.nearest["H (MX)"] == 512
    assert neuronjax.can("mlp", jnp.zeros((1, 2, 512)), **shapes)
    # Other weights are not told of blocks.
    w = jnp.zeros((130, 6))
    report = neuronjax.can("mlp", jnp.zeros((1, 2, 130)), w, w, w.T)
    assert dict(report.nearest) == {"H": 128}
