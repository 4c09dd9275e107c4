"""The router on tiles, over a mesh, exported, and under remat; its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.sharding.mesh import make_mesh
from tests.router_case import operands, router


@pytest.mark.parametrize("tokens", [5, 256])
@pytest.mark.parametrize("layout", [0, 1])
def test_tiles_equal_tensors(tokens, layout):
    x, w, b = operands(tokens, 256)
    bias, mask = b[0] / 3, jnp.arange(tokens) % 4 != 1
    given = x.T if layout == 0 else x
    config = dict(act_fn="SIGMOID", k=3, norm_topk=True)
    config["form"] = "HT" if layout == 0 else "TH"
    axes = (layout, 0, 1, 0, 0)
    arrays = (given, w, b, bias, mask)

    def outs(*arrays):
        tiles = map(MemrefTile.from_tensor, arrays, axes)
        return [t.to_tensor() for t in emit.router_topk_kernel(*tiles, **config)]

    wanted = emit.router_topk_kernel(*arrays, **config)
    for a, c in zip(outs(*arrays), wanted, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5)

    def loss(run):
        return lambda *a: jnp.sin(run(*a, bias, mask)[2]).sum()

    plain = lambda *a: emit.router_topk_kernel(*a, **config)  # noqa: E731
    grads = (jax.grad(loss(run), (0, 1, 2))(given, w, b) for run in (outs, plain))
    for a, c in zip(*grads, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5)


def test_a_tiled_leaf_keeps_its_operands_tiled():
    data = [
        MemrefTile.from_tensor(z, axis).data
        for z, axis in zip(operands(4, 256)[:2], (1, 0), strict=True)
    ]
    family = neuronjax.primitives.registry.resolve_family("RouterTopK")
    config = dict(form="tiled", k=2, act="SOFTMAX", pre_norm=True, norm_topk=True)

    def run(*data):
        return family.leaf(
            *data, None, None, None, name="RouterTopK", is_tiled=True, **config
        )

    jaxpr = jax.make_jaxpr(run)(*data).jaxpr
    for eqn in jaxpr.eqns:
        if set(map(id, eqn.invars)) & set(map(id, jaxpr.invars)):
            assert eqn.primitive.name not in ("reshape", "transpose"), eqn


def test_a_size_of_the_error_passes():
    """R-26."""
    x, w, b = operands(4, 200, 600)
    report = neuronjax.can(
        "router_topk", x, w, b, act_fn="SOFTMAX", k=9, x_hbm_layout=1
    )
    assert bool(report) and not report.on_chip
    sizes = dict(report.nearest)
    assert sizes == {"H": 256, "E": 512, "k": 8}
    x, w, b = operands(4, sizes["H"], sizes["E"])
    call = dict(act_fn="SOFTMAX", k=sizes["k"], x_hbm_layout=1)
    assert neuronjax.can("router_topk", x, w, b, **call).on_chip


def test_options_without_a_use_are_refused():
    """R-27."""
    x, w, b = operands()
    with pytest.raises(ValueError, match="norm_topk_prob needs router_pre_norm"):
        router(x, w, b, act_fn="SOFTMAX", router_pre_norm=False, norm_topk_prob=True)


def test_a_replicated_weight_under_shard_map_gets_its_whole_gradient():
    """R-43."""
    x, w, b = operands(8)
    run = lambda x, w: router(x, w, b, act_fn="SOFTMAX")[2]  # noqa: E731
    split = jax.shard_map(
        run, mesh=make_mesh(data=4), in_specs=(P("data"), P()), out_specs=P("data")
    )
    got, wanted = (
        jax.grad(lambda w, f=f: jnp.sin(f(x, w)).sum())(w) for f in (split, run)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_named_residuals_keep_the_forward_from_running_twice():
    """R-46."""
    x, w, b = operands()
    policies = jax.checkpoint_policies
    names = [f"router_topk_{n}" for n in ("logits", "index", "affinities", "topk")]
    saved = policies.save_only_these_names(*names)
    for policy, times in ((saved, 1), (policies.nothing_saveable, 2)):
        kept = jax.checkpoint(
            lambda x, w: jnp.sin(router(x, w, b, act_fn="SOFTMAX")[2]), policy=policy
        )
        gradient = jax.grad(lambda *a, f=kept: f(*a).sum(), (0, 1))
        assert neuronjax.trace(gradient, x, w).count("RouterTopK") == times


def test_every_option_that_changes_the_outputs_keeps_one_structure():
    """R-47."""
    x, w, b = operands()
    for given in ({}, dict(return_eager_affi=True), dict(skip_store_expert_index=True)):
        run = lambda *a, g=given: router(*a, act_fn="SIGMOID", **g)  # noqa: E731
        out = jax.tree.map(lambda z: (z.shape, z.dtype), run(x, w, b))
        with neuronjax.plain():
            plain = jax.eval_shape(run, x, w, b)
        primal = jax.eval_shape(lambda *a, f=run: jax.vjp(f, *a)[0], x, w, b)
        for other in (plain, primal, jax.eval_shape(run, x, w, b)):
            assert jax.tree.map(lambda z: (z.shape, z.dtype), other) == out


def test_symbolic_tokens_export_with_the_gradient():
    """R-49."""
    x, w, b = operands()
    (tokens,) = export.symbolic_shape("t")
    shapes = [jax.ShapeDtypeStruct(z.shape, z.dtype) for z in (x, w, b)]
    shapes[0] = jax.ShapeDtypeStruct((tokens, 16), "float32")

    def run(*a):
        loss = lambda *a: jnp.sin(router(*a, act_fn="SOFTMAX")[2]).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(*a)

    saved = export.export(jax.jit(run), platforms=["cpu", "tpu", "cuda"])(*shapes)
    got = export.deserialize(saved.serialize()).call(x, w, b)
    for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(run(x, w, b)), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5)
