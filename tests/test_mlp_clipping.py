"""The MLP with fp8 weights in decode: what they meet may be clipped."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import neuronjax
from neuronjax import MemrefTile
from neuronjax.emit import quant_mlp_fused_add_kernel, quant_mlp_kernel

EPS, BOUND = 1e-3, 0.5


def _operands(rows=5, d_model=12, d_ff=7, dtype="float64"):
    rng = np.random.default_rng(0)
    shapes = dict(
        hidden=(rows, d_model),
        gate_w=(d_model, d_ff),
        up_w=(d_model, d_ff),
        down_w=(d_ff, d_model),
        gamma=(1, d_model),
    )
    found = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
    for key in ("gate_w", "up_w", "down_w"):
        found[key] = (8 * found[key]).astype(ml_dtypes.float8_e4m3)
    rows = rng.uniform(0.02, 0.06, (2, d_ff)), rng.uniform(0.02, 0.06, (1, d_model))
    scales = [jnp.asarray(x, jnp.float32) for x in rows]
    return found | dict(gate_up_w_scale=scales[0], down_w_scale=scales[1])


def _equations(hidden, gamma, o, bound):
    """`clip(silu(g) * u) @ down` with `g`, `u` of `clip(norm(hidden) * gamma)`."""
    wide = {k: jnp.asarray(np.asarray(x, np.float64)) for k, x in o.items()}
    gate_scale, up_scale = wide["gate_up_w_scale"]
    mean = (hidden**2).mean(-1, keepdims=True)
    x = jnp.clip(hidden / jnp.sqrt(mean + EPS) * gamma, -bound, bound)
    gate, up = x @ wide["gate_w"] * gate_scale, x @ wide["up_w"] * up_scale
    middle = jnp.clip(gate / (1 + jnp.exp(-gate)) * up, -bound, bound)
    return middle @ wide["down_w"] * wide["down_w_scale"][0]


def _ours(hidden, gamma, o, bound, **options):
    given = o | dict(hidden=hidden, gamma=gamma)
    options = dict(norm="rms", eps=EPS, activation_clipping_bound=bound) | options
    return quant_mlp_kernel(**given, **options)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_values_and_gradients_are_those_of_the_clipped_equations(rows, is_plain):
    with jax.enable_x64(True):
        o = _operands(rows)
        seed = jnp.cos(jnp.arange(rows * 12.0)).reshape(rows, 12)

        def of(fun):
            def loss(hidden, gamma):
                return (fun(hidden, gamma, o, BOUND) * seed).sum()

            return jax.value_and_grad(loss, (0, 1))(o["hidden"], o["gamma"])

        with neuronjax.plain() if is_plain else contextlib.nullcontext():
            got = of(_ours)
        wanted = of(_equations)
        unclipped = _equations(o["hidden"], o["gamma"], o, 1e9)
        assert np.abs(_ours(o["hidden"], o["gamma"], o, 0.0) - unclipped).max() < 1e-12
        assert np.abs((unclipped * seed).sum() - wanted[0]) > 1e-3
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert np.abs(a - b).max() < 1e-12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_are_clipped_alike(dtype):
    o = _operands(4, 128, 256, dtype)
    weights = ("gate_w", "up_w", "down_w")
    tiles = {
        k: MemrefTile.from_tensor(x, 0 if k in weights else -1) for k, x in o.items()
    }
    emit = functools.partial(
        quant_mlp_kernel, norm="rms", eps=EPS, activation_clipping_bound=BOUND
    )
    got, wanted = emit(**tiles).to_tensor(), emit(**o)
    tolerance = dict(float32=1e-5, bfloat16=2e-2)[dtype]
    error = np.abs(np.asarray(got - wanted, np.float32)).max()
    assert error <= tolerance * np.abs(np.asarray(wanted, np.float32)).max()


def test_the_residual_is_added_behind_the_clip():
    o = _operands(dtype="float32")
    options = dict(norm="rms", eps=EPS, activation_clipping_bound=BOUND)
    out = quant_mlp_kernel(**o, **options)
    residual = jnp.ones_like(out)
    both = quant_mlp_fused_add_kernel(
        **o, **options, mlp_out=residual, attn_out=residual
    )
    np.testing.assert_allclose(both, out + 1, rtol=1e-6)


def test_decode_may_be_asked_for_many_rows():
    """Prefill rounds the gated values to fp8; decode rounds nothing."""
    with jax.enable_x64(True):
        o = _operands(97)
        wanted = _equations(o["hidden"], o["gamma"], o, 1e9)
        decode = _ours(o["hidden"], o["gamma"], o, 0.0, force_tkg_mode=True)
        prefill = _ours(o["hidden"], o["gamma"], o, 0.0)
        assert np.abs(decode - wanted).max() < 1e-12
        assert np.abs(prefill - wanted).max() > 1e-4
