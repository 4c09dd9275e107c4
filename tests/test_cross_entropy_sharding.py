"""The loss with vocabulary and tokens over a mesh: values, gradients, and the wire."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding import (
    make_mesh,
    sharded_cross_entropy,
    sharded_linear_cross_entropy,
)
from tests.cross_entropy_equations import linear_loss_and_gradients, loss_and_gradient
from tests.hlo import along, program

TARGETS = np.array([[3, 0, -100], [11, 6, 1], [1, 8, -100], [5, 5, 10]], np.int32)
WEIGHTS = np.linspace(0, 2, 12, dtype=np.float32).reshape(4, 3)
OPTIONS = {
    "plain": dict(ignore_index=-100),
    "all": dict(ignore_index=-100, label_smoothing=0.1, z_loss=0.05, weights=WEIGHTS),
}


def drawn(*shape):
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


def flat(options):
    return {k: v.ravel() if k == "weights" else v for k, v in options.items()}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("sizes", [dict(data=2, tensor=4), dict(data=1, tensor=3)])
def test_logits_over_a_mesh_equal_the_equations(sizes, options, explicit):
    mesh = make_mesh(**sizes, explicit=explicit)
    x = drawn(4, 3, 12)

    def loss(x):
        return sharded_cross_entropy(mesh, x, TARGETS, batch="data", **options)

    with jax.set_mesh(mesh):
        got, grad = jax.jit(jax.value_and_grad(loss))(x)
    wanted, wanted_grad = loss_and_gradient(
        x.reshape(12, 12), TARGETS.ravel(), **flat(options)
    )
    np.testing.assert_allclose(got, wanted, 1e-5)
    np.testing.assert_allclose(np.reshape(grad, (12, 12)), wanted_grad, 1e-4, 1e-6)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_factors_over_a_mesh_equal_the_equations(options, explicit):
    mesh = make_mesh(data=2, tensor=3, explicit=explicit)
    x, w = drawn(4, 3, 5), drawn(5, 12)

    def loss(x, w):
        return sharded_linear_cross_entropy(
            mesh, x, w, TARGETS, batch="data", block_size=4, **options
        )

    with jax.set_mesh(mesh):
        got, (dx, dw) = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    wanted = linear_loss_and_gradients(
        x.reshape(12, 5), w, TARGETS.ravel(), **flat(options)
    )
    for a, b in zip((got, np.reshape(dx, (12, 5)), dw), wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 5e-6)


def test_two_scalars_a_token_cross_and_nothing_in_the_backward():
    mesh = make_mesh(tensor=4)
    x = jax.device_put(drawn(4, 3, 12), NamedSharding(mesh, P(None, None, "tensor")))
    options = dict(OPTIONS["all"], reduction="sum")

    def loss(x):
        return sharded_cross_entropy(mesh, x, TARGETS, **options)

    for fun in (loss, jax.grad(loss)):
        (crossed,) = program(jax.jit(fun), x).collectives
        assert crossed.kind == "all-gather" and crossed.bytes == 2 * 4 * TARGETS.size
        assert crossed.groups == along(mesh, "tensor")


def test_of_factors_the_gradient_of_x_crosses_too():
    mesh = make_mesh(tensor=4)
    x, w = drawn(4, 3, 5), drawn(5, 12)

    def loss(x, w):
        return sharded_linear_cross_entropy(mesh, x, w, TARGETS, ignore_index=-100)

    counts = program(jax.grad(loss, (0, 1)), x, w).counts()
    assert counts == {"all-gather": 1, "all-reduce": 1}
    assert not program(loss, x, w).large(12 * 12)


@pytest.mark.parametrize("explicit", [False, True])
def test_losses_of_tokens_stay_where_their_tokens_are(explicit):
    mesh = make_mesh(data=4, tensor=2, explicit=explicit)
    x = jax.device_put(drawn(4, 3, 12), NamedSharding(mesh, P("data", None, "tensor")))
    options = dict(ignore_index=-100, reduction="none", batch="data")
    with jax.set_mesh(mesh):
        losses = jax.jit(lambda x: sharded_cross_entropy(mesh, x, TARGETS, **options))(
            x
        )
    assert losses.sharding.spec[0] == "data"
    wanted = loss_and_gradient(
        x.reshape(12, 12), TARGETS.ravel(), reduction="none", ignore_index=-100
    )[0]
    np.testing.assert_allclose(np.ravel(losses), wanted, 1e-5)


def test_a_part_that_holds_no_class_adds_nothing():
    """A vocabulary filled up to what the devices can share: columns of -inf."""
    mesh = make_mesh(tensor=4)
    x = drawn(12, 10)
    wide = np.concatenate([x, np.full((12, 6), -np.inf, np.float32)], axis=1)
    y = TARGETS.ravel() % 10

    def loss(x):
        return sharded_cross_entropy(mesh, x, y)

    got, grad = jax.value_and_grad(loss)(wide)
    wanted, wanted_grad = loss_and_gradient(x, y)
    np.testing.assert_allclose(got, wanted, 1e-5)
    np.testing.assert_allclose(grad[:, :10], wanted_grad, 1e-4, 1e-6)
    np.testing.assert_array_equal(grad[:, 10:], np.zeros((12, 6)))


@pytest.mark.parametrize("target", [12, -1])
def test_targets_outside_the_whole_vocabulary(target):
    """R-30: a part that lacks a target is no reason; all of them are."""
    mesh = make_mesh(tensor=4)
    y = np.array([3, target, 11], np.int32)
    with pytest.raises(ValueError, match="sharded_cross_entropy: targets must lie in"):
        sharded_cross_entropy(mesh, drawn(3, 12), y)

    @jax.jit
    def losses(x, y):
        return sharded_cross_entropy(mesh, x, y, reduction="none")

    loss, pull = jax.vjp(lambda x: losses(x, jnp.asarray(y)), drawn(3, 12))
    assert np.isnan(loss).tolist() == [False, True, False]
    (grad,) = pull(jnp.ones_like(loss))
    assert np.isfinite(grad).all() and not np.any(grad[1])


def test_tokens_over_an_automatic_mesh_need_no_wrapper():
    """Blocks take tokens from every device: none waits for another's."""
    mesh = make_mesh(data=4)
    x, w = drawn(16, 5), drawn(5, 12)
    y = np.arange(16, dtype=np.int32) % 12
    split = jax.device_put(x, NamedSharding(mesh, P("data")))

    def loss(x, w):
        return neuronjax.linear_cross_entropy(x, w, y, block_size=8)

    grad = jax.jit(jax.value_and_grad(loss, (0, 1)))
    got = jax.tree.leaves(grad(split, w))
    wanted = linear_loss_and_gradients(x, w, y)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)
    assert "all-gather" not in program(grad, split, w).counts()


