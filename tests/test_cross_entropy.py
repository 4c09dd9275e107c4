"""The loss on logits, against NumPy in float64 and numbers worked out by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import neuronjax
from neuronjax import emit
from neuronjax.kernels.cross_entropy import tokens
from tests.cross_entropy_equations import loss_and_gradient, token_losses

TARGETS = np.array([3, 0, -100, 10, 6], np.int32)


def drawn(rows=5, columns=11, dtype="float32", scale=3.0, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, columns)) * scale
    return np.asarray(values, dtype)


OPTIONS = {
    "plain": dict(ignore_index=-100),
    "smooth": dict(ignore_index=-100, label_smoothing=0.2),
    "z": dict(ignore_index=-100, z_loss=0.05),
    "weighed": dict(ignore_index=-100, weights=np.array([1, 0.5, 2, 0, 3], "float32")),
    "all": dict(
        ignore_index=-100,
        label_smoothing=1.0,
        z_loss=1e-2,
        weights=np.array([1, 0.5, 2, 0, 3], "float32"),
    ),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradient_equal_the_equations(options, reduction):
    x = drawn()

    def total(x):
        return jnp.sum(neuronjax.cross_entropy(x, TARGETS, **given))

    given = dict(options, reduction=reduction)
    wanted, wanted_grad = loss_and_gradient(x, TARGETS, **given)
    got = jax.jit(lambda x: neuronjax.cross_entropy(x, TARGETS, **given))(x)
    np.testing.assert_allclose(got, wanted, 2e-6, 2e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x), wanted_grad, 2e-5, 2e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("bfloat16", 2e-6), ("float16", 2e-6), ("float32", 2e-6), ("float64", 1e-13)],
)
@pytest.mark.parametrize("columns", [1, 7, 1030])
def test_every_float_is_summed_wide(dtype, tolerance, columns):
    """1030 columns of a narrow dtype are a chunk and a part of one."""
    with jax.enable_x64(dtype == "float64"):
        x, y = drawn(3, columns, dtype), np.array([0, columns - 1, columns // 2])
        loss, grad = jax.jit(jax.value_and_grad(neuronjax.cross_entropy))(
            jnp.asarray(x), y
        )
        wide = np.float64 if dtype == "float64" else np.float32
        assert loss.dtype == wide and grad.dtype == dtype
        wanted, wanted_grad = loss_and_gradient(x, y)
        np.testing.assert_allclose(loss, wanted, tolerance, tolerance)
        eps = max(float(jnp.finfo(dtype).eps), tolerance)
        np.testing.assert_allclose(np.float64(grad), wanted_grad, 2 * eps, 1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 3, 10, 11, 64])
def test_a_chunk_changes_rounding_alone(dtype, chunk):
    x, y = drawn(dtype=dtype), np.array([3, 0, 2, 10, 6], np.int32)
    loss, lse = neuronjax.cross_entropy_forward(
        jnp.asarray(x), y, chunk_size=chunk, dtype=jnp.float32
    )
    wanted = token_losses(x, y)
    np.testing.assert_allclose(loss, wanted[0], 2e-6, 2e-6)
    np.testing.assert_allclose(lse, wanted[1], 2e-6, 2e-6)


@pytest.mark.parametrize("columns", [8, 12, 13, 34, 39])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_long_rows_are_summed_by_parts(options, columns, monkeypatch):
    """At once, in 2, 3 or 5 parts that are even, or in a loop where there are none."""
    sizes = dict(LONGEST=8, PARTS=4, WIDE_CHUNK=5)
    for name, size in sizes.items():
        monkeypatch.setattr(tokens, name, size)
    x, y = drawn(columns=columns), np.where(TARGETS > 7, 7, TARGETS)

    def loss(x):
        return neuronjax.cross_entropy(x, y, **options)

    got = jax.jit(lambda x: jax.value_and_grad(loss)(x))(x)
    for a, b in zip(got, loss_and_gradient(x, y, **options), strict=True):
        np.testing.assert_allclose(a, b, 2e-5, 2e-6)
    assert tokens._parts(jnp.zeros((2, columns))) == {8: 1, 12: 2}.get(columns, 0)


def test_the_exponentials_are_computed_once():
    """Value and gradient in one program: the backward reads those of the forward."""
    grad = jax.jit(jax.value_and_grad(lambda x, y: neuronjax.cross_entropy(x, y)))
    text = grad.lower(jnp.zeros((64, 1000)), jnp.zeros(64, jnp.int32)).compile()
    wide = [line for line in text.as_text().splitlines() if " exponential(" in line]
    assert sum("64,1000" in line for line in wide) == 1


@pytest.mark.parametrize("chunk", [2, 6])
def test_infinite_logits_are_limits(chunk):
    """A column that is -inf is no class; a chunk of them neither."""
    inf = np.inf
    x = np.array([[-inf, -inf, -inf, 1e4, 0, -inf], [-inf, 2, -inf, -inf, -inf, 0]])
    x, y = x.astype(np.float32), np.array([3, 5], np.int32)

    def losses(x):
        return emit.cross_entropy_fwd_kernel(x, y, chunk_size=chunk)

    loss, lse = losses(x)
    np.testing.assert_allclose(lse, [1e4, 2 + np.log1p(np.exp(-2))], 1e-6)
    np.testing.assert_allclose(loss, [0, 2 + np.log1p(np.exp(-2))], 1e-6)
    p = 1 / (1 + np.exp(2))
    grad = jax.grad(lambda x: jnp.sum(losses(x)[0]))(x)
    np.testing.assert_allclose(
        grad, [[0, 0, 0, 0, 0, 0], [0, 1 - p, 0, 0, 0, p - 1]], 1e-5, 1e-7
    )
    nothing = jnp.full((1, 6), -inf)
    assert losses_of_one(nothing, chunk)[1] == -inf
    assert losses_of_one(nothing.at[0, 1].set(inf), chunk)[1] == inf
    for place in range(6):
        assert np.isnan(losses_of_one(nothing.at[0, place].set(np.nan), chunk)[1])


def losses_of_one(x, chunk):
    loss, lse = emit.cross_entropy_fwd_kernel(x, np.zeros(1, int), chunk_size=chunk)
    return loss[0], lse[0]


def test_large_logits_neither_overflow_nor_vanish():
    x = drawn(2, 9, scale=1) + np.array([[3e4], [-3e4]], np.float32)
    y = np.array([2, 8], np.int32)
    loss, grad = jax.value_and_grad(neuronjax.cross_entropy)(jnp.asarray(x), y)
    wanted, wanted_grad = loss_and_gradient(x, y)
    np.testing.assert_allclose(loss, wanted, atol=5e-3)
    np.testing.assert_allclose(grad, wanted_grad, atol=2e-3)


@pytest.mark.parametrize("weights", [None, np.ones(2, "float32")])
def test_r28_every_target_ignored(weights):
    options = dict(ignore_index=-100, weights=weights)
    y = np.array([-100, -100], np.int32)
    loss, grad = jax.value_and_grad(neuronjax.cross_entropy)(
        jnp.zeros((2, 4)), y, **options
    )
    assert loss == 0
    np.testing.assert_array_equal(grad, np.zeros((2, 4)))


def test_r29_mean_over_valid_tokens_only():
    x = jnp.array([[1.0, 1, 1, 1], [0, 0, 0, 0], [2, 0, 0, 0]])
    loss, grad = jax.value_and_grad(neuronjax.cross_entropy)(
        x, jnp.array([2, -100, 0]), ignore_index=-100
    )
    np.testing.assert_allclose(loss, 0.863524, atol=1e-6)
    wanted = [
        [0.125, 0.125, -0.375, 0.125],
        [0, 0, 0, 0],
        [-0.144383, 0.048128, 0.048128, 0.048128],
    ]
    np.testing.assert_allclose(grad, wanted, atol=1e-6)


@pytest.mark.parametrize("target", [4, -1, 2**31 + 3, -(2**31)])
def test_r30_targets_outside_the_vocabulary(target):
    """One policy: refused where known, else NaN loss and no gradient for that token."""
    x = jnp.array([[0.2, 0.1, 0.4, 0.6], [1.0, 0, 0, 0]])
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 4\)"):
        neuronjax.cross_entropy(x, np.array([target, 0], np.int64))
    with jax.enable_x64(True):
        y = jnp.array([target, 0], jnp.int64)
        run = jax.jit(lambda x, y: neuronjax.cross_entropy(x, y, reduction="none"))
        loss, pull = jax.vjp(lambda x: run(x, y), x)
        assert np.isnan(loss[0]) and np.isfinite(loss[1])
        (grad,) = pull(jnp.ones_like(loss))
    np.testing.assert_array_equal(grad[0], np.zeros(4))
    np.testing.assert_allclose(grad[1, 0], 1 / (1 + 3 / np.e) - 1, 1e-5)


def test_r31_bf16_logits_f32_loss():
    x, y = jnp.zeros((1, 100), jnp.bfloat16), np.array([7], np.int32)
    loss, grad = jax.value_and_grad(neuronjax.cross_entropy)(x, y)
    assert loss.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, 4.605170, atol=1e-6)


def test_r32_per_token_losses_with_per_token_weights():
    x = jnp.array([[1.0, 1, 1, 1], [2, 0, 0, 0]])
    y, weights = np.array([2, 0]), jnp.array([1.0, 3.0])
    wanted = [[0.25, 0.25, -0.75, 0.25], [-0.866297, 0.288765, 0.288765, 0.288765]]

    def outside(x):
        losses = neuronjax.cross_entropy(x, y, reduction="none")
        return jnp.sum(weights * losses)

    def inside(x):
        return neuronjax.cross_entropy(x, y, reduction="sum", weights=weights)

    for loss in (outside, inside):
        np.testing.assert_allclose(jax.grad(loss)(x), wanted, atol=1e-6)


def test_r33_the_callers_logits_survive():
    x, y = jnp.asarray(drawn(2, 5)), np.array([1, 4], np.int32)

    def total(loss):
        def of(x):
            p = jax.nn.softmax(x)
            value = loss(p)
            return value + jnp.sum(p**2), p

        return jax.jit(jax.value_and_grad(of, has_aux=True))

    def plain(p):
        return -jnp.mean(jax.nn.log_softmax(p)[np.arange(2), y])

    (value, p), grad = total(lambda p: neuronjax.cross_entropy(p, y))(x)
    (wanted, _), wanted_grad = total(plain)(x)
    np.testing.assert_allclose(value, wanted, 1e-6)
    np.testing.assert_allclose(grad, wanted_grad, 1e-5, 1e-7)
    np.testing.assert_allclose(p, jax.nn.softmax(x), 1e-6)
    assert not x.is_deleted()


def test_r45_integer_targets_have_no_gradient():
    x, y = jnp.asarray(drawn()), jnp.array([3, 0, 1, 10, 6])
    _, pull = jax.vjp(neuronjax.cross_entropy, x, y)
    wanted = loss_and_gradient(x, y)[1]
    grads = {
        "vjp": pull(jnp.float32(1)),
        "allow_int": jax.grad(neuronjax.cross_entropy, (0, 1), allow_int=True)(x, y),
    }
    for grad, integer in grads.values():
        np.testing.assert_allclose(grad, wanted, 1e-4, 1e-6)
        assert integer.dtype == jax.dtypes.float0

    def steps(x):
        def body(total, row):
            return total + neuronjax.cross_entropy(*row), None

        return lax.scan(jax.checkpoint(body), 0.0, (x, y))[0] / len(y)

    np.testing.assert_allclose(jax.jit(jax.grad(steps))(x), wanted, 1e-4, 1e-6)
    each = jax.vmap(jax.grad(neuronjax.cross_entropy))(x, y)
    np.testing.assert_allclose(each / len(y), wanted, 1e-4, 1e-6)


def test_r46_the_forward_runs_once_where_its_names_are_kept():
    x, y = jnp.asarray(drawn()), np.array([3, 0, 1, 10, 6], np.int32)
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(
        *(f"cross_entropy_fwd_{name}" for name in ("loss", "lse", "base"))
    )
    for policy, times in {kept: 1, policies.nothing_saveable: 2}.items():
        loss = jax.checkpoint(
            lambda x: neuronjax.cross_entropy(x, y, z_loss=0.1), policy=policy
        )
        grad = jax.grad(loss)
        assert neuronjax.trace(grad, x).count("CrossEntropyFwd") == times
        wanted = loss_and_gradient(x, y, z_loss=0.1)[1]
        np.testing.assert_allclose(grad(x), wanted, 1e-4, 1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_ignored_tokens_never_leak(poison):
    x = drawn()
    wanted, wanted_grad = loss_and_gradient(x, TARGETS, ignore_index=-100)
    x[2] = poison
    options = dict(ignore_index=-100)

    def loss(x):
        return neuronjax.cross_entropy(x, TARGETS, **options)

    got, grad = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(got, wanted, 1e-6)
    np.testing.assert_allclose(grad, wanted_grad, 1e-5, 1e-7)
    moved = jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))[1]
    assert np.isfinite(moved).all() and not np.any(moved[2])


def test_an_ignored_weight_never_leaks():
    weights = np.array([1, 0.5, np.nan, 2, 3], np.float32)

    def loss(x, weights):
        options = dict(ignore_index=-100, weights=weights)
        return neuronjax.cross_entropy(x, TARGETS, **options)

    got = jax.value_and_grad(loss, (0, 1))(drawn(), weights)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def test_derivatives_of_both_orders():
    x, y = jnp.asarray(drawn(2, 5, scale=1)), np.array([1, -100], np.int32)
    weights = jnp.array([0.7, 1.3])

    def loss(x, weights):
        options = dict(label_smoothing=0.1, z_loss=0.2, ignore_index=-100)
        return neuronjax.cross_entropy(
            x, y, weights=weights, reduction="sum", **options
        )

    check_grads(jax.jit(loss), (x, weights), 2, ("fwd", "rev"), 2e-2, 2e-2, eps=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_raw_pair_differentiates_through_both_outputs(dtype):
    """The cotangent of the lse counts; a rounded one does not blur the softmax."""
    x, y = drawn(dtype="float32", scale=1), np.array([3, 0, 2, 10, 6], np.int32)

    def both(x):
        loss, lse = neuronjax.cross_entropy_forward(x, y, dtype=dtype)
        wide = loss.astype(jnp.float32), lse.astype(jnp.float32)
        return jnp.sum(wide[0] * a) + jnp.sum(wide[1] * b)

    a, b = np.arange(5, dtype=np.float32), np.arange(5, 10, dtype=np.float32)
    softmax = np.exp(np.float64(x) - token_losses(x, y)[1][:, None])
    wanted = (a + b)[:, None] * softmax - a[:, None] * np.eye(11)[y]
    np.testing.assert_allclose(jax.grad(both)(x), wanted, 1e-4, 1e-4)


def test_the_backward_macro_is_emitted_by_name():
    x, y = jnp.asarray(drawn()), np.array([3, 0, 1, 10, 6], np.int32)
    traced = neuronjax.trace(jax.grad(neuronjax.cross_entropy), x, y)
    assert traced.names == ("CrossEntropyFwd", "CrossEntropyBwd")
    hessian = jax.hessian(neuronjax.cross_entropy)(x[:1, :3], np.array([1]))
    p = np.exp(x[0, :3]) / np.exp(x[0, :3]).sum()
    np.testing.assert_allclose(
        hessian[0, :, 0], np.diag(p) - np.outer(p, p), 1e-4, 1e-6
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_backward_rounds_to_its_dtype_and_stores_in_place(
    dtypes, inplace, reduction
):
    held, rounded = dtypes
    x, y = drawn(dtype=held), np.array([3, 0, 2, 10, 6], np.int32)
    lse = token_losses(x, y)[1].astype(np.float32)
    got = jax.jit(neuronjax.cross_entropy_backward, static_argnums=(3, 4, 5, 6, 7))(
        x, y, lse, reduction, 4, 3, rounded, inplace
    )
    assert got.dtype == (held if inplace else rounded)
    wanted = loss_and_gradient(x, y, reduction=reduction)[1]
    np.testing.assert_allclose(np.float64(got), wanted, 1e-2, 1e-6)
    if held == "float32":  # what float32 stores is a bfloat16 number
        np.testing.assert_array_equal(
            np.asarray(got, "bfloat16").astype(got.dtype), got
        )


def test_the_chips_limits_are_reported_and_do_not_hold():
    x, y = jax.ShapeDtypeStruct((4, 100), "float16"), jax.ShapeDtypeStruct((4,), "int8")
    report = neuronjax.can("cross_entropy_forward", x, y)
    assert report and not report.on_chip
    assert {v.id for v in report.violations} == {
        f"cross_entropy.chip_{rule}" for rule in ("dtype", "targets", "chunk")
    }


def test_targets_of_any_integer_and_tokens_of_any_rank():
    x = jnp.asarray(drawn(6, 300)).reshape(2, 3, 300)
    for dtype in ("uint8", "int8", "int32"):
        y = np.array([[0, 1, 2], [3, 100, 127]], dtype)
        options = dict(ignore_index=-100, reduction="none")
        got = neuronjax.cross_entropy(x, y, **options)
        wanted = token_losses(x.reshape(6, 300), y.ravel())[0].reshape(2, 3)
        np.testing.assert_allclose(got, wanted, 1e-5)
    one = neuronjax.cross_entropy(x[0, 0], np.int32(7))
    np.testing.assert_allclose(one, token_losses(x[0, :1], [7])[0][0], 1e-5)


def test_no_tokens_have_no_loss():
    x, y = jnp.zeros((0, 4)), np.zeros(0, np.int32)
    for reduction in ("mean", "sum"):
        assert neuronjax.cross_entropy(x, y, reduction=reduction) == 0
    assert neuronjax.cross_entropy(x, y, reduction="none").shape == (0,)
