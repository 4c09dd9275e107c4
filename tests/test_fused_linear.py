"""The fused linear layer against a float64 equation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.fused_linear.leaf import fused_linear_bwd, fused_linear_fwd

EPS = 1e-2
ACTIVATIONS = {
    None: lambda z: z,
    "SiLU": lambda z: z / (1 + np.exp(-z)),
    "Swish": lambda z: z / (1 + np.exp(-1.702 * z)),
    "GELU": lambda z: z * (1 + np.vectorize(math.erf)(z / 2**0.5)) / 2,
    "GELU_Tanh_Approx": lambda z: (
        z / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3)))
    ),
}
NORMS = {
    "NO_NORM": (),
    "RMS_NORM": ("gamma",),
    "RMS_NORM_SKIP_GAMMA": (),
    "LAYER_NORM": ("gamma", "beta"),
}
CALLS = [
    dict(),
    dict(norm_type="RMS_NORM", residual=True),
    dict(norm_type="RMS_NORM_SKIP_GAMMA", activation_fn="SiLU"),
    dict(norm_type="LAYER_NORM", bias=True, activation_fn="GELU", residual=True),
    dict(w_scale=True, activation_fn="Swish", residual=True),
    dict(w_scale="one", bias=True, activation_fn="GELU_Tanh_Approx"),
    dict(norm_type="RMS_NORM", w_scale=True, bias=True, residual=True),
]


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _operands(
    call, batch=(3, 2), d_in=6, d_out=5
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a call, float64, and its settings."""
    norm = call.get("norm_type", "NO_NORM")
    shapes = dict(x=(*batch, d_in), w=(d_in, d_out))
    more = dict(
        w_scale=() if call.get("w_scale") == "one" else (d_out,),
        bias=(d_out,),
        residual=(*batch, d_out),
    )
    shapes |= {key: shape for key, shape in more.items() if call.get(key)}
    shapes |= {key: (d_in,) for key in NORMS[norm]}
    arrays = {k: _draw(*s, seed=i) for i, (k, s) in enumerate(shapes.items())}
    settings = {k: v for k, v in call.items() if k in ("norm_type", "activation_fn")}
    return arrays, dict(settings, eps=EPS)


def _equation(
    x,
    w,
    bias=0.0,
    residual=0.0,
    w_scale=1.0,
    gamma=1.0,
    beta=0.0,
    *,
    norm_type="NO_NORM",
    activation_fn=None,
    eps=EPS,
):
    """`act(norm(x) @ w * w_scale + bias) + residual` in float64."""
    if norm_type == "LAYER_NORM":
        x = x - x.mean(-1, keepdims=True)
    if norm_type != "NO_NORM":
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma + beta
    return ACTIVATIONS[activation_fn](x @ w * w_scale + bias) + residual


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 2e-2), ("float16", 3e-3)]
)
@pytest.mark.parametrize("batch", [(3, 2), (), (1,)], ids=str)
def test_it_follows_the_equation(batch, dtype, tolerance):
    for call in CALLS:
        arrays, settings = _operands(call, batch)
        narrow = {k: jnp.asarray(v, dtype) for k, v in arrays.items()}
        got = neuronjax.fused_linear(**narrow, **settings)
        wide: dict[str, Any] = {k: np.float64(v) for k, v in narrow.items()}
        wanted = _equation(**wide, **settings)
        assert (got.shape, got.dtype) == (wanted.shape, jnp.dtype(dtype))
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, wanted, tolerance, tolerance, err_msg=str(call))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_first_and_second_derivatives(call):
    arrays, settings = _operands(call, (2,), 3, 2)
    with jax.enable_x64(True):
        arrays = {k: jnp.asarray(v) for k, v in arrays.items()}
        fun = jax.jit(lambda a: neuronjax.fused_linear(**a, **settings))
        check_grads(fun, (arrays,), 2, modes=["fwd", "rev"])


def test_one_macro_forward_and_one_backward_and_nothing_beside_them():
    arrays, settings = _operands(CALLS[3])
    arrays = {k: jnp.asarray(v, "float32") for k, v in arrays.items()}
    call = lambda a: neuronjax.fused_linear(**a, **settings)  # noqa: E731
    jaxpr = jax.make_jaxpr(call)(arrays)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["fused_linear"]
    seen = neuronjax.trace(jax.grad(lambda a: call(a).sum()), arrays)
    assert seen.count("FusedLinear") == seen.count("FusedLinearBwd") == 1


