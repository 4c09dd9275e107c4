"""QKV mapped, rematerialised, exported, and split over meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.qkv import (
    head_order,
    shard_qkv_columns,
    sharded_qkv,
    unshard_qkv_columns,
)
from tests.hlo import collectives
from tests.macro_case import error
from tests.qkv_case import (
    NORMS,
    call,
    jitted,
    operands,
)


def test_vmap_with_some_operands_unmapped():
    """R-42: an unmapped weight gets one summed gradient, and no copy."""
    arrays, options = call(operands(), (2, 1, 4))
    stacked = dict(arrays, input=jnp.stack([arrays["input"], arrays["input"] / 2]))
    dims = ({k: 0 if k == "input" else None for k in arrays},)
    run = jax.vmap(lambda a: neuronjax.qkv_cte(**a, **options), dims)
    rows = [jitted(options)(dict(arrays, input=x)) for x in stacked["input"]]
    np.testing.assert_allclose(run(stacked), jnp.stack(rows), rtol=1e-5, atol=1e-5)
    grads = jax.grad(lambda a: jnp.sin(run(a)).sum())(stacked)
    wanted = jax.grad(
        lambda a: sum(
            jnp.sin(jitted(options)(dict(a, input=x))).sum() for x in a["input"]
        )
    )(stacked)
    for name, gradient in wanted.items():
        assert error(grads[name], gradient) < 1e-5
    jacobian = jax.jacrev(lambda w: neuronjax.qkv(jnp.ones((1, 1, 2)), w))(jnp.eye(2))
    assert jacobian.shape == (1, 1, 2, 2, 2)


def test_named_residuals_keep_the_forward_from_running_twice():
    """R-46."""
    arrays, options = call(operands(), (2, 1, 4), "LAYER_NORM")
    names = "out fused_hidden mean rstd".split()
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names(*(f"qkv_{name}" for name in names))
    for policy, times in ((saved, 1), (policies.nothing_saveable, 2)):
        kept = jax.checkpoint(jitted(options), policy=policy)
        gradient = jax.grad(lambda a, f=kept: jnp.sin(f(a)).sum())
        assert neuronjax.trace(gradient, arrays).count("QKV") == times


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("add", [False, True])
def test_every_option_that_changes_outputs_keeps_one_structure(norm, add):
    """R-47."""
    arrays, options = call(operands(), (2, 1, 4), norm, add=add, rope=False)

    def run(a):
        return neuronjax.qkv(**a, **options)

    wanted = jax.tree.map(jax.typeof, run(arrays))
    shapes = jax.eval_shape(run, arrays)
    with neuronjax.plain():
        plain = jax.eval_shape(run, arrays)
    primal = jax.eval_shape(lambda a: jax.vjp(run, a)[0], arrays)
    mapped = jax.vmap(run)(jax.tree.map(lambda x: x[None], arrays))
    mapped = jax.tree.map(lambda x: jax.typeof(x[0]), mapped)
    for other in (shapes, plain, primal, mapped):
        assert jax.tree.structure(other) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(wanted), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_a_symbolic_batch_exports_with_its_gradient():
    """R-49."""
    arrays, options = call(operands(), (2, 1, 4))
    (b,) = export.symbolic_shape("b")
    whole = ("fused_qkv_weights", "bias", "gamma_norm_weights")
    shapes = {
        k: jax.ShapeDtypeStruct(v.shape if k in whole else (b, *v.shape[1:]), v.dtype)
        for k, v in arrays.items()
    }

    def run(a):
        loss = lambda a: jnp.sin(neuronjax.qkv(**a, **options)).sum()  # noqa: E731
        return jax.value_and_grad(loss)(a)

    saved = export.export(jax.jit(run), platforms=["cpu", "tpu", "cuda"])(shapes)
    again = export.deserialize(saved.serialize())
    got, wanted = again.call(arrays), run(arrays)
    for a, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, w) < 1e-5


@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (1, 3), (2, 3), (1, 5)])
def test_heads_and_batch_split_over_a_mesh(layout, data, tensor):
    heads = (2 * tensor, tensor, 4)
    mesh = make_mesh(data=data, tensor=tensor)
    arrays, options = call(operands((2, 3, 6), heads), heads, "RMS_NORM", layout)
    counts = dict(num_q_heads=heads[0], num_kv_heads=heads[1])
    placed = dict(arrays)
    for name in ("fused_qkv_weights", "bias"):
        placed[name] = shard_qkv_columns(arrays[name], *counts.values(), tensor)
        back = unshard_qkv_columns(placed[name], *counts.values(), tensor)
        np.testing.assert_array_equal(back, arrays[name])

    def split(a):
        out = sharded_qkv(mesh, **a, **options, batch="data", heads="tensor")
        if layout == "NBSd":
            return out[np.argsort(head_order(*counts.values(), tensor))]
        return unshard_qkv_columns(out, *counts.values(), tensor)

    out, pull = jax.vjp(jax.jit(split), placed)
    wanted, plain_pull = jax.vjp(jitted(options), arrays)
    assert error(out, wanted) < 1e-5
    (grads,), (plain,) = pull(jnp.cos(wanted)), plain_pull(jnp.cos(wanted))
    for name in ("fused_qkv_weights", "bias"):
        plain[name] = shard_qkv_columns(plain[name], *counts.values(), tensor)
    for name, gradient in plain.items():
        assert error(grads[name], gradient) < 1e-5, name


def test_what_crosses_the_wire():
    """Forward nothing; backward one all-reduce for each set of axes."""
    arrays, options = call(operands((2, 3, 6), (4, 2, 4)), (4, 2, 4), "RMS_NORM")
    for sizes, axes, times in (
        (dict(tensor=2), dict(heads="tensor"), 1),
        (dict(data=2, tensor=2), dict(heads="tensor", batch="data"), 3),
    ):
        mesh = make_mesh(**sizes)
        rows, columns = P(axes.get("batch")), P(None, "tensor")
        whole = dict(fused_qkv_weights=columns, bias=columns, gamma_norm_weights=P())
        placed = {
            k: jax.device_put(v, NamedSharding(mesh, whole.get(k, rows)))
            for k, v in arrays.items()
        }

        def run(a, mesh=mesh, axes=axes):
            return sharded_qkv(mesh, **a, **options, **axes)

        cotangent = jax.eval_shape(run, placed)
        cotangent = jax.device_put(
            jnp.ones(cotangent.shape), NamedSharding(mesh, P(*rows, None, "tensor"))
        )
        assert collectives(run, placed) == {}
        pull = lambda a, ct, f=run: jax.vjp(f, a)[1](ct)  # noqa: E731
        assert collectives(pull, placed, cotangent) == {"all-reduce": times}


def test_a_replicated_weight_under_shard_map_gets_its_whole_gradient():
    """R-43."""
    mesh = make_mesh(data=4)
    x, w = jnp.arange(12.0).reshape(4, 1, 3), jnp.ones((3, 1))
    run = jax.shard_map(
        neuronjax.qkv, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    gradient = jax.grad(lambda w: run(x, w).sum())(w)
    np.testing.assert_allclose(gradient[:, 0], [18, 22, 26])


@pytest.mark.parametrize("explicit", [False, True])
def test_the_same_call_runs_on_auto_and_explicit_meshes(explicit):
    """R-50: without a mesh, under both kinds of axes, and inside shard_map."""
    arrays, options = call(operands((2, 3, 6)), (2, 1, 4))
    wanted = jitted(options)(arrays)
    mesh = make_mesh(data=2, explicit=explicit)
    whole = ("fused_qkv_weights", "bias", "gamma_norm_weights")
    specs = {k: P() if k in whole else P("data") for k in arrays}
    with jax.set_mesh(mesh):
        placed = {
            k: jax.device_put(v, NamedSharding(mesh, specs[k]))
            for k, v in arrays.items()
        }
        out = jitted(options)(placed)
        inner = jax.shard_map(jitted(options), in_specs=(specs,), out_specs=P("data"))
        mapped = jax.jit(inner)(placed)
    if explicit:
        assert jax.typeof(out).sharding.spec[0] == "data"
    assert error(jax.device_get(out), wanted) < 1e-6
    assert error(jax.device_get(mapped), wanted) < 1e-6


def test_heads_that_do_not_divide_are_refused():
    mesh = make_mesh(tensor=2)
    x = operands(heads=(2, 1, 4))
    with pytest.raises(
        ValueError, match="num_q_heads = 2 and num_kv_heads = 1 must be"
    ):
        sharded_qkv(
            mesh, x["input"], x["fused_qkv_weights"], num_q_heads=2, num_kv_heads=1
        )
    with pytest.raises(ValueError, match="batch must be an axis of the mesh"):
        sharded_qkv(
            mesh,
            x["input"],
            x["fused_qkv_weights"],
            num_q_heads=2,
            num_kv_heads=2,
            batch="rows",
        )
    with pytest.raises(ValueError, match="columns must be a multiple of 4 heads"):
        shard_qkv_columns(jnp.zeros((3, 7)), 2, 1, 1)
