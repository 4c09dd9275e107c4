"""Experts over a mesh equal the dense formula and one device, at the stated cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.sharding import expert_parallel_moe, make_mesh
from tests.hlo import collectives
from tests.plain_moe import plain_moe

K, EXPERTS = 3, 8
NAMES = ("x", "router", "gate_up", "down", "router_b", "gate_up_b", "down_b")


def operands(tokens=16, width=6, d_ff=5, biases=True, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = [
        (tokens, width),
        (width, EXPERTS),
        (EXPERTS, width, 2, d_ff),
        (EXPERTS, d_ff, width),
        (EXPERTS,),
        (EXPERTS, 2, d_ff),
        (EXPERTS, width),
    ]
    arrays = [rng.standard_normal(s) for s in shapes[: 7 if biases else 4]]
    names = NAMES[: len(arrays)]
    return {n: jnp.asarray(a, dtype) for n, a in zip(names, arrays, strict=True)}


def over(mesh, arrays, *, k=K, **options):
    names = dict(
        router_bias="router_b",
        gate_and_up_proj_bias="gate_up_b",
        down_proj_bias="down_b",
    )
    biases = {key: arrays.get(name) for key, name in names.items()}
    four = [arrays[n] for n in NAMES[:4]]
    return expert_parallel_moe(mesh, *four, k=k, **biases, **options)


def plain(arrays, k=K, **rule):
    four = [arrays[n] for n in NAMES[:4]]
    return plain_moe(*four, k, biases=[arrays.get(n) for n in NAMES[4:]], **rule)


def value_and_grads(run, arrays):
    """The output, and gradients of a sum that weighs every element differently."""

    def total(arrays):
        out = run(arrays)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=out.dtype))), out

    def pulled(arrays):
        (_, out), grads = jax.value_and_grad(total, has_aux=True)(arrays)
        return out, grads

    return jax.jit(pulled)(arrays)


def dense64(arrays, **rule):
    """The same of the dense formula in float64."""
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(a, np.float64)) for n, a in arrays.items()}
        return jax.tree.map(
            np.asarray, value_and_grads(lambda a: plain(a, **rule), wide)
        )


def agree(got, wanted, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = max(np.abs(y).max(), 1)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "plain"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_it_equals_the_dense_formula_with_all_gradients(devices, biases):
    arrays = operands(biases=biases)
    mesh = make_mesh(expert=devices)
    got = value_and_grads(lambda a: over(mesh, a)[0], arrays)
    agree(got, dense64(arrays))


FEW, EACH = 8, 2


@functools.cache
def any_routing(devices):
    """Output and gradients for `FEW` tokens that say where they go."""
    mesh = make_mesh(expert=devices)
    return jax.jit(
        lambda arrays, mask: value_and_grads(
            lambda a: over(mesh, a, k=EACH, token_mask=mask)[0], arrays
        )
    )


@st.composite
def routings(draw):
    """`[T, k]` distinct experts of each token, and which tokens count."""
    row = st.lists(
        st.integers(0, EXPERTS - 1), min_size=EACH, max_size=EACH, unique=True
    )
    index = draw(st.lists(row, min_size=FEW, max_size=FEW))
    mask = st.lists(st.booleans() | st.just(True), min_size=FEW, max_size=FEW)
    return np.array(index), np.array(draw(mask))


@pytest.mark.parametrize("devices", [2, 4, 8])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(routing=routings())
def test_any_routing_over_any_number_of_devices(devices, routing):
    """A token's first columns are its logits: the router's weights copy them."""
    index, mask = routing
    arrays = operands(tokens=FEW, width=EXPERTS + 1, d_ff=2)
    x = np.array(arrays["x"])
    x[:, :EXPERTS] = np.clip(x[:, :EXPERTS], -0.5, 0.5)
    np.put_along_axis(x[:, :EXPERTS], index, np.array([[2.0, 1.25]]), 1)
    arrays["x"] = jnp.asarray(np.where(mask[:, None], x, 0), jnp.float32)
    arrays["router"] = jnp.eye(EXPERTS + 1, EXPERTS)
    arrays["router_b"] = jnp.zeros(EXPERTS)
    got = any_routing(devices)(arrays, jnp.asarray(mask))
    agree(got, exact_few(arrays, mask))
    idle = ~np.isin(np.arange(EXPERTS), index[mask])
    for name in ("gate_up", "down", "gate_up_b", "down_b"):
        assert not np.asarray(got[1][name])[idle].any(), name


@functools.cache
def _few64():
    return jax.jit(
        lambda arrays, mask: value_and_grads(
            lambda a: plain(a, k=EACH, mask=mask), arrays
        )
    )


def exact_few(arrays, mask):
    """`dense64`, compiled once."""
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(a, np.float64)) for n, a in arrays.items()}
        return jax.tree.map(np.asarray, _few64()(wide, mask))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_it_equals_one_device_and_so_does_its_router(devices):
    arrays = operands(seed=1)
    one, many = (
        jax.jit(lambda a, n=n: over(make_mesh(expert=n), a))(arrays)
        for n in (1, devices)
    )
    np.testing.assert_array_equal(many[2], one[2])
    np.testing.assert_allclose(many[1], one[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5, atol=1e-5)
    loss = neuronjax.load_balance_loss(*many[1:])
    np.testing.assert_allclose(loss, neuronjax.load_balance_loss(*one[1:]), rtol=1e-6)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_the_block_size_changes_no_value(block_size):
    arrays = operands(seed=2)
    mesh = make_mesh(expert=4)
    got = value_and_grads(lambda a: over(mesh, a, block_size=block_size)[0], arrays)
    agree(got, dense64(arrays))


@pytest.mark.parametrize("expert", [0, 5])
def test_all_tokens_may_go_to_one_expert(expert):
    """The worst routing drops nothing; the other experts' gradients are exactly 0."""
    arrays = operands(seed=3)
    arrays["router_b"] = arrays["router_b"].at[expert].set(100.0)
    mesh = make_mesh(expert=4)
    got = value_and_grads(lambda a: over(mesh, a, k=1)[0], arrays)
    agree(got, dense64(arrays, k=1))
    others = np.arange(EXPERTS) != expert
    for name in ("gate_up", "down", "gate_up_b", "down_b"):
        grad = np.asarray(got[1][name])
        assert not grad[others].any() and grad[expert].any(), name


