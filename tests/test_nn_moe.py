"""The layer of experts: the dense formula in float64, gradients, padding, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import nn
from neuronjax.sharding import make_mesh, place
from tests.hlo import collectives
from tests.plain_moe import plain_affinities, plain_experts

WIDTH, D_FF, EXPERTS, K, SHARED = 8, 6, 16, 2, 4
EPS = 1e-6


def layer_of(**options):
    sizes = (WIDTH, D_FF, EXPERTS, K)
    return nn.MoE(*sizes, **dict(shared_d_ff=SHARED) | options, rngs=nnx.Rngs(0))


def inputs(batch=2, seq=3, dtype="float32"):
    return jax.random.normal(jax.random.key(1), (batch, seq, WIDTH), dtype)


def plain_layer(state, x, *, mask=None, act="SOFTMAX", normalize=True, k=K):
    """RMSNorm, router, all experts weighted, the shared expert; `[tokens, width]`."""
    x = x.reshape(-1, WIDTH)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * state["norm"]
    rule = dict(act=act, normalize=normalize, mask=mask)
    affinities = plain_affinities(x @ state["router"], k, **rule)
    out = plain_experts(x, affinities, state["gate_up"], state["down"])
    if "shared" in state:
        gate = x @ state["shared"]["gate"]
        middle = gate / (1 + jnp.exp(-gate)) * (x @ state["shared"]["up"])
        out = out + middle @ state["shared"]["down"]
    return out, affinities


def waves(out):
    return jnp.vdot(out.ravel(), jnp.cos(jnp.arange(out.size, dtype=out.dtype)))


def arrays_of(tree):
    """A state or its gradients as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)


