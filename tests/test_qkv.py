"""QKV against its equations in float64, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.primitives import registry
from neuronjax.primitives.options import NormType, QKVOutputLayout
from tests.macro_case import error
from tests.qkv_case import (
    FAMILY,
    NORMS,
    ORDER,
    call,
    jitted,
    operands,
    reference,
)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
@pytest.mark.parametrize(("add", "rope"), [(False, False), (True, False), (True, True)])
def test_every_combination_equals_the_equations(norm, layout, add, rope):
    heads = (3, 2, 6)
    x = operands((2, 3, 96), heads)
    arrays, options = call(x, heads, norm, layout, add, rope)
    wanted, _ = reference(arrays, options)
    assert error(jitted(options)(arrays), wanted) < 2e-6


@pytest.mark.parametrize("norm", NORMS)
def test_the_decode_path_returns_the_sum(norm):
    x = operands(heads=(2, 1, 4))
    arrays, options = call(x, (2, 1, 4), norm, rope=False)
    out, total = neuronjax.qkv(**arrays, **options)
    wanted = reference(arrays, options)
    assert error(out, wanted[0]) < 2e-6 and error(total, wanted[1]) < 1e-6


@pytest.mark.parametrize(
    ("shape", "rope", "prefill"),
    [
        ((1, 96, 6), False, False),
        ((1, 97, 6), False, True),
        ((2, 64, 6), False, False),
        ((2, 65, 6), False, True),
        ((1, 1, 6), True, True),
    ],
)
def test_the_dispatch_rule_decides_what_returns_and_nothing_else(shape, rope, prefill):
    arrays, options = call(operands(shape), (2, 1, 4), "RMS_NORM", rope=rope)
    out = neuronjax.qkv(**arrays, **options)
    assert isinstance(out, tuple) is not prefill
    wanted = neuronjax.qkv_cte(**arrays, **options)
    np.testing.assert_array_equal(out if prefill else out[0], wanted)


def test_enum_members_and_their_names_are_one():
    arrays, options = call(operands(), (2, 1, 4), "RMS_NORM", "NBSd")
    wanted = neuronjax.qkv_cte(**arrays, **options)
    members = dict(
        fused_norm_type=NormType.RMS_NORM, output_layout=QKVOutputLayout.NBSd
    )
    np.testing.assert_array_equal(
        neuronjax.qkv_cte(**arrays, **options | members), wanted
    )


def test_all_columns_of_the_tables_count():
    x, (nq, nkv, d) = operands(), (2, 1, 4)
    arrays, options = call(x, (nq, nkv, d), "NO_NORM", add=False)
    changed = dict(arrays, cos_cache=arrays["cos_cache"].at[..., d // 2 :].add(1.0))
    a, b = (jitted(options)(v).reshape(2, 3, -1, d) for v in (arrays, changed))
    moved = np.abs(a - b).max((0, 1)) > 1e-3
    assert moved[: nq + nkv, d // 2 :].all()
    assert not moved[: nq + nkv, : d // 2].any() and not moved[nq + nkv :].any()


def test_padding_columns_do_not_count():
    x = operands((2, 3, 8), seed=3)
    arrays, options = call(x, (2, 1, 4), "RMS_NORM", add=False, rope=False)
    arrays["input"] = arrays["input"].at[..., 5:].set(0)
    out = neuronjax.qkv_cte(**arrays, **options, hidden_actual=5)
    wanted, _ = reference(arrays, options, hidden_actual=5)
    assert error(out, wanted) < 2e-6
    bare = {k: v if v.shape[-1] != 8 else v[..., :5] for k, v in arrays.items()}
    bare["fused_qkv_weights"] = arrays["fused_qkv_weights"][:5]
    assert error(out, neuronjax.qkv_cte(**bare, **options)) < 2e-6


@pytest.mark.parametrize("tiled", [False, True])
def test_the_sum_of_squares_is_wide(tiled):
    """R-19: 300**2 overflows float16. The chip's tiles are 128 wide at least."""
    n = 128 if tiled else 4
    x = jnp.full((1, 1, n), 300.0, jnp.float16)
    eye, gain = jnp.eye(n, dtype=jnp.float16), jnp.ones((1, n), jnp.float16)
    if tiled:
        tiles = [MemrefTile.from_tensor(a, i) for a, i in ((x, 2), (eye, 0), (gain, 1))]
        out = emit.qkv_kernel(*tiles).to_tensor()
    else:
        out = neuronjax.qkv_tkg(x, eye, gain)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(out, jnp.ones((1, 1, n), jnp.float16))