def test_padding_tokens_reach_no_expert():
    """R-38 over a mesh: padding holds NaN, and reaches no output and no gradient."""
    arrays = operands(seed=4)
    mask = jnp.arange(16) % 3 != 0
    x = arrays["x"]
    arrays["x"] = jnp.where(mask[:, None], x, 0)
    wanted = dense64(arrays, mask=np.asarray(mask))
    arrays["x"] = jnp.where(mask[:, None], x, jnp.nan)
    mesh = make_mesh(expert=4)
    got = value_and_grads(lambda a: over(mesh, a, token_mask=mask)[0], arrays)
    agree(got, wanted)
    assert not np.asarray(got[0])[~mask].any()


def test_a_selection_bias_and_sigmoids():
    """R-36 over a mesh."""
    arrays, bias = operands(seed=5), jnp.linspace(-1, 1, EXPERTS)
    mesh = make_mesh(expert=4)
    rule = dict(act_fn="SIGMOID", norm_topk_prob=False, selection_bias=bias)
    got = value_and_grads(lambda a: over(mesh, a, **rule)[0], arrays)
    wanted = dense64(arrays, act="SIGMOID", normalize=False, bias=np.asarray(bias))
    agree(got, wanted)


def test_tokens_over_two_axes():
    arrays = operands(seed=6)
    mesh = make_mesh(data=2, expert=4)
    got = value_and_grads(lambda a: over(mesh, a, batch="data")[0], arrays)
    agree(got, dense64(arrays))


def test_the_capacity_drops_the_later_tokens_of_a_device():
    arrays = operands(seed=7, biases=False)
    mesh = make_mesh(expert=2)
    run = jax.jit(lambda a, c: over(mesh, a, k=1, capacity=c), static_argnums=1)
    out, _, index = run(arrays, 3)
    whole = run(arrays, None)[0]
    sent = np.zeros((2, 2), int)
    for t, (e,) in enumerate(np.asarray(index)):
        way = t // 8, e // 4
        sent[way] += 1
        wanted = whole[t] if sent[way] <= 3 else jnp.zeros_like(out[t])
        np.testing.assert_allclose(out[t], wanted, rtol=1e-6, atol=1e-6)
    assert (sent > 3).any()
    enough = run(arrays, 100)[0]
    np.testing.assert_array_equal(enough, whole)


def test_bfloat16_errs_no_more_than_twice_the_plain_computation():
    arrays = operands(tokens=32, width=16, d_ff=8, biases=False, dtype="bfloat16")
    mesh = make_mesh(expert=4)
    wanted = dense64(arrays)
    naive = value_and_grads(plain, arrays)
    got = value_and_grads(lambda a: over(mesh, a)[0], arrays)
    for x, y, z in zip(*map(jax.tree.leaves, (got, wanted, naive)), strict=True):
        assert x.dtype == jnp.bfloat16
        error, plain_error = (
            np.abs(np.asarray(v, np.float64) - y).max() for v in (x, z)
        )
        assert error <= 2 * plain_error + 1e-6


def test_affinities_cross_in_full_precision_with_narrow_hidden_states():
    """Equal experts return the token itself times the sum of its affinities, 1."""
    with jax.enable_x64(True):
        for dtype, exact in (("bfloat16", 2**-8), ("float64", 1e-14)):
            arrays = operands(biases=False, seed=8, dtype=dtype)
            ones = jnp.ones_like
            arrays["gate_up"] = ones(arrays["gate_up"])
            arrays["down"] = ones(arrays["down"])
            out = jax.jit(lambda a: over(make_mesh(expert=8), a)[0])(arrays)
            s = np.asarray(arrays["x"], np.float64).sum(1, keepdims=True)
            wanted = np.broadcast_to(5 * s * s / (1 + np.exp(-s)), out.shape)
            np.testing.assert_allclose(
                np.asarray(out, np.float64), wanted, rtol=8 * exact, atol=exact
            )