def wanted64(layer, x, **rule):
    """Output, gradients of the parameters and of `x`, and the affinities, float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64)), (arrays_of(layer), x)
        )

        def total(state, x):
            out, affinities = plain_layer(state, x, **rule)
            return waves(out), (out, affinities)

        run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        (_, (out, affinities)), grads = jax.jit(run)(*wide)
        return jax.tree.map(np.asarray, (out, grads, affinities))


def got_of(layer, x, call=lambda layer, x: layer(x)):
    @nnx.jit
    def run(layer, x):
        def total(layer, x):
            out = call(layer, x)
            return waves(out), out

        return nnx.value_and_grad(total, argnums=(0, 1), has_aux=True)(layer, x)

    (_, out), (d_layer, dx) = run(layer, x)
    return out, (arrays_of(d_layer), dx)


def agree(got, wanted, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = max(np.abs(y).max(), 1)
        x = np.asarray(x).reshape(np.shape(y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, {}),
        (dict(norm_topk_prob=False, shared_d_ff=0), dict(normalize=False)),
        (dict(act_fn="SIGMOID", checkpoint="recompute"), dict(act="SIGMOID")),
        (dict(block_size=3), {}),
    ],
    ids=str,
)
def test_it_equals_the_dense_formula_with_every_gradient(options, rule):
    layer, x = layer_of(**options), inputs()
    out, grads, affinities = wanted64(layer, x, **rule)
    got, got_grads = got_of(layer, x)
    agree(got, out)
    agree(got_grads, grads)
    empty = ~(affinities > 0).any(0)
    assert empty.any() and not empty.all()
    for name in ("gate_up", "down"):
        expert_grads = np.asarray(got_grads[0][name])
        assert not expert_grads[empty].any(), "experts without tokens: exactly 0"
        assert all(g.any() for g in expert_grads[~empty])


def test_it_is_the_twin_of_the_functions():
    layer, x = layer_of(norm=False, shared_d_ff=0), inputs()
    rows = x.reshape(-1, WIDTH)
    _, index, affinities = neuronjax.router_topk(
        rows,
        layer.router[...],
        act_fn="SOFTMAX",
        k=K,
        x_hbm_layout=1,
        norm_topk_prob=True,
    )
    blocks = neuronjax.route_to_blocks(index, EXPERTS, 4)
    wanted = neuronjax.moe_cte(
        jnp.pad(rows, ((0, 1), (0, 0))),
        neuronjax.mask_affinities(affinities, index),
        layer.gate_up[...],
        layer.down[...],
        *blocks[:2],
        4,
        "shard_on_i",
    )
    got = layer(x).reshape(-1, WIDTH)
    np.testing.assert_allclose(got, wanted[:-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer(x, residual=x), layer(x) + x, rtol=1e-6)


def test_the_balance_loss_is_that_of_the_router():
    layer, x = layer_of(), inputs()
    out, loss = layer.with_balance(x)
    np.testing.assert_array_equal(out, layer(x))
    state = {
        n: np.asarray(v, np.float64)
        for n, v in arrays_of(layer).items()
        if n != "shared"
    }
    rows = np.asarray(x, np.float64).reshape(-1, WIDTH)
    rows /= np.sqrt((rows**2).mean(-1, keepdims=True) + EPS)
    logits = rows @ state["router"]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-logits, -1)[:, :K]
    load = np.bincount(best.ravel(), minlength=EXPERTS) / best.size
    np.testing.assert_allclose(loss, EXPERTS * (load * p.mean(0)).sum(), rtol=1e-5)


@pytest.mark.parametrize("shared", [0, SHARED])
def test_padding_goes_to_no_expert(shared):
    """R-38: NaN in padding reaches no output, no gradient and no loss; rows are 0."""
    layer, x = layer_of(shared_d_ff=shared), inputs(2, 4)
    mask = jnp.array([[True, True, False, False], [True, True, True, False]])
    padded = jnp.where(mask[..., None], x, 0)
    out, grads, _ = wanted64(layer, padded, mask=np.asarray(mask).ravel())
    poisoned = jnp.where(mask[..., None], x, jnp.nan)
    got = got_of(layer, poisoned, lambda layer, x: layer(x, token_mask=mask))
    agree(got, (out, grads))
    empty = ~np.asarray(mask)
    assert (
        not np.asarray(got[0])[empty].any() and not np.asarray(got[1][1])[empty].any()
    )
    balance = nnx.jit(lambda layer, x, mask: layer.with_balance(x, None, mask)[1])
    loss, alone = balance(layer, poisoned, mask), balance(layer, x[mask][None], None)
    np.testing.assert_allclose(loss, alone, rtol=1e-5)


def test_a_narrow_dtype_computes_narrow():
    layer, x = layer_of(dtype=jnp.bfloat16), inputs()
    out = layer(x)
    assert out.dtype == jnp.bfloat16
    wanted = wanted64(layer, x)[0]
    error = np.abs(np.asarray(out, np.float64).reshape(wanted.shape) - wanted)
    assert error.max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("few", [False, True], ids=["call", "decode"])
def test_a_narrow_input_meets_wide_parameters(few):
    """As in `nn.MLP`; the router's weights are rounded, the experts' are not."""
    layer, x = layer_of(), inputs(dtype="bfloat16")
    out = layer.decode(x) if few else layer(x)
    assert out.dtype == jnp.bfloat16
    narrow = np.asarray(layer.router[...].astype(jnp.bfloat16), np.float32)
    layer.router[...] = jnp.asarray(narrow)
    wanted = wanted64(layer, x.astype(jnp.float32))[0]
    error = np.abs(np.asarray(out, np.float64).reshape(wanted.shape) - wanted)
    assert error.max() < 0.03 * np.abs(wanted).max()


def test_a_block_of_no_slots_is_refused():
    with pytest.raises(ValueError, match="block_size must be a positive integer"):
        layer_of(block_size=0)(inputs())


@pytest.mark.parametrize("few", [False, True], ids=["call", "decode"])
def test_the_shared_expert_is_added_before_the_sum_is_rounded(few):
    """256 + 1 - 256 in bfloat16, which holds no 257: what is left is 1."""
    options = dict(norm=False, shared_d_ff=1, dtype=jnp.bfloat16)
    layer = nn.MoE(1, 2, 1, 1, **options, rngs=nnx.Rngs(0))
    layer.gate_up[...] = jnp.array([[[[64.0, 64.0], [1.0, 1.0]]]])  # silu(64) = 64
    layer.down[...] = jnp.array([[[4.0], [2**-6]]])
    layer.shared.gate[...], layer.shared.up[...] = jnp.array([[64.0]]), jnp.ones((1, 1))
    layer.shared.down[...] = jnp.array([[-4.0]])
    x = jnp.ones((1, 1, 1), jnp.bfloat16)
    run = layer.decode if few else layer
    for residual, wanted in ((None, 1.0), (2**-6 * x, 1 + 2**-6)):
        out = run(x, residual)
        assert out.dtype == jnp.bfloat16 and out.item() == wanted


@pytest.mark.parametrize("act_fn", ["SOFTMAX", "SIGMOID"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_few_tokens_by_the_decode_macro_give_the_same(act_fn, normalize):
    layer, x = layer_of(act_fn=act_fn, norm_topk_prob=normalize), inputs(seq=1)
    agree(layer.decode(x, residual=x), layer(x, residual=x))
    decoded, whole = (
        got_of(layer, x, call)[1]
        for call in (lambda m, x: m.decode(x), lambda m, x: m(x))
    )
    agree(decoded, whole)


def test_quantizing_a_model_leaves_the_experts():
    layer = layer_of()
    narrow = neuronjax.quantize(nnx.Dict(moe=layer), "row-fp8")["moe"]
    assert isinstance(narrow.shared, nn.QuantizedMLP)
    np.testing.assert_array_equal(narrow.gate_up[...], layer.gate_up[...])


@pytest.mark.parametrize(
    "sizes", [dict(expert=4), dict(tensor=3), dict(expert=4, tensor=2)], ids=str
)
def test_parameters_split_over_a_mesh(sizes):
    layer, x = layer_of(shared_d_ff=0), inputs()
    wanted = layer(x)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    assert specs["gate_up"] == P("expert", None, None, "tensor")
    assert specs["down"] == P("expert", "tensor", None)
    place(layer, make_mesh(**sizes))
    got = nnx.jit(lambda m, x: m(x))(layer, x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def over(devices, **options):
    """A layer whose tokens and experts are split, and the same on one device."""
    mesh = make_mesh(expert=devices)
    layer, one = layer_of(mesh=mesh, **options), layer_of(**options)
    place(layer, mesh)
    return layer, one


def test_over_a_mesh_it_is_the_layer_of_one_device():
    """Output, balance loss and gradients; six tokens are filled up to eight."""
    (layer, one), x = over(4), inputs()
    mask = jnp.array([[True, False, True], [True, True, False]])
    x = jnp.where(mask[..., None], x, jnp.nan)

    def call(layer, x):
        out, loss = layer.with_balance(x, token_mask=mask)
        return jnp.append(out.ravel(), loss)

    agree(got_of(layer, x, call), jax.tree.map(np.asarray, got_of(one, x, call)))


def test_decoding_over_a_mesh_with_fewer_tokens_than_devices():
    (layer, one), x = over(4), inputs(3, 1)
    got = nnx.jit(lambda layer, x: layer.decode(x, residual=x))(layer, x)
    agree(got, np.asarray(one.decode(x, residual=x)))


def test_over_a_mesh_two_all_to_alls_and_nothing_else_cross_the_wire():
    layer, _ = over(4)
    x = jax.device_put(inputs(4), jax.NamedSharding(layer.mesh, P("expert")))
    graph, state = nnx.split(layer)
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    assert collectives(run, state, x) == {"all-to-all": 2}


def test_a_mesh_without_the_axis_is_refused():
    with pytest.raises(ValueError, match="nn.MoE: axis must be an axis of the mesh"):
        layer_of(mesh=make_mesh(data=2))
