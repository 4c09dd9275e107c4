"""The output projection with a block-scaled weight, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests import mx_equations as equations
from tests.macro_case import error


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(rows, width, name):
    w = normal(rows, width, seed=1)
    packed, scale = equations.packed_weight(w, "contiguous", name)
    dense = equations.rounded_rows(w.T, "contiguous", name).T
    return (jnp.asarray(packed[:, 0]), jnp.asarray(scale[:, 0])), dense


def project(attention, packed, bias=None, **more):
    w, scale = packed
    more |= dict(quantization_type="MX", weight_scales=scale)
    return neuronjax.output_projection_cte(attention, w, bias, **more)


def rows_of(attention):
    batch, heads, head_dim, seq = attention.shape
    return attention.transpose(0, 3, 1, 2).reshape(batch, seq, heads * head_dim)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e4m3fn"])
def test_heads_are_rounded_in_blocks_and_projected(name):
    packed, dense = weight(96, 5, name)
    attention, bias = normal(2, 3, 32, 4), normal(1, 5, seed=2)
    run = jax.jit(lambda a, b: project(a, packed, b, output_dtype="float32"))
    wanted = equations.rounded_rows(rows_of(attention), "contiguous") @ dense + bias
    assert error(run(attention, bias), wanted) < 1e-5
    got = project(jnp.asarray(attention), packed, jnp.asarray(bias))
    assert got.dtype == jnp.bfloat16 and error(got, wanted) < 1e-2


def test_quantized_attention_gives_the_same():
    packed, _ = weight(64, 6, "float4_e2m1fn")
    attention = normal(2, 2, 32, 3)
    rows = rows_of(attention)
    codes, scales = (
        np.stack(x)
        for x in zip(
            *(
                equations.packed_weight(r.T, "contiguous", "float8_e4m3fn")
                for r in rows
            ),
            strict=True,
        )
    )
    codes = jnp.asarray(codes.transpose(0, 2, 1, 3))
    got = project(codes, packed, input_scales=jnp.asarray(scales[:, :, 0]))
    wanted = project(jnp.asarray(attention), packed)
    np.testing.assert_array_equal(got, wanted)


def test_a_bias_has_a_gradient_beside_quantized_attention():
    packed, _ = weight(32, 6, "float8_e4m3fn")
    codes, scales = jnp.zeros((2, 1, 8, 3), jnp.uint32), jnp.zeros((2, 1, 3), jnp.uint8)

    def run(bias):
        return project(
            codes, packed, bias, input_scales=scales, output_dtype="float32"
        ).sum()

    np.testing.assert_array_equal(jax.grad(run)(jnp.zeros((1, 6))), np.full((1, 6), 6))


def test_the_derivative_passes_straight_through():
    packed, dense = weight(64, 6, "float8_e4m3fn")
    attention, bias = jnp.asarray(normal(1, 4, 16, 5)), jnp.zeros((1, 6))
    ct = normal(1, 5, 6, seed=3)

    def run(attention, bias):
        return project(attention, packed, bias, output_dtype="float32")

    d_attention, d_bias = jax.vjp(jax.jit(run), attention, bias)[1](jnp.asarray(ct))
    rows = rows_of(np.asarray(attention))
    live = ~equations.saturated_rows(rows, "contiguous")
    assert error(rows_of(np.asarray(d_attention)), live * (ct @ dense.T)) < 1e-5
    assert error(d_bias, ct.sum((0, 1))[None]) < 1e-5


def test_decode_takes_no_block_scaled_weight():
    """R-27."""
    packed, _ = weight(32, 6, "float4_e2m1fn")
    with pytest.raises(ValueError, match="must be NONE, STATIC or ROW in decode"):
        neuronjax.output_projection_tkg(
            jnp.zeros((16, 1, 2, 3)),
            packed[0],
            quantization_type="MX",
            weight_scale=packed[1],
        )
