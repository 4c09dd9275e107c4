"""Norms of a decode step: the equations in float64, layouts index by index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax

LAYOUTS = {
    "one core": dict(),
    "forced": dict(lnc=2, single_core_forced=True),
    "strided": dict(hidden_dim_tp=True),
    "two cores": dict(lnc=2),
    "halves": dict(shard_on_h=True),
}


def operands(width, dtype="float32", lead=(2, 3)):
    rng = np.random.default_rng(width)
    shapes = (*lead, width), (1, width), (1, width)
    return [jnp.asarray(1 + rng.standard_normal(s) / 2, dtype) for s in shapes]


def channel(layout, width, p, c):
    """Which channel lies at `[p, :, c]`."""
    chunks = width // 128
    if layout == "strided":
        return c * 128 + p
    if layout in ("two cores", "halves"):
        half = c // (chunks // 2)
        return half * (width // 2) + p * (chunks // 2) + c % (chunks // 2)
    return p * chunks + c


def laid(rows, layout):
    tokens, width = rows.shape
    out = np.zeros((128, tokens, width // 128))
    for p, c in np.ndindex(128, width // 128):
        out[p, :, c] = rows[:, channel(layout, width, p, c)]
    return out


def rms(x, gamma, eps, count=None):
    x, gamma = (np.asarray(z, np.float64).reshape(-1, z.shape[-1]) for z in (x, gamma))
    count = count or x.shape[-1]
    return x / np.sqrt((x**2).sum(-1, keepdims=True) / count + eps) * gamma


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [256, 768])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
def test_rmsnorm_lies_as_asked(layout, width, dtype, tolerance):
    x, gamma, _ = operands(width, dtype)
    got = jax.jit(
        lambda x, g: neuronjax.rmsnorm_tkg(x, g, eps=1e-3, **LAYOUTS[layout])
    )(x, gamma)
    assert got.dtype == dtype
    wanted = laid(rms(x, gamma, 1e-3), layout)
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["one core", "two cores", "halves"])
@pytest.mark.parametrize("offset", [True, False])
def test_layernorm_lies_as_asked(layout, offset):
    x, gamma, beta = operands(512)
    beta = beta if offset else None
    got = neuronjax.layernorm_tkg(x, gamma, beta, eps=1e-3, **LAYOUTS[layout])
    rows = np.asarray(x, np.float64).reshape(-1, 512)
    centred = rows - rows.mean(-1, keepdims=True)
    y = centred / np.sqrt(rows.var(-1, keepdims=True) + 1e-3) * np.asarray(gamma)
    y = y + np.asarray(beta) if offset else y
    np.testing.assert_allclose(got, laid(y, layout), rtol=1e-5, atol=1e-5)


def test_padding_does_not_count_in_the_mean():
    x, gamma, _ = operands(384)
    x = x.at[..., 300:].set(0)
    got = neuronjax.rmsnorm_tkg(x, gamma, hidden_actual=300)
    wanted = laid(rms(x, gamma, 1e-6, 300), "one core")
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_on_chip_lies_as_the_result(layout):
    x, gamma, _ = operands(512)
    on_chip = jnp.asarray(laid(x.reshape(6, 512), layout), "float32")
    options = LAYOUTS[layout]
    got = neuronjax.rmsnorm_tkg(on_chip, gamma, input_in_sbuf=True, **options)
    wanted = neuronjax.rmsnorm_tkg(x, gamma, **options)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [dict(), dict(lnc=2)], ids=str)
def test_gradients_in_both_modes(options):
    with jax.enable_x64(True):
        x, gamma, beta = operands(256, "float64", (1, 2))
        run = lambda x, g: neuronjax.rmsnorm_tkg(x, g, **options)  # noqa: E731
        check_grads(jax.jit(run), (x, gamma), 1, modes=["rev", "fwd"], eps=1e-6)
        run = lambda *a: neuronjax.layernorm_tkg(*a, **options)  # noqa: E731
        check_grads(jax.jit(run), (x, gamma, beta), 1, modes=["rev", "fwd"], eps=1e-6)


def test_gradients_keep_their_dtypes_and_sum_over_tokens():
    """R-24."""
    x, gamma, _ = operands(256, "bfloat16")
    out, pull = jax.vjp(neuronjax.rmsnorm_tkg, x, gamma)
    dx, dgamma = pull(jnp.ones_like(out))
    assert (dx.dtype, dgamma.dtype) == ("bfloat16", "bfloat16")
    unit = rms(x, jnp.ones_like(gamma), 1e-6)
    np.testing.assert_allclose(dgamma[0], unit.sum(0), rtol=2e-2, atol=2e-2)


def test_statistics_are_float32():
    """R-19."""
    x = jnp.full((1, 1, 128), 300, jnp.float16)
    got = neuronjax.rmsnorm_tkg(x, jnp.ones((1, 128), jnp.float16))
    assert got.dtype == "float16" and (got == 1).all()


def test_it_emits_the_norm_macro():
    x, gamma, _ = operands(256)
    for norm in (neuronjax.rmsnorm_tkg, neuronjax.layernorm_tkg):
        assert neuronjax.trace(norm, x, gamma).count("NeuronReduceMacro") == 1


def test_a_size_of_the_error_passes():
    """R-26."""
    x, gamma, _ = operands(256)
    report = neuronjax.can("rmsnorm_tkg", x[..., :200], gamma[:, :200])
    assert report.nearest == {"H": 256}
    assert neuronjax.can("rmsnorm_tkg", x, gamma).on_chip


@pytest.mark.parametrize("name", ["rmsnorm_tkg", "layernorm_tkg"])
def test_a_refusal_names_the_function_that_was_called(name):
    norm = getattr(neuronjax, name)
    x, gamma, _ = operands(256)
    for eps in (-1e-6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{name}: eps must be finite"):
            norm(x, gamma, eps=eps)
    with pytest.raises(ValueError, match=f"{name}: eps must be a Python number"):
        jax.jit(lambda e: norm(x, gamma, eps=e))(1e-6)
    with pytest.raises(ValueError, match=f"{name}: .*gamma of dtype None"):
        norm(x, None)
    with pytest.raises(ValueError, match=f"{name}: input, gamma and beta must be"):
        norm(neuronjax.MemrefTile.from_tensor(x, 2), gamma)