@pytest.mark.parametrize("kind", ["float8_e4m3", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_fp8_weight_is_a_constant_and_its_scale_is_not(kind, dtype):
    """Gradients equal those of the same values in a wide weight."""
    arrays, settings = _operands(CALLS[6], (4,), 6, 5)
    arrays = {k: jnp.asarray(v, dtype) for k, v in arrays.items()}
    narrow = arrays.pop("w").astype(kind)

    def loss(arrays, w):
        out = neuronjax.fused_linear(w=w, **arrays, **settings)
        wide = out.astype(accumulator(out.dtype))
        return (wide**2).sum(), out

    got, wanted = (
        jax.value_and_grad(loss, has_aux=True)(arrays, w)
        for w in (narrow, narrow.astype(dtype))
    )
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())
    if kind != "float8_e4m3" or dtype != "float32":
        return
    with jax.enable_x64(True):
        wide = {k: v.astype(jnp.float64) for k, v in arrays.items()}
        check_grads(jax.jit(lambda a: loss(a, narrow)[0]), (wide,), 2, ["fwd", "rev"])


def test_a_large_fp8_weight_is_not_widened_as_a_whole():
    """512 x 1024 elements would take 2 MB in float32."""
    x, w = jnp.ones((1, 512)), jnp.ones((512, 1024), jnp.float8_e4m3)
    call = lambda x, w: neuronjax.fused_linear(x, w, w_scale=0.5)  # noqa: E731
    plan = jax.jit(call).lower(x, w).compile().memory_analysis()
    assert plan is not None and plan.temp_size_in_bytes < 512 * 1024 * 4
    np.testing.assert_array_equal(call(x, w), jnp.full((1, 1024), 256.0))


def test_accumulation_is_wide():
    """R-23: 4096 bfloat16 ones and a residual of one."""
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.full((4096, 1), 2**-9, jnp.bfloat16)
    got = neuronjax.fused_linear(x, w, residual=jnp.full((1, 1), -8, jnp.bfloat16))
    assert got.item() == 0 and got.dtype == jnp.bfloat16


def test_gradients_keep_the_dtypes_of_their_operands():
    """R-24: a float32 weight beside bfloat16 activations."""
    arrays, settings = _operands(CALLS[3])
    kinds = ["bfloat16", "float32", "float16", "bfloat16", "float32", "bfloat16"]
    arrays = {
        k: jnp.asarray(v, kind)
        for (k, v), kind in zip(arrays.items(), kinds, strict=True)
    }
    call = lambda a: neuronjax.fused_linear(**a, **settings)  # noqa: E731
    grads = jax.grad(lambda a: call(a).astype(jnp.float32).sum())(arrays)
    assert call(arrays).dtype == jnp.bfloat16
    assert {k: g.dtype for k, g in grads.items()} == {
        k: v.dtype for k, v in arrays.items()
    }


def test_a_float16_pre_activation_beyond_its_range_keeps_the_derivative():
    """Its activation is 0 to the left, and so is the gradient: no NaN."""
    x, w = jnp.full((1, 4), 300, jnp.float16), jnp.full((4, 1), -300, jnp.float16)
    call = lambda x: neuronjax.fused_linear(x, w, activation_fn="SiLU").sum()  # noqa: E731
    value, grad = jax.value_and_grad(call)(x)
    assert value == 0 and (grad == 0).all()


CONFIG = dict(norm="layer", activation="SiLU", eps=EPS, returned=True)


@pytest.mark.parametrize(
    ("stat", "poisoned"),
    [(0, ""), (1, "x w gamma w_scale"), (2, "x w gamma w_scale"), (3, None)],
)
def test_a_poisoned_output_poisons_what_is_made_from_it(stat, poisoned):
    """Statistics and pre-activation are read; the output is not."""
    arrays, _ = _operands(dict(CALLS[3], w_scale=True))
    order = "x w w_scale bias residual gamma beta".split()
    operands = [jnp.asarray(arrays[key], "float32") for key in order]
    outs = list(fused_linear_fwd(*operands, name="FusedLinear", **CONFIG))
    outs[stat] = outs[stat] * jnp.nan
    cotangents = [jnp.ones_like(outs[0]), None, None, None]
    name = "FusedLinearBwd"
    grads = fused_linear_bwd(*operands, *outs, *cotangents, name=name, **CONFIG)
    found = [k for k, g in zip(order, grads, strict=True) if jnp.isnan(g).any()]
    wanted = "x w w_scale bias gamma beta" if poisoned is None else poisoned
    assert set(found) == set(wanted.split())


def test_every_cotangent_counts():
    """Those of statistics and pre-activation too: against the leaf's derivative."""
    with jax.enable_x64(True):
        arrays, _ = _operands(dict(CALLS[3], w_scale=True))
        order = "x w w_scale bias residual gamma beta".split()
        operands = [jnp.asarray(arrays[key]) for key in order]
        outs, pull = jax.vjp(
            lambda *o: fused_linear_fwd(*o, name="FusedLinear", **CONFIG), *operands
        )
        seeds = tuple(jnp.asarray(_draw(*o.shape, seed=7)) for o in outs)
        name = "FusedLinearBwd"
        got = fused_linear_bwd(*operands, *outs, *seeds, name=name, **CONFIG)
        for a, b in zip(got, pull(seeds), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mapped_gradients(dtype):
    """R-42: `vmap` of a gradient, the weight shared or not, in narrow dtypes too."""
    arrays, settings = _operands(CALLS[1], (4,))
    arrays = {k: jnp.asarray(v, dtype) for k, v in arrays.items()}
    stacked = {k: jnp.stack([v, 2 * v]) for k, v in arrays.items()}

    def grads(a):
        call = lambda a: neuronjax.fused_linear(**a, **settings)  # noqa: E731
        return jax.grad(lambda a: (call(a).astype(jnp.float32) ** 2).sum())(a)

    got = jax.jit(jax.vmap(grads))(stacked)
    for i in range(2):
        wanted = grads({k: v[i] for k, v in stacked.items()})
        for key in wanted:
            a, b = (np.float32(x) for x in (got[key][i], wanted[key]))
            np.testing.assert_allclose(a, b, 2e-2, 2e-2 * np.abs(b).max())


@pytest.mark.parametrize("columns", [True, False])
def test_explicit_meshes_that_split_the_batch_and_the_weight(columns):
    """R-50: columns of the weight over a mesh axis, or the batch."""
    mesh = jax.make_mesh(
        (2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2]
    )
    arrays, settings = _operands(CALLS[3], (4,), 6, 4)
    arrays = {k: jnp.asarray(v, "float32") for k, v in arrays.items()}
    loss = lambda a: (neuronjax.fused_linear(**a, **settings) ** 2).sum()  # noqa: E731
    wanted = jax.grad(loss)(arrays)
    split = dict(x=P("data"), residual=P("data"))
    if columns:
        split = dict(w=P(None, "data"), bias=P("data"), residual=P(None, "data"))
    with jax.set_mesh(mesh):
        held = {k: jax.device_put(v, split.get(k, P())) for k, v in arrays.items()}
        got = jax.jit(jax.grad(loss))(held)
    for key, value in wanted.items():
        np.testing.assert_allclose(jax.device_get(got[key]), value, 1e-4, 1e-5)


@pytest.mark.parametrize("given", [dict(gamma=0), dict(beta=0), dict(gamma=0, beta=0)])
def test_gains_that_no_norm_reads_are_refused(given):
    """R-27."""
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    given = {key: jnp.ones(3) for key in given}
    for norm in ("NO_NORM", "RMS_NORM_SKIP_GAMMA"):
        with pytest.raises(ValueError, match="fused_linear: gamma must be given for"):
            neuronjax.fused_linear(x, w, norm_type=norm, **given)


def test_scalars_of_any_kind_keep_the_dtype():
    """R-48."""
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    for scale in (2, 0.5, np.float64(0.5), jnp.float32(0.5)):
        assert neuronjax.fused_linear(x, w, w_scale=scale).dtype == jnp.bfloat16