@pytest.mark.parametrize(
    ("norm", "layout"), [*((norm, "BSD") for norm in NORMS), ("RMS_NORM", "NBSd")]
)
def test_gradients_in_both_modes_and_twice(norm, layout):
    arrays, options = call(operands(scale=0.7), (2, 1, 4), norm, layout, eps=1e-2)
    fun = jitted(options)
    check_grads(fun, (arrays,), order=1, modes=["rev", "fwd"], atol=2e-2, rtol=2e-2)
    with jax.enable_x64(True):
        wide = {k: v.astype("float64") for k, v in arrays.items()}
        check_grads(fun, (wide,), order=2, atol=1e-4, rtol=1e-4)


def emitted(arrays, options):
    """All outputs of the macro, statistics included."""
    config = dict(
        norm={"RMS_NORM": "rms", "LAYER_NORM": "layer"}[options["fused_norm_type"]],
        eps=options["norm_eps"],
        hidden_actual=None,
        layout="BSD",
        fused_add="prologue",
        fused_rope=True,
        is_tiled=False,
        **{k: options[k] for k in ("d_head", "num_q_heads", "num_kv_heads")},
    )
    return FAMILY(*[arrays.get(k) for k in ORDER], name="QKV", **config)


@pytest.mark.parametrize("norm", ["RMS_NORM", "LAYER_NORM"])
def test_the_cotangent_of_every_output_counts(norm):
    """The stored sum and statistics have gradients, or second order is wrong."""
    arrays, options = call(operands(scale=0.7), (2, 1, 4), norm, eps=1e-2)
    with jax.enable_x64(True):
        wide = {k: v.astype("float64") for k, v in arrays.items()}
        for i in range(3 if norm == "RMS_NORM" else 4):
            check_grads(lambda a, i=i: emitted(a, options)[i], (wide,), 1, ["rev"])


@pytest.mark.parametrize(("norm", "poisoned"), [("RMS_NORM", 2), ("LAYER_NORM", 2)])
def test_a_poisoned_statistic_reaches_what_is_derived_from_it(norm, poisoned):
    arrays, options = call(operands(), (2, 1, 4), norm)
    outs = list(emitted(arrays, options))
    backward = registry.resolve_family("QKVBwd")
    live = tuple(k for k in ORDER if k in arrays)
    config = dict(
        norm={"RMS_NORM": "rms", "LAYER_NORM": "layer"}[norm],
        hidden_actual=None,
        layout="BSD",
        fused_add="prologue",
        fused_rope=True,
        is_tiled=False,
        eps=1e-6,
        live=live,
        d_head=4,
        num_q_heads=2,
        num_kv_heads=1,
    )

    def gradients(outs):
        cotangents = [jnp.ones_like(outs[0]), *[None] * (len(outs) - 1)]
        grads = backward(
            *[arrays.get(k) for k in ORDER], *outs, *cotangents, name="QKVBwd", **config
        )
        return dict(zip(live, grads, strict=True))

    clean = gradients(outs)
    outs[poisoned] = jnp.full_like(outs[poisoned], jnp.nan)
    stained = {k for k, g in gradients(outs).items() if not np.isfinite(g).all()}
    assert all(np.isfinite(g).all() for g in clean.values())
    # What is linear in the cotangent alone does not read it.
    assert stained == set(live) - {"bias", "layer_norm_bias"}
    outs[0] = jnp.full_like(outs[0], jnp.nan)
    outs[poisoned] = emitted(arrays, options)[poisoned]
    assert all(np.isfinite(g).all() for g in gradients(outs).values())


