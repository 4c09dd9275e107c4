"""The MLP under transformations, and over meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.mlp import sharded_mlp
from tests.hlo import collectives
from tests.mlp_equations import (
    COMBINATIONS,
    FULL,
    PLAIN,
    call_of,
    emitted,
    ids,
)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
def test_vmap_is_a_python_loop_and_one_macro(axes):
    """R-42."""
    arrays, settings, _ = call_of(PLAIN, lead=(4,), dtype="float32")
    x, *weights = arrays.values()

    def each(x, *w):
        return neuronjax.mlp(x, *w, **settings)[0]

    stack = lambda v, axis: v if axis is None else jnp.stack([v, 2 * v], axis)  # noqa: E731
    x, weights = stack(x, axes[0]), [stack(w, axes[1]) for w in weights]
    mapped = jax.vmap(each, (axes[0], *[axes[1]] * 3))
    take = lambda v, axis, i: v if axis is None else jnp.take(v, i, axis)  # noqa: E731
    wanted = [
        each(take(x, axes[0], i), *[take(w, axes[1], i) for w in weights])
        for i in range(2)
    ]
    np.testing.assert_allclose(mapped(x, *weights), jnp.stack(wanted), atol=1e-5)
    assert neuronjax.trace(mapped, x, *weights).count("MLP") == 1
    total = lambda *a: jnp.sin(mapped(*a)).sum()  # noqa: E731
    grads = jax.grad(total, (0, 1, 2, 3))(x, *weights)
    assert [g.shape for g in grads] == [v.shape for v in (x, *weights)]


def test_remat_keeps_the_named_residuals():
    """R-46: the names are in the docstring of `mlp`."""
    arrays, settings, _ = call_of(FULL, dtype="float32")
    names = ("mlp_out", "mlp_added", "mlp_gate", "mlp_up")
    assert all(f"`{name}`" in neuronjax.mlp.__doc__ for name in names)
    policies = jax.checkpoint_policies
    for policy, times in (
        (policies.save_only_these_names(*names), 1),
        (policies.nothing_saveable, 2),
    ):
        kept = jax.checkpoint(
            lambda a: jnp.sin(neuronjax.mlp(**a, **settings)[0]).sum(), policy=policy
        )
        assert neuronjax.trace(jax.grad(kept), arrays).count("MLP") == times


@pytest.mark.parametrize("combination", COMBINATIONS[:8], ids=ids)
def test_every_form_has_one_structure(combination):
    """R-47: abstract evaluation, vmap, the forward rule and the plain reference."""
    arrays, settings, residual = call_of(combination, dtype="float32")
    fun = lambda a: emitted(a, settings, residual)  # noqa: E731
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(fun, arrays))
    with neuronjax.plain():
        plain = fun(arrays)
    lifted = jax.tree.map(lambda x: x[None], arrays)
    mapped = jax.tree.map(lambda x: x[0], jax.vmap(fun)(lifted))
    for outs in (fun(arrays), jax.vjp(fun, arrays)[0], plain, mapped):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), outs) == shapes


def test_a_replicated_weight_and_sharded_rows():
    """R-43: dw is the sum over devices, with varying-axis checks on."""
    x, w = jnp.arange(12.0).reshape(4, 3), jnp.ones((3, 1))
    mesh = make_mesh(data=4)
    fun = jax.shard_map(
        lambda x, w: neuronjax.mlp(x, w, w, w.T)[0],
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    got = jax.grad(lambda w: fun(x, w).sum())(w)
    wanted = jax.grad(lambda w: neuronjax.mlp(x, w, w, w.T)[0].sum())(w)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_it_runs_under_every_kind_of_mesh():
    """R-50: Auto, Explicit, inside shard_map, and without a mesh."""
    arrays, settings, _ = call_of(FULL, lead=(2, 3), d_ff=8, dtype="float32")
    fun = jax.jit(lambda a: neuronjax.mlp(**a, **settings)[0])
    grad = jax.jit(jax.grad(lambda a: jnp.sin(fun(a)).sum()))
    wanted = (fun(arrays), grad(arrays))
    columns, rows, split = P(None, "tensor"), P("tensor", None), P("data")
    specs = dict.fromkeys(arrays, P()) | dict(
        hidden_tensor=split,
        fused_add_tensor=split,
        gate_proj_weights_tensor=columns,
        up_proj_weights_tensor=columns,
        down_proj_weights_tensor=rows,
        gate_proj_bias_tensor=columns,
        up_proj_bias_tensor=columns,
    )
    for explicit in (False, True):
        mesh = make_mesh(explicit=explicit, data=2, tensor=2)
        with jax.set_mesh(mesh):
            given = {
                key: jax.device_put(x, NamedSharding(mesh, specs[key]))
                for key, x in arrays.items()
            }
            got = fun(given), grad(given)
            if explicit:
                assert jax.typeof(got[0]).sharding.spec == P("data", None, None)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize(
    "combination", [FULL, COMBINATIONS[0], COMBINATIONS[30]], ids=ids
)
def test_tensor_parallel_values_and_gradients(combination, tensor):
    arrays, settings, _ = call_of(combination, lead=(2, 3), d_ff=6, dtype="float32")
    mesh = make_mesh(data=2, tensor=tensor)
    split = functools.partial(sharded_mlp, mesh, batch="data", **settings)
    loss = lambda f, a: sum(jnp.sin(o).sum() for o in f(**a))  # noqa: E731
    got, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, f)))(arrays)
        for f in (split, functools.partial(neuronjax.mlp, **settings))
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_tensor_parallelism_costs_one_all_reduce_each_way():
    arrays, settings, _ = call_of(FULL, lead=(2, 3), d_ff=8, dtype="float32")
    split = functools.partial(sharded_mlp, make_mesh(tensor=4), **settings)
    fun = lambda a: split(**a)[0]  # noqa: E731
    assert collectives(fun, arrays) == {"all-reduce": 1}
    # The backward's one carries the gradients of activations and gain together.
    loss = lambda a: jnp.sin(fun(a)).sum()  # noqa: E731
    assert collectives(jax.grad(loss), arrays) == {"all-reduce": 2}


def test_an_axis_that_the_mesh_lacks_is_refused():
    w = jnp.ones((8, 8))
    with pytest.raises(ValueError, match="sharded_mlp: tensor must be an axis of"):
        sharded_mlp(make_mesh(data=2), jnp.ones((2, 2, 8)), w, w, w)


def test_the_export_of_a_gradient_has_both_names():
    """R-49: the table exports every NAME; here one program with both."""
    arrays, settings, _ = call_of(FULL, dtype="float32")
    grad = jax.jit(jax.grad(lambda a: jnp.sin(neuronjax.mlp(**a, **settings)[0]).sum()))
    saved = jax.export.export(grad, platforms=["cpu", "tpu", "cuda"])(arrays)
    text = saved.mlir_module()
    assert "@MLP(" in text and "@MLPBwd(" in text
