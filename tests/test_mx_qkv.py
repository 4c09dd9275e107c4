"""QKV with a block-scaled weight, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests import mx_equations as equations
from tests.macro_case import error

HEADS = dict(d_head=4, num_q_heads=2, num_kv_heads=1)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(width, columns, order, name):
    w = normal(width, columns, seed=1)
    packed, scale = equations.packed_weight(w, order, name)
    dense = equations.rounded_rows(w.T, order, name).T
    call = dict(fused_qkv_weights=jnp.asarray(packed[:, 0]), quantization_type="MX")
    call |= dict(qkv_w_scale=jnp.asarray(scale[:, 0]))
    return call | dict(weight_layout=f"MX_{order.upper()}"), dense


def rms(x, gain):
    x = np.float64(x)
    return np.float32(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * gain)


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e4m3fn"])
def test_normed_activations_are_rounded_in_blocks_and_projected(order, name):
    call, dense = weight(96, 16, order, name)
    x, gain, bias = normal(2, 3, 96), 1 + normal(1, 96, seed=2) / 4, normal(1, 16)
    call |= dict(bias=jnp.asarray(bias), norm_eps=1e-3, fused_norm_type="RMS_NORM")
    call |= dict(gamma_norm_weights=jnp.asarray(gain))
    got = jax.jit(lambda x: neuronjax.qkv(x, **call))(x)
    wanted = equations.rounded_rows(rms(x, gain), order) @ dense + bias
    assert got.dtype == jnp.float32 and error(got, wanted) < 1e-5


def test_heads_are_rotated_behind_the_projection():
    call, dense = weight(64, 16, "contiguous", "float8_e4m3fn")
    x, cos, sin = normal(1, 3, 64), normal(1, 3, 4, seed=3), normal(1, 3, 4, seed=4)
    call |= dict(HEADS, fused_rope=True, cos_cache=cos, sin_cache=sin)
    got = neuronjax.qkv_cte(jnp.asarray(x), **call, output_layout="NBSd")
    y = (equations.rounded_rows(x, "contiguous") @ dense).reshape(1, 3, 4, 4)
    turned = np.concatenate([-y[..., 2:], y[..., :2]], -1)
    rotated = y * cos[:, :, None] + turned * sin[:, :, None]
    wanted = np.concatenate([rotated[:, :, :3], y[:, :, 3:]], 2)
    assert error(got, wanted.transpose(2, 0, 1, 3)) < 1e-5


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_the_derivative_passes_straight_through(order):
    call, dense = weight(64, 16, order, "float8_e4m3fn")
    x, ct = jnp.asarray(normal(1, 9, 64)), normal(1, 9, 16, seed=5)
    residuals = dict.fromkeys(("mlp_prev", "attention_prev"), jnp.zeros_like(x))
    call |= dict(residuals, fused_residual_add=True)
    run = jax.jit(lambda x: neuronjax.qkv_cte(x, **call))
    (dx,) = jax.vjp(run, x)[1](jnp.asarray(ct))
    live = ~equations.saturated_rows(np.asarray(x), order)
    assert not live.all()
    assert error(dx, live * (ct @ dense.T)) < 1e-5


def test_decode_takes_no_block_scaled_weight():
    """R-27."""
    call, _ = weight(32, 16, "contiguous", "float8_e4m3fn")
    with pytest.raises(ValueError, match="must be NONE, STATIC or ROW in decode"):
        neuronjax.qkv_tkg(
            jnp.zeros((1, 2, 32)),
            call["fused_qkv_weights"],
            quantization_type="MX",
            qkv_w_scale=call["qkv_w_scale"],
            norm_type="NO_NORM",
        )
