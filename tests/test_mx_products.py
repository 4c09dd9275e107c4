"""Products of packed MX operands, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.kernels.mx import layout
from tests import mx_equations as equations
from tests.mx_equations import FORMATS, normal, weight


@pytest.mark.parametrize("names", [FORMATS[:2], FORMATS[1:], FORMATS[::-2]])
def test_matmul_contracts_partitions_and_packed_elements(names):
    stationary, moving = normal(24, 3 * 4), normal(24, 5 * 4, seed=1)
    s, m = (
        neuronjax.quantize_to_mx(x, n)
        for x, n in zip((stationary, moving), names, strict=True)
    )
    # Columns of a scale array beyond the data's own are not read.
    more = jnp.pad(m[1], ((0, 0), (0, 2)), constant_values=255)
    got = neuronjax.mx_matmul(s[0], m[0], s[1], more, *names)
    left, right = (
        np.asarray(neuronjax.dequantize_mx(*x, n), np.float64).reshape(24, -1, 4)
        for x, n in zip((s, m), names, strict=True)
    )
    wanted = np.einsum("piq,pjq->ij", left, right)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "rows"), [(32, 1), (40, 2), (512, 3), (552, 2)])
@pytest.mark.parametrize("names", [FORMATS[:2], FORMATS[1:]])
def test_the_projections_multiply_what_the_operands_hold(size, rows, names):
    """R-25: partial tiles; what lies in the padding is poisoned."""
    x = normal(rows, 1024, seed=5)
    hidden = equations.packed_weight(x.T, "hidden", names[0])
    packed, scale, dense = weight(1024, size, "hidden", names[1])
    bias = layout.row_to_bias(jnp.asarray(normal(size, seed=6)))
    sizes = dict(H=1024, I=size, BxS=rows)
    call = (*map(jnp.asarray, hidden), packed, scale, bias)
    got = neuronjax.gate_up_proj_mx(
        *call, **sizes, hidden_dtype=names[0], weight_dtype=names[1]
    )
    wanted = equations.rounded_rows(x, "hidden", names[0]) @ dense
    wanted = wanted + normal(size, seed=6)
    order = layout.INTERMEDIATE
    inside = layout.to_partitions(layout.to_blocks(jnp.ones((rows, size)), order))
    logical = layout.from_blocks(layout.from_partitions(got), order, size)
    np.testing.assert_allclose(logical, wanted, rtol=2e-5, atol=2e-4)
    assert not np.asarray(jnp.where(inside > 0, 0, got)).any()

    packed, scale, dense = weight(size, 20, "intermediate", names[1], seed=7)
    poisoned = jnp.where(inside > 0, got, jnp.nan)
    out_bias = jnp.asarray(normal(1, 20))
    sizes = dict(H=20, I=size, BxS=rows)
    out = neuronjax.down_proj_mx(
        poisoned, packed, scale, out_bias, **sizes, weight_dtype=names[1]
    )
    middle = equations.rounded_rows(np.asarray(logical), "intermediate")
    wanted = middle @ dense + np.asarray(out_bias)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=2e-3)


def test_the_down_projection_has_a_derivative_in_its_activations():
    packed, scale, dense = weight(64, 6, "intermediate", "float4_e2m1fn")
    inter = jnp.asarray(normal(128, 1, 2, 4))
    sizes = dict(H=6, I=64, BxS=2)

    def run(inter, bias):
        return neuronjax.down_proj_mx(inter, packed, scale, bias, **sizes).sum()

    d_inter, d_bias = jax.jit(jax.grad(run, (0, 1)))(inter, jnp.zeros((1, 6)))
    np.testing.assert_array_equal(d_bias, [[2.0] * 6])
    rows = np.asarray(inter[:16, 0]).transpose(1, 2, 0).reshape(2, 64)
    live = ~equations.saturated_rows(rows, "intermediate")
    wanted = (live * dense.sum(1)).reshape(2, 4, 16).transpose(2, 0, 1)
    np.testing.assert_allclose(d_inter[:16, 0], wanted, rtol=1e-5, atol=1e-5)
    assert not np.asarray(d_inter[16:]).any()


def test_matmul_refuses_missing_columns_and_operands():
    q, s = neuronjax.quantize_to_mx(jnp.ones((8, 16)))
    with pytest.raises(ValueError, match="mx_matmul: stationary_scale must have a col"):
        neuronjax.mx_matmul(q, q, s[:, :2], s)
    with pytest.raises(ValueError, match="stationary must be uint32 .* got NoneType"):
        neuronjax.mx_matmul(None, q, s, s)
    with pytest.raises(ValueError, match="moving_scale must be uint8, got NoneType"):
        neuronjax.mx_matmul(q, q, s, None)