def test_derivatives_of_both_modes():
    with jax.enable_x64(True):
        arrays = operands(tokens=4, width=3, d_ff=2, dtype="float64")
        mesh = make_mesh(expert=2)
        run = jax.jit(lambda a: over(mesh, a)[0])
        check_grads(run, (arrays,), order=1, modes=["rev", "fwd"])


@pytest.mark.parametrize("checkpoint", ["store", "recompute"])
@pytest.mark.parametrize(
    ("dtype", "backward"), [("float32", 4), ("bfloat16", 5)], ids=str
)
def test_two_all_to_alls_a_layer_and_no_gather(dtype, backward, checkpoint):
    arrays = operands(dtype=dtype, biases=False)
    mesh = make_mesh(expert=4)
    specs = dict(x=P("expert"), router=P(), gate_up=P("expert"), down=P("expert"))
    placed = {
        n: jax.device_put(a, jax.NamedSharding(mesh, specs[n]))
        for n, a in arrays.items()
    }
    run = lambda a: over(mesh, a, checkpoint=checkpoint)[0]  # noqa: E731
    assert collectives(run, placed) == {"all-to-all": 2}

    def both(a, cotangent):
        out, pull = jax.vjp(run, a)
        return out, pull(cotangent)

    found = collectives(both, placed, jax.jit(run)(placed))
    assert found == {"all-to-all": backward, "all-reduce": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(axis="data"), "axis must be an axis of the mesh"),
        (dict(tokens=6), "T must be a positive multiple of the 4 devices .* got 6"),
        (dict(tokens=0), "T must be a positive multiple of the 4 devices .* got 0"),
        (dict(experts=6), "E must be a multiple of the 4 devices of 'expert', got 6"),
        (dict(capacity=0), "capacity must be a positive integer, got 0"),
        (dict(block_size=0), "block_size must be a positive integer, got 0"),
        (dict(skip_dma=None), "options must be among .*, got skip_dma"),
        (dict(capacity=True), "capacity must be a positive integer, got True"),
        (dict(k=2.0), "k must be an integer from 1 to E = 8, got 2.0"),
        (dict(k=9), "k must be an integer from 1 to E = 8, got 9"),
        (dict(batch="expert"), "batch must be another axis than 'expert'"),
        (
            dict(down_b=jnp.zeros((2, 6))),
            r"down_proj_bias must .* \(8, 6\), got \(2, 6",
        ),
        (
            dict(down=jnp.zeros((8, 4, 6))),
            r"down_proj_weight .* \(8, 5, 6\), got \(8, 4",
        ),
        (
            dict(gate_up=jnp.zeros((8, 3, 2, 5))),
            r"gate_up_proj_weight .* \(8, 6, 2, 5\)",
        ),
        (dict(router=jnp.zeros((5, 8))), r"router_weight must .* \(6, 8\), got \(5, 8"),
        (dict(x=jnp.zeros((2, 4, 6))), r"x must have shape \[T, H\], got \(2, 4, 6"),
        (dict(token_mask=jnp.ones(3, bool)), r"token_mask must .* \(8,\), got \(3,"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_refusals(change, message):
    change = dict(change)
    arrays = operands(tokens=change.pop("tokens", 8), biases=False)
    experts = change.pop("experts", EXPERTS)
    arrays |= {n: arrays[n][:experts] for n in ("gate_up", "down")}
    arrays["router"] = arrays["router"][:, :experts]
    arrays |= {n: change.pop(n) for n in NAMES if n in change}
    with pytest.raises(ValueError, match=f"expert_parallel_moe: {message}"):
        over(make_mesh(expert=4), arrays, **change)


def test_an_explicit_mesh_takes_operands_as_they_lie():
    arrays, mesh = operands(seed=9), make_mesh(explicit=True, expert=2)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda a: over(mesh, a, capacity=np.int64(8))[0])(arrays)
    wanted = jax.jit(lambda a: over(make_mesh(expert=2), a)[0])(arrays)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_explicit_axes_carry_the_split_in_the_type():
    arrays = operands(seed=9)
    wanted = value_and_grads(lambda a: over(make_mesh(expert=4), a)[0], arrays)
    mesh = make_mesh(explicit=True, expert=4)
    with jax.set_mesh(mesh):
        whole = ("router", "router_b")
        placed = {
            n: jax.device_put(
                a, jax.NamedSharding(mesh, P() if n in whole else P("expert"))
            )
            for n, a in arrays.items()
        }
        out = jax.jit(lambda a: over(mesh, a)[0])(placed)
        grads = jax.jit(jax.grad(lambda a: (over(mesh, a)[0] ** 2).sum()))(placed)
    assert jax.typeof(out).sharding.spec == P("expert", None)
    assert jax.typeof(grads["gate_up"]).sharding.spec[0] == "expert"
    np.testing.assert_allclose(out, wanted[0], rtol=1e-6, atol=1e-6)