@pytest.mark.parametrize("tokens", [P(), P("data")])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_an_explicit_mesh_divides_the_bare_loss(options, tokens):
    """R-50: its vocabulary, its tokens or both, without a wrapper."""
    mesh = make_mesh(data=2, tensor=2, explicit=True)
    x, y = drawn(12, 12), TARGETS.ravel()
    given = flat(options)

    def loss(x, y):
        return neuronjax.cross_entropy(x, y, **given)

    with jax.set_mesh(mesh):
        spec = NamedSharding(
            mesh, P(*tokens, "tensor") if tokens else P(None, "tensor")
        )
        own = jax.device_put(x, spec), jax.device_put(y, NamedSharding(mesh, tokens))
        got = jax.jit(jax.value_and_grad(loss))(*own)
    wanted = loss_and_gradient(x, y, **given)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)


@pytest.mark.parametrize("columns", [None, "tensor"])
@pytest.mark.parametrize("block_size", [2, 3, 8, 256])
def test_an_explicit_mesh_divides_the_bare_loss_of_factors(block_size, columns):
    """R-50: every device cuts its own tokens into even blocks, of one row at least."""
    mesh = make_mesh(data=4, tensor=2, explicit=True)
    x, w, y = drawn(16, 5), drawn(5, 12), np.arange(16, dtype=np.int32) % 12

    def loss(x, w, y):
        return neuronjax.linear_cross_entropy(x, w, y, block_size=block_size)

    with jax.set_mesh(mesh):
        specs = P("data"), P(None, columns), P("data")
        own = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip((x, w, y), specs, strict=True)
        ]
        got = jax.jit(jax.value_and_grad(loss, (0, 1)))(*own)
    wanted = linear_loss_and_gradients(x, w, y)
    for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 5e-6)


def test_logits_over_an_automatic_mesh_are_not_gathered():
    mesh = make_mesh(data=2, tensor=4)
    x, y = drawn(16, 12), np.arange(16, dtype=np.int32) % 12
    split = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
    grad = jax.jit(jax.value_and_grad(neuronjax.cross_entropy))
    found = program(grad, split, y)
    assert found.find("all-reduce") and not found.find("all-gather", "all-to-all")
    for got, wanted in zip(grad(split, y), loss_and_gradient(x, y), strict=True):
        np.testing.assert_allclose(got, wanted, 1e-5, 1e-6)


def test_what_a_mesh_cannot_share_is_refused():
    mesh = make_mesh(tensor=4)
    x, w, y = drawn(6, 10), drawn(5, 10), np.zeros(6, np.int32)
    with pytest.raises(ValueError, match="sharded_cross_entropy: V must be a multiple"):
        sharded_cross_entropy(mesh, x, y)
    with pytest.raises(ValueError, match="sharded_linear_cross_entropy: V must be"):
        sharded_linear_cross_entropy(mesh, drawn(6, 5), w, y)
    with pytest.raises(ValueError, match="tokens must be a multiple of the 4"):
        sharded_cross_entropy(mesh, x, y, axis=None, batch="tensor")
    with pytest.raises(ValueError, match="batch must be an axis of the mesh"):
        sharded_cross_entropy(mesh, x, y, batch="data")
    with pytest.raises(ValueError, match="sharded_cross_entropy: reduction must be"):
        sharded_cross_entropy(mesh, x, y, reduction="median")
