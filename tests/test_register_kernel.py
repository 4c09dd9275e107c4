"""Kernels of users: registered, differentiated, transformed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.primitives import registry
from neuronjax.tools.transformations import CELLS, RULES, State
from tests.user_kernel_case import (
    GATE,
    X,
    gated,
    gated_numpy,
    register,
)


def test_the_emitter_is_called_as_the_function_and_binds_one_macro():
    unit = register()
    wide = np.asarray(X, np.float64), np.asarray(GATE, np.float64)
    for out, limit in [
        (unit(X, GATE), 2.0),
        (unit(gate=GATE, x=X), 2.0),
        (unit(X, GATE, jnp.arange(3), limit=0.5), 0.5),
    ]:
        np.testing.assert_allclose(out, gated_numpy(*wide, limit), rtol=1e-5)
    (row,) = neuronjax.trace(functools.partial(unit, limit=0.5), X, GATE).rows
    assert (row.name, dict(row.config)) == ("GatedUnit", dict(limit=0.5))
    assert row.leaf == f"{gated.__module__}.gated"
    assert unit.__name__ == "gated" and unit.__doc__ == gated.__doc__


def test_a_decorator_registers():
    @neuronjax.register_kernel("Doubled")
    def doubled(x):
        return 2 * x

    assert neuronjax.trace(doubled, X).names == ("Doubled",)
    with neuronjax.plain():
        assert neuronjax.trace(doubled, X).names == ()


def test_the_gradient_is_the_backward_macro():
    unit = register()
    gradient = jax.grad(lambda x, g: unit(x, g).sum(), (0, 1))
    assert neuronjax.trace(gradient, X, GATE).names == ("GatedUnit", "GatedUnitBwd")
    check_grads(jax.jit(unit), (X, GATE), 2, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_without_a_backward_jax_differentiates_the_function():
    unit = register("Ungated", backward=None)
    gradient = jax.grad(lambda x: unit(x, GATE).sum())
    assert neuronjax.trace(gradient, X).names == ("Ungated",)
    np.testing.assert_allclose(gradient(X), gated(jnp.ones_like(X), GATE), rtol=1e-6)


@pytest.mark.parametrize("label", ["GatedUnit", "GatedUnitBwd"])
def test_the_transformation_table_is_green(label):
    register()
    report = neuronjax.check_transformations(label)
    assert report and len(report.of(State.GREEN)) == len(CELLS) + len(RULES), report


def test_operands_and_gradients_are_pytrees_and_outputs_a_tuple():
    def affine(params, x, *, scale=1.0):
        y = x @ params["w"] * scale
        return y + params.get("b", 0), jnp.argmax(y, -1)

    def affine_bwd(operands, outs, cotangents, *, scale):
        params, x = operands
        dy, d_index = cotangents
        assert d_index is None
        grads = dict(w=x.T @ dy * scale, b=dy.sum(0))
        return {k: grads[k] for k in params}, dy @ params["w"].T * scale

    def example(dtype, batch):
        w = jax.random.normal(jax.random.key(1), (3, 2), dtype)
        x = jax.random.normal(jax.random.key(2), (batch, 3), dtype)
        return dict(w=w, b=w[0]), x

    emit = neuronjax.register_kernel(
        "Affine", affine, backward=affine_bwd, outputs=("y", "index"), example=example
    )
    params = dict(w=jnp.ones((3, 2)), b=jnp.ones(2))
    y, index = emit(params, X)
    assert y.shape == (4, 2) and index.dtype == jnp.int32
    assert emit({"w": params["w"]}, X)[0].shape == (4, 2)
    loss = lambda params, x: jnp.sum(emit(params, x, scale=2.0)[0] ** 2)  # noqa: E731
    check_grads(jax.jit(loss), (params, X), 2, modes=["rev"], atol=1e-2, rtol=1e-2)
    report = neuronjax.check_transformations(
        "AffineBwd", ["grad", "vmap (1, 0, ..)", "shard_map over 3", "one structure"]
    )
    assert report, report
    assert registry.resolve_family("AffineBwd").output_names(
        dict(scale=1.0, gradients=("d_params_b", "d_params_w", "d_x"))
    ) == ("AffineBwd_d_params_b", "AffineBwd_d_params_w", "AffineBwd_d_x")


def test_a_weight_outside_shard_map_gets_the_sum_over_the_mesh():
    def scaled(x, w):
        return x * w

    emit = neuronjax.register_kernel(
        "Scaled",
        scaled,
        backward=lambda operands, y, dy: (
            dy * operands[1],
            jnp.sum(dy * operands[0], 0),
        ),
    )
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    w = jnp.arange(3.0)

    def loss(x, w):
        local = jax.shard_map(
            emit, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
        )
        return jnp.sum(jnp.sin(local(x, w)))

    got = jax.jit(jax.grad(loss, (0, 1)))(X, w)
    wanted = jax.grad(lambda x, w: jnp.sum(jnp.sin(x * w)), (0, 1))(X, w)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_remat_policy_keeps_the_named_output():
    unit = register()
    policy = jax.checkpoint_policies.save_only_these_names("GatedUnit_out")
    kept = jax.checkpoint(lambda x: jnp.sin(unit(x, GATE)).sum(), policy=policy)
    assert neuronjax.trace(jax.grad(kept), X).count("GatedUnit") == 1


def test_the_composite_spells_out_settings_that_stablehlo_does_not_know():
    @neuronjax.register_kernel("Activated")
    def activated(x, *, act=jax.nn.relu, kind=neuronjax.ActFnType.SiLU, bias=None):
        return act(x)

    with neuronjax.lowering("composite"):
        text = jax.jit(activated).lower(X).as_text()
    assert 'stablehlo.composite "neuron.Activated"' in text
    assert 'act = "relu", bias = "none", kind = "SiLU"' in text


def test_registering_again_replaces_the_kernel_everywhere():
    first = register("Again")
    np.testing.assert_allclose(first(X, GATE), gated(X, GATE), rtol=1e-5)
    np.testing.assert_allclose(
        neuronjax.emit.bir_kernel("Again", X, GATE, None, limit=2.0)[0], gated(X, GATE)
    )
    second = neuronjax.register_kernel("Again", lambda x, gate, index=None: x + gate)
    np.testing.assert_array_equal(second(X, GATE), X + GATE)
    np.testing.assert_array_equal(
        neuronjax.emit.bir_kernel("Again", X, GATE)[0], X + GATE
    )
    with pytest.raises(ValueError, match="'AgainBwd'; near matches"):
        neuronjax.resolve_kernel_config("AgainBwd")


def test_an_emitter_that_was_replaced_keeps_its_kernel_and_is_traced():
    first = register("Replaced")
    neuronjax.register_kernel("Replaced", lambda x: x + 1)
    gradient = jax.grad(lambda x: first(x, GATE).sum())
    assert neuronjax.trace(gradient, X).names == ("Replaced", "ReplacedBwd")
    wanted = jax.grad(lambda x: gated(x, GATE).sum())(X)
    np.testing.assert_allclose(gradient(X), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "kernel",
    [
        jax.jit(lambda x: x * 2),
        functools.partial(lambda x, *, times: x * times, times=2),
        type("Twice", (), {"__call__": lambda self, x: x * 2})(),
        lambda x, *more: sum(more, x) + x,
    ],
)
def test_anything_that_is_called_can_be_registered(kernel):
    emit = neuronjax.register_kernel("Called", kernel)
    np.testing.assert_array_equal(emit(X), X * 2)
    assert neuronjax.trace(jax.vmap(emit), X).names == ("Called",)


def test_macros_may_stand_inside_a_kernel():
    emit = neuronjax.register_kernel(
        "Outer", lambda x: 2 * neuronjax.rms_norm(x, jnp.ones(3))
    )
    assert neuronjax.trace(emit, X).names == ("Outer",)
    with neuronjax.lowering("composite"):
        text = jax.jit(emit).lower(X).as_text()
    assert "neuron.Outer" in text and "neuron.NeuronReduceMacro" in text
    check_grads(jax.jit(emit), (X,), 1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_float64_and_finite_differences_take_a_users_name():
    register()
    assert neuronjax.verify("GatedUnit") and neuronjax.verify("GatedUnitBwd")
    assert neuronjax.gradcheck("GatedUnit")
    wrong = functools.partial(register, "Wrong")
    wrong(backward=lambda operands, y, dy, *, limit: (dy, dy, None))
    assert not neuronjax.gradcheck("Wrong")


def test_a_users_kernel_is_a_bir_kernel_too():
    register()
    call = lambda x: neuronjax.emit.bir_kernel("GatedUnit", x, GATE)[0].sum()  # noqa: E731
    rows = neuronjax.trace(jax.grad(call), X).rows
    kinds = [(row.name, dict(row.config)["kernel_name"]) for row in rows]
    assert kinds == [("BIRKernel", "GatedUnit"), ("BIRKernel", "GatedUnitBwd")]
    wanted = jax.grad(lambda x: gated(x, GATE).sum())(X)
    np.testing.assert_allclose(jax.grad(call)(X), wanted, rtol=1e-5)


def test_a_loop_with_a_computed_bound_has_a_static_form():
    def power(x, count):
        return lax.fori_loop(0, count, lambda _, y: y * x, jnp.ones_like(x))

    def unrolled(x, count):
        return x**3

    def power_bwd(operands, y, dy):
        x, count = operands
        return dy * count.astype(x.dtype) * x ** (count - 1).astype(x.dtype), None

    emit = neuronjax.register_kernel(
        "Power", power, static=unrolled, backward=power_bwd
    )
    count = jnp.asarray(3, jnp.int32)
    gradient = jax.grad(lambda x: emit(x, count).sum())
    second = jax.grad(lambda x: gradient(x).sum())
    np.testing.assert_allclose(gradient(X), 3 * X**2, rtol=1e-5)
    np.testing.assert_allclose(second(X), 6 * X, rtol=1e-4)
