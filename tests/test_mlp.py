"""`mlp` and its emitters, against the equations in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import ActFnType, NormType
from neuronjax.emit import mlp_fused_add_kernel, mlp_kernel
from neuronjax.kernels.mlp import dense
from neuronjax.kernels.mlp.operands import Operands
from neuronjax.primitives.mlp.facts import ARGUMENTS
from tests.mlp_equations import (
    COMBINATIONS,
    EPILOGUE,
    FULL,
    PLAIN,
    call_of,
    draw,
    emitted,
    equations,
    ids,
)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=ids)
def test_values_and_gradients_follow_the_equations(combination):
    with jax.enable_x64(True):
        arrays, settings, residual = call_of(combination)

        def loss(f, arrays, residual):
            outs = f(arrays, residual)
            return sum(jnp.sin(o + i).sum() for i, o in enumerate(outs)), outs

        macro = lambda a, r: emitted(a, settings, r)  # noqa: E731
        plain = lambda a, r: equations(a | settings, r)  # noqa: E731
        wrt = 0 if residual is None else (0, 1)
        (got, outs), (wanted, expected) = (
            jax.jit(jax.grad(functools.partial(loss, f), wrt, has_aux=True))(
                arrays, residual
            )
            for f in (macro, plain)
        )
    pairs = map(jax.tree.leaves, ((outs, got), (expected, wanted)))
    for a, b in zip(*pairs, strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "combination", [FULL, EPILOGUE, PLAIN, COMBINATIONS[9]], ids=ids
)
def test_second_derivatives(combination):
    """The cotangents of the stored pre-activations count, or this is wrong."""
    with jax.enable_x64(True):
        arrays, settings, residual = call_of(combination, lead=(2,), d_model=4, d_ff=5)
        keys = list(arrays)

        def of(*values):
            given = dict(zip(keys, values[: len(keys)], strict=True))
            return emitted(given, settings, *(values[len(keys) :] or (None,)))

        live = [*arrays.values(), *([] if residual is None else [residual])]
        check_grads(jax.jit(of), live, 2, modes=["fwd", "rev"])


@pytest.mark.parametrize("combination", [FULL, EPILOGUE, COMBINATIONS[0]], ids=ids)
@pytest.mark.parametrize("lead", [(2, 5), (1, 1), (97,)])
def test_float32_and_bfloat16_are_as_good_as_plain(combination, lead):
    """bfloat16 errs at most twice as much as the plain bfloat16 computation."""
    sizes = dict(lead=lead, d_model=96, d_ff=40)
    for dtype in ("float32", "bfloat16"):
        arrays, settings, residual = call_of(combination, **sizes, dtype=dtype)
        got = emitted(arrays, settings, residual)
        plain = equations(arrays | settings, residual)
        with jax.enable_x64(True):
            wide = {k: v.astype(jnp.float64) for k, v in arrays.items()}
            r = None if residual is None else residual.astype(jnp.float64)
            exact = equations(wide | settings, r)
        for a, b, c in zip(got, plain, exact, strict=True):
            assert a.dtype == dtype
            a, b, c = (np.asarray(t, np.float64) for t in (a, b, c))
            error = [np.abs(t - c).max() for t in (a, b)]
            assert error[0] <= 2 * error[1] + 1e-6


def _leaf(combination=FULL, dtype="float32", lead=(2, 3)):
    """Operands, config and outputs of the leaf, and cotangents of ones."""
    arrays, settings, residual = call_of(combination, dtype=dtype, lead=lead)
    names = {v: k for k, v in ARGUMENTS["mlp"].items()}
    ops = Operands(**{names[key]: x for key, x in arrays.items()})
    norm = {"NO_NORM": "none", "RMS_NORM": "rms", "LAYER_NORM": "layer"}
    added = {"stored": "prologue"}.get(combination[1], combination[1])
    config = dict(
        activation=settings["activation_fn"],
        norm=norm[str(settings["normalization_type"])],
        eps=1e-3,
        fused_add=added,
        store_fused_add=settings["store_fused_add_result"],
    )
    outs = dense.mlp_fwd(*ops, name="MLP", **config)
    return ops, config, outs, tuple(map(jnp.ones_like, outs))


def test_the_backward_reads_the_stored_pre_activations():
    """A poisoned output poisons the gradients that the equations make of it."""
    ops, config, outs, cotangents = _leaf()
    keys = [key for key, x in ops._asdict().items() if x is not None]
    through_gate = {"hidden", "gate_w", "gamma", "gate_b", "addend"}
    poisons = {
        0: set(),
        1: set(),
        2: through_gate | {"up_w", "down_w", "up_b"},
        # d_up = d_middle * act(gate) does not read up.
        3: through_gate | {"down_w"},
    }
    for which, spoiled in poisons.items():
        bad = [o * jnp.nan if i == which else o for i, o in enumerate(outs)]
        grads = dense.mlp_bwd(*ops, *bad, *cotangents, name="MLPBwd", **config)
        found = {k for k, g in zip(keys, grads, strict=True) if jnp.isnan(g).any()}
        assert found == spoiled


def _primitives(fun, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(*args).eqns]


def test_no_product_is_computed_twice():
    """Three products forward; six backward, two for each weight."""
    ops, config, outs, cotangents = _leaf(PLAIN)
    given = [x for x in ops if x is not None]
    forward = functools.partial(dense.mlp_fwd, name="MLP", **config)
    assert _primitives(forward, *given).count("dot_general") == 3

    def backward(*arrays):
        rest = [None] * (len(ops) - len(given))
        operands = (*arrays[: len(given)], *rest, *arrays[len(given) :])
        return dense.mlp_bwd(*operands, name="MLPBwd", **config)

    found = _primitives(backward, *given, *outs, *cotangents)
    assert found.count("dot_general") == 6


def test_forward_and_backward_need_no_more_memory_than_plain_jax():
    """A batch of one, whose unit axis kept XLA from reusing its buffers."""
    arrays, _, _ = call_of(PLAIN, lead=(1, 256), d_model=96, d_ff=288, dtype="float32")
    x, *weights = arrays.values()

    def plain(x, gate, up, down):
        return (jax.nn.silu(x[0] @ gate) * (x[0] @ up)) @ down

    def macro(*given):
        return neuronjax.mlp(*given)[0][0]

    def both(fun):
        def run(*given):
            out, pull = jax.vjp(fun, *given)
            return out, pull(jnp.ones_like(out))

        return run

    for form in (lambda f: f, both):
        used, wanted = (
            jax.jit(form(f)).lower(x, *weights).compile().memory_analysis()
            for f in (macro, plain)
        )
        assert used.temp_size_in_bytes <= wanted.temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_row_loses_nothing_and_widens_no_weight(dtype):
    """Decode with bfloat16 weights: XLA on a CPU would widen them for one row."""
    arrays, settings, _ = call_of(
        PLAIN, lead=(1, 1), d_model=96, d_ff=288, dtype="bfloat16"
    )
    arrays["hidden_tensor"] = draw(1, 1, 96, dtype=dtype)
    call = jax.jit(functools.partial(neuronjax.mlp, **settings, output_dtype="float32"))
    compiled = call.lower(**arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 96 * 288
    with jax.enable_x64(True):
        wide = {k: v.astype(jnp.float64) for k, v in arrays.items()}
        (exact,) = equations(wide)
    exact = np.asarray(exact)
    error = np.abs(np.asarray(compiled(**arrays)[0], np.float64) - exact).max()
    # In bfloat16 the gated values are rounded in front of the last product.
    assert error <= {"float32": 1e-6, "bfloat16": 1e-2}[dtype] * np.abs(exact).max()


def test_the_gradient_holds_the_backward_macro():
    arrays, settings, _ = call_of(FULL, dtype="float32")
    seen = neuronjax.trace(
        jax.grad(lambda a: neuronjax.mlp(**a, **settings)[0].sum()), arrays
    )
    assert seen.count("MLP") == 1 and seen.count("MLPBwd") == 1


def test_a_clamp_passes_no_gradient_outside_its_limits():
    x, eye = jnp.array([[2.0, 0.1]]), jnp.eye(2)
    loss = lambda x: neuronjax.mlp(  # noqa: E731
        x, eye, eye, eye, up_clamp_upper_limit=1.0, gate_clamp_upper_limit=1.0
    )[0].sum()
    assert jax.grad(loss)(x)[0, 0] == 0 != jax.grad(loss)(x)[0, 1]


def test_swish_is_not_silu():
    one = jnp.ones((1, 1))
    wanted = dict(SiLU=0.731059, Swish=0.845795, GELU=0.841345)
    for kind, value in (wanted | dict(GELU_Tanh_Approx=0.841192)).items():
        (out,) = neuronjax.mlp(
            one, None, one, one, skip_gate_proj=True, activation_fn=kind
        )
        np.testing.assert_allclose(out, [[value]], atol=1e-6)


def test_enum_members_and_their_names_are_alike():
    arrays, settings, _ = call_of(FULL, dtype="float32")
    a = neuronjax.mlp(**arrays, **settings)
    settings |= dict(activation_fn=ActFnType.SiLU, normalization_type=NormType.RMS_NORM)
    for x, y in zip(a, neuronjax.mlp(**arrays, **settings), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_epilogue_leaves_no_add_in_the_program():
    x, w = jnp.ones((1, 2, 8)), jnp.ones((8, 8))
    fun = lambda x, r: mlp_fused_add_kernel(x, w, w, w, mlp_out=x, attn_out=r)  # noqa: E731
    assert _primitives(fun, x, x) == ["mlp"]
    fun = lambda x, r: neuronjax.mlp(x, w, w, w, fused_add_tensor=r)  # noqa: E731
    assert _primitives(fun, x, x) == ["mlp"]


def test_the_destination_gives_a_dtype_and_no_values():
    x, w = draw(1, 2, 8, dtype="float32"), draw(8, 8, dtype="float32")
    fused = lambda m, r: mlp_fused_add_kernel(x, w, w, w, m, r)  # noqa: E731
    destination = jnp.full(x.shape, jnp.nan, jnp.bfloat16)
    out = fused(destination, x)
    assert out.dtype == jnp.bfloat16 and jnp.isfinite(out).all()
    grad = jax.grad(lambda m: fused(m, x).astype(jnp.float32).sum())(destination)
    assert grad.dtype == jnp.bfloat16 and not grad.any()


def test_without_residuals_the_fused_emitter_is_the_plain_one():
    x, w = draw(1, 2, 8, dtype="float32"), draw(8, 8, dtype="float32")
    np.testing.assert_array_equal(
        mlp_fused_add_kernel(x, w, w, w), mlp_kernel(x, w, w, w)
    )


@pytest.mark.parametrize("lnc", [1, 2])
def test_the_stored_layout_of_the_down_weight(lnc):
    """Split into (I, lnc, H/128/lnc, 128) and transposed (0, 1, 3, 2), it is [I, H]."""
    arrays, settings, _ = call_of(PLAIN, d_model=512, d_ff=6, dtype="float32")
    stored = np.asarray(arrays["down_proj_weights_tensor"])
    logical = stored.reshape(6, lnc, 512 // 128 // lnc, 128).transpose(0, 1, 3, 2)
    wanted = neuronjax.mlp(
        **dict(arrays, down_proj_weights_tensor=jnp.asarray(logical.reshape(6, 512)))
    )
    layout = dict(
        use_tkg_down_proj_optimized_layout=True,
        use_tkg_down_proj_column_tiling=False,
        lnc=lnc,
    )
    got = neuronjax.mlp(**arrays, **layout)
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-6)
    assert neuronjax.can("mlp", **arrays, **layout).on_chip


def test_the_path_and_placement_change_no_value():
    arrays, settings, _ = call_of(FULL, dtype="float32")
    wanted = neuronjax.mlp(**arrays, **settings)
    hints = (
        "force_cte_mode",
        "use_tkg_gate_up_proj_column_tiling",
        "use_tkg_down_proj_column_tiling",
    )
    for hint in hints:
        got = neuronjax.mlp(**arrays, **settings, **{hint: hint == "force_cte_mode"})
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("store_output_in_sbuf", True),
        ("sbm", object()),
    ],
)
def test_an_option_about_memory_on_chip_refuses(option, value):
    """R-27."""
    arrays, settings, _ = call_of(PLAIN, dtype="float32")
    words = f"mlp: {option} = .* has no meaning .* SBUF"
    with pytest.raises(NotImplementedError, match=words):
        neuronjax.mlp(**arrays, **settings, **{option: value})


def test_a_narrow_weight_without_scales_is_refused():
    """R-27."""
    x, w = jnp.ones((1, 2, 8)), jnp.ones((8, 8), jnp.float8_e4m3)
    with pytest.raises(ValueError, match="up_proj_weights_tensor of dtype float8_e4m3"):
        neuronjax.mlp(x, w, w, w)


def test_an_array_is_no_setting():
    """R-44: the message names the argument."""
    arrays, settings, _ = call_of(PLAIN, dtype="float32")
    call = lambda eps: neuronjax.mlp(**arrays, **dict(settings, eps=eps))  # noqa: E731
    with pytest.raises(ValueError, match="must be Python numbers.*got eps"):
        jax.jit(call)(jnp.float32(1e-3))


@pytest.mark.parametrize(
    "number", [float, np.float64, np.float32, lambda v: jnp.asarray(v, jnp.float32)]
)
def test_a_scalar_of_any_kind_keeps_the_dtype(number):
    """R-48."""
    combination = ("RMS_NORM", "none", False, "SiLU", True, False)
    arrays, settings, _ = call_of(combination, dtype="bfloat16")
    numbers = {k: number(v) for k, v in settings.items() if isinstance(v, float)}
    for x64 in (False, True):
        with jax.enable_x64(x64):
            outs, pull = jax.vjp(
                lambda a: neuronjax.mlp(**a, **(settings | numbers)), arrays
            )
            dtypes = {x.dtype for x in jax.tree.leaves((outs, pull(outs)))}
            assert dtypes == {jnp.dtype(jnp.bfloat16)}


def test_weight_gradients_keep_the_dtype_of_the_weights():
    """R-24: all bfloat16, and float32 weights with bfloat16 activations."""
    for weights in ("bfloat16", "float32"):
        arrays, settings, _ = call_of(FULL, dtype=weights)
        for key in ("hidden_tensor", "fused_add_tensor"):
            arrays[key] = arrays[key].astype(jnp.bfloat16)
        outs, pull = jax.vjp(lambda a: neuronjax.mlp(**a, **settings), arrays)  # noqa: B023
        assert {o.dtype for o in outs} == {jnp.dtype(jnp.bfloat16)}
        (grads,) = pull(outs)
        assert all(grads[key].dtype == x.dtype for key, x in arrays.items())


@pytest.mark.parametrize("sizes", [(5, 129, 3), (1, 1, 1), (129, 127, 513)])
def test_sizes_that_fill_no_tile(sizes):
    """R-25."""
    rows, d_model, d_ff = sizes
    arrays, settings, _ = call_of(
        PLAIN, lead=(rows,), d_model=d_model, d_ff=d_ff, dtype="float32"
    )
    loss = lambda f, a: jnp.sin(f(a)[0]).sum()  # noqa: E731
    macro = functools.partial(loss, lambda a: neuronjax.mlp(**a, **settings))
    plain = functools.partial(loss, lambda a: equations(a | settings))
    for f in (lambda g, a: g(a), lambda g, a: jax.grad(g)(a)):
        got, wanted = (
            jax.tree.leaves(f(macro, arrays)),
            jax.tree.leaves(f(plain, arrays)),
        )
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_rows_do_not_see_each_other():
    arrays, settings, _ = call_of(FULL, lead=(1, 8), dtype="float32")
    swapped = {k: v[:, ::-1] if v.ndim == 3 else v for k, v in arrays.items()}
    a, b = (neuronjax.mlp(**given, **settings)[0] for given in (arrays, swapped))
    np.testing.assert_allclose(a[:, ::-1], b, atol=1e-6)