@pytest.mark.parametrize("shape", [(2, 5, 96), (1, 1, 96)])
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(shape):
    x = operands(shape, (3, 2, 6), "bfloat16")
    arrays, options = call(x, (3, 2, 6), "LAYER_NORM")
    wanted, _ = reference(arrays, options)
    got = jitted(options)(arrays)
    with neuronjax.plain():
        plain = jitted(options)(arrays)
    assert got.dtype == plain.dtype == jnp.bfloat16
    assert error(got, wanted) <= 2 * error(plain, wanted)


def test_gradients_keep_their_dtypes():
    """R-24: bfloat16 gradients; float32 master weights get float32 ones."""
    x = operands(heads=(2, 1, 4), dtype="bfloat16")
    arrays, options = call(x, (2, 1, 4), "RMS_NORM")
    for wide in (False, True):
        weights = dict(arrays)
        if wide:
            for name in ("fused_qkv_weights", "gamma_norm_weights", "bias"):
                weights[name] = weights[name].astype("float32")
        out = jitted(options)(weights)
        grads = jax.grad(lambda a: jitted(options)(a).astype("float32").sum())(weights)
        assert out.dtype == jnp.bfloat16
        assert {k: g.dtype for k, g in grads.items()} == {
            k: v.dtype for k, v in weights.items()
        }
        wanted, _ = reference(weights, options)
        assert error(out, wanted) < 2e-2


@pytest.mark.parametrize("sizes", [(5, 129, 3), (1, 1, 1), (129, 127, 513)])
def test_sizes_that_fill_no_tile(sizes):
    """R-25: the projection alone, and its gradients."""
    rows, width, columns = sizes
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, rows, width)).astype("float32")
    w = rng.standard_normal((width, columns)).astype("float32")
    out, pull = jax.vjp(lambda x, w: neuronjax.qkv(x, w), x, w)
    assert error(out, x.astype("float64") @ w.astype("float64")) < 1e-5
    dx, dw = pull(jnp.ones_like(out))
    assert error(dx, np.ones((1, rows, columns)) @ w.T.astype("float64")) < 1e-5
    assert error(dw, x[0].T.astype("float64") @ np.ones((rows, columns))) < 1e-5


@pytest.mark.parametrize("x64", [False, True])
def test_scalars_do_not_change_the_dtype(x64):
    """R-48."""
    x = operands(heads=(2, 1, 4), dtype="bfloat16")
    arrays, options = call(x, (2, 1, 4), "RMS_NORM")
    with jax.enable_x64(x64):
        forms = [1e-6, np.float64(1e-6), np.float32(1e-6), jnp.float32(1e-6), 0]
        for eps in (*forms, jnp.asarray(1e-6)):
            given = dict(options, norm_eps=eps)
            out, pull = jax.vjp(lambda a, o=given: neuronjax.qkv_cte(**a, **o), arrays)
            (grads,) = pull(jnp.ones_like(out))
            assert out.dtype == jnp.bfloat16
            assert {g.dtype for g in grads.values()} == {jnp.dtype("bfloat16")}


def test_one_row_against_narrow_weights_keeps_the_activations_precision():
    """The two-row form carries what rounding the row to bfloat16 takes away."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 1, 576)), "float32")
    w = jnp.asarray(rng.standard_normal((576, 96)), "bfloat16")
    got = neuronjax.qkv(x, w)
    wanted = np.asarray(x, "float64") @ np.asarray(w, "float64")
    assert got.dtype == jnp.float32 and error(got, wanted) < 1e-4


@pytest.mark.parametrize("eps", [-1e-6, np.nan, np.inf, -np.inf])
def test_an_epsilon_that_makes_nan_is_refused(eps):
    x, w = jnp.ones((1, 2, 8)), jnp.ones((8, 16))
    for function, name in (
        (neuronjax.qkv, "norm_eps"),
        (neuronjax.qkv_tkg, "eps"),
        (emit.qkv_kernel, "eps"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be finite and at least 0"):
            function(x, w, **{name: eps})


@pytest.mark.parametrize("function", ["qkv", "qkv_cte", "qkv_tkg"])
def test_a_mix_of_tiles_and_tensors_names_the_called_function(function):
    tile = MemrefTile.from_tensor(jnp.ones((1, 2, 8)), 2)
    with pytest.raises(ValueError, match=f"^Inputs/outputs to {function} must be all"):
        getattr(neuronjax, function)(tile, jnp.ones((8, 16)))
