"""Reductions and norms over any axes, against float64 equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax.emit import neuron_reduce_macro_kernel
from neuronjax.kernels.reduce.leaf import reduce_bwd
from neuronjax.primitives.reduce.macro import reduce_backward

OPS = {
    "add": lambda z, a: z.sum(a, keepdims=True),
    "max": lambda z, a: z.max(a, keepdims=True),
    "min": lambda z, a: z.min(a, keepdims=True),
    "mul": lambda z, a: z.prod(a, keepdims=True),
    "absmax": lambda z, a: np.abs(z).max(a, keepdims=True),
    "sumsq": lambda z, a: (z**2).sum(a, keepdims=True),
    "norm": lambda z, a: z,
}
REDUCING = [op for op in OPS if op != "norm"]
AXES = [-1, 0, 1, (0, 2), (-1, 0), (2, 1, 0), None]
EPS = 1e-2


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _wanted(x, op, axis, scale=1.0, norm=None, eps=1e-6):
    """The equation of `reduce`, with the reduced axes kept."""
    axes = tuple(range(x.ndim)) if axis is None else axis
    if norm is not None:
        square = (x**2).sum(axes, keepdims=True)
        if norm == "rms":
            chosen = np.atleast_1d(np.asarray(axes))
            square = square / np.prod([x.shape[a] for a in chosen])
        x = x / np.sqrt(square + eps)
    return OPS[op](x, axes) * scale


CALLS = [
    (op, axis, norm)
    for op, axis, norm in itertools.product(OPS, AXES, (None, "rms", "l2"))
    if op != "norm" or norm is not None
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 4e-6), ("bfloat16", 2**-7), ("float16", 1e-3)]
)
def test_they_follow_the_equation(dtype, tolerance):
    """Every op over every choice of axes, in one program."""
    x = jnp.asarray(_draw(2, 3, 5), dtype)

    def every(x):
        return [
            neuronjax.reduce(
                x, op, axis, scale=0.5, norm=norm, eps=EPS, keepdims=op in REDUCING[::2]
            )
            for op, axis, norm in CALLS
        ]

    for call, got in zip(CALLS, jax.jit(every)(x), strict=True):
        op, axis, norm = call
        wanted = _wanted(np.asarray(x, np.float64), op, axis, 0.5, norm, EPS)
        if op in REDUCING[1::2]:
            wanted = wanted.squeeze(tuple(range(3)) if axis is None else axis)
        assert (got.shape, got.dtype) == (wanted.shape, x.dtype), call
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, wanted, tolerance, tolerance, err_msg=str(call))


@pytest.mark.parametrize("op", REDUCING)
def test_sums_are_not_rounded_on_the_way(op):
    """R-23: a bfloat16 sum of 4096 ones stops at 256."""
    x = jnp.full((4096,), 1.0, jnp.bfloat16)
    got = float(neuronjax.reduce(x, op))
    assert got == {"add": 4096, "sumsq": 4096}.get(op, 1)


def test_squares_of_float16_do_not_overflow_before_the_scale():
    """R-19."""
    x = jnp.full((4,), 300, jnp.float16)
    got = neuronjax.reduce(x, "sumsq", scale=1 / 4e4)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(float(got), 9.0, rtol=1e-3)


SCALES = [(), (3,), (2, 3), (2, 1), (1, 3)]


@pytest.mark.parametrize("norm", [None, "rms", "l2"])
def test_first_and_second_derivatives(norm):
    """Of every op, with a scale that broadcasts; no ties here."""
    with jax.enable_x64(True):
        x, scale = jnp.asarray(_draw(2, 3, 4)), jnp.asarray(_draw(3, seed=1))

        def fun(x, scale):
            options = dict(scale=scale, norm=norm, eps=EPS)
            outs = [neuronjax.reduce(x, op, (0, 2), **options) for op in REDUCING]
            return jnp.stack(outs)

        check_grads(jax.jit(fun), (x, scale), 2, modes=["fwd", "rev"], eps=1e-5)


def test_scales_that_broadcast_have_gradients():
    with jax.enable_x64(True):
        x = jnp.asarray(_draw(2, 3, 4))
        scales = [jnp.asarray(_draw(*shape, seed=1)) for shape in SCALES]

        def fun(*scales):
            return [neuronjax.reduce(x, "max", -1, scale=s) for s in scales]

        for got, scale in zip(fun(*scales), scales, strict=True):
            wanted = np.asarray(x).max(-1) * np.asarray(scale)
            np.testing.assert_allclose(got, wanted)
        check_grads(jax.jit(fun), scales, 2)


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_derivatives_of_norms_over_other_axes(norm):
    with jax.enable_x64(True):
        x = jnp.asarray(_draw(2, 3, 2))
        axes = [0, 1, (0, 2), None]
        scales = [jnp.asarray(_draw(*s, seed=1)) for s in [(), (3,), (2, 2), (2, 3, 2)]]

        def fun(x, scales):
            return [
                neuronjax.reduce(x, "norm", axis, scale=scale, norm=norm, eps=EPS)
                for axis, scale in zip(axes, scales, strict=True)
            ]

        check_grads(jax.jit(fun), (x, scales), 2, modes=["fwd", "rev"])


def test_layer_norm_over_other_axes():
    """The emitter takes each norm over each axis."""
    with jax.enable_x64(True):
        x = jnp.asarray(_draw(2, 3, 4))
        gain, offset = (jnp.asarray(_draw(2, 4, seed=i)) for i in (1, 2))

        def fun(x, gain, offset):
            return neuron_reduce_macro_kernel(
                x, gain, offset, norm="layer", axis=(0, 2), eps=EPS
            )

        wide = np.asarray(x)
        mean = wide.mean((0, 2), keepdims=True)
        std = np.sqrt(wide.var((0, 2), keepdims=True) + EPS)
        wanted = (wide - mean) / std * np.asarray(gain)[:, None]
        wanted = wanted + np.asarray(offset)[:, None]
        np.testing.assert_allclose(fun(x, gain, offset), wanted, rtol=1e-12)
        check_grads(jax.jit(fun), (x, gain, offset), 2, modes=["fwd", "rev"])


@pytest.mark.parametrize("op", ["max", "min", "absmax"])
def test_equal_extremes_share_the_gradient_as_in_jax(op):
    """Forward, reverse and second order."""
    x = jnp.array([[1.0, 3, -3, 3], [-3, -3, 1, 0], [0, 0, 0, 0], [2, 2, 2, 2]])
    plain = dict(
        max=lambda x: jnp.max(x, 1),
        min=lambda x: jnp.min(x, 1),
        absmax=lambda x: jnp.max(jnp.abs(x), 1),
    )[op]
    mine = lambda x: neuronjax.reduce(x, op, 1)  # noqa: E731
    for fun in (
        lambda f: jax.jacrev(f)(x),
        lambda f: jax.jacfwd(f)(x),
        lambda f: jax.grad(lambda x: (f(x) ** 3).sum())(x),
        lambda f: jax.hessian(lambda x: (f(x) ** 3).sum())(x),
    ):
        np.testing.assert_allclose(fun(mine), fun(plain), rtol=1e-6)
    if op == "max":
        shared = jax.grad(lambda x: mine(x).sum())(x)
        assert shared[0].tolist() == [0, 0.5, 0, 0.5]


def test_products_with_zeros():
    """The derivative by one element is the product of the others, whatever they are."""
    rows = np.array([_draw(4) * keep for keep in itertools.product((0, 1), repeat=4)])
    others = [[np.prod(np.delete(x, i)) for i in range(4)] for x in rows]
    pairs = [
        [
            [0 if i == j else np.prod(np.delete(x, [i, j])) for j in range(4)]
            for i in range(4)
        ]
        for x in rows
    ]
    product = lambda x: neuronjax.reduce(x, "mul")  # noqa: E731
    for first in (jax.grad, jax.jacfwd):
        got = jax.vmap(first(product))(jnp.float32(rows))
        np.testing.assert_allclose(got, np.array(others), 1e-5, 1e-7)
    for second in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        got = jax.vmap(second(product))(jnp.float32(rows))
        np.testing.assert_allclose(got, np.array(pairs), 1e-5, 1e-7)


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("norm", [None, "rms"])
def test_a_nan_makes_its_own_result_nan_and_no_other(op, norm):
    """Forward, and in the gradient of what it was reduced with."""
    x = jnp.array([[1.0, jnp.nan, 2.0], [1.0, 3.0, 2.0]])
    fun = lambda x: neuronjax.reduce(x, op, 1, norm=norm)  # noqa: E731
    assert np.isnan(fun(x)).tolist() == [True, False]
    grad = jax.grad(lambda x: fun(x).sum())(x)
    assert np.isfinite(grad[1]).all()
    if (op, norm) != ("add", None):
        assert np.isnan(grad[0]).any()
    if op in ("max", "min", "absmax") or norm:
        assert np.isnan(grad[0]).all()


@pytest.mark.parametrize(("op", "value"), [("add", 0), ("mul", 1), ("sumsq", 0)])
def test_reductions_of_nothing(op, value):
    x = jnp.ones((2, 0, 3))
    fun = lambda x: neuronjax.reduce(x, op, 1)  # noqa: E731
    assert fun(x).tolist() == [[value] * 3] * 2
    assert jax.grad(lambda x: fun(x).sum())(x).shape == x.shape
    assert neuronjax.reduce(x, op, 0).shape == (0, 3)


@pytest.mark.parametrize("op", ["max", "min", "absmax"])
def test_extremes_and_norms_of_nothing_are_refused(op):
    x = jnp.ones((2, 0))
    with pytest.raises(ValueError, match=f"reduce: {op} with norm None has no value"):
        neuronjax.reduce(x, op, 1)
    assert neuronjax.reduce(x, op, 0).shape == (0,)
    with pytest.raises(ValueError, match="reduce: norm with norm l2 has no value"):
        neuronjax.reduce(x, "norm", 1, norm="l2")
    with pytest.raises(ValueError, match="reduce: add with norm rms has no value"):
        neuronjax.reduce(x, "add", 1, norm="rms")


def test_forward_and_backward_are_one_macro_each():
    x = jnp.asarray(_draw(3, 4), "float32")
    for op in REDUCING:
        loss = lambda x, op=op: neuronjax.reduce(x, op, 0, scale=2.0).sum()  # noqa: E731
        seen = neuronjax.trace(jax.grad(loss), x)
        assert seen.count("NeuronReduceMacro") == 1
        assert seen.count("NeuronReduceMacroBwd") == 1


CONFIG = dict(axis=(1,), keepdims=False, eps=EPS, norm="rms")


@pytest.mark.parametrize("op", ["max", "mul", "sumsq"])
def test_every_cotangent_counts(op):
    """The backward macro, its plain form, and the derivative of the forward leaf."""
    from neuronjax.kernels.reduce.leaf import reduce_fwd

    config = dict(CONFIG, op=op)
    with jax.enable_x64(True):
        x, scale = jnp.asarray(_draw(3, 4)), jnp.asarray(_draw(3, seed=1))
        outs, pull = jax.vjp(
            lambda x, s: reduce_fwd(x, s, None, name="NeuronReduceMacro", **config),
            *(x, scale),
        )
        given = ("x", "scale")
        for some in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
            seeds = [jnp.asarray(_draw(*o.shape, seed=9)) for o in outs]
            wanted = pull(tuple(c * on for c, on in zip(seeds, some, strict=True)))
            cotangents = [c if on else None for c, on in zip(seeds, some, strict=True)]
            operands = (x, scale, None, *outs, *cotangents)
            for fun in (reduce_backward, reduce_backward.plain):
                got = fun(*operands, name="NeuronReduceMacroBwd", given=given, **config)
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("op", "stat", "poisoned"),
    [
        ("max", 1, (True, True)),
        ("add", 1, (False, True)),
        ("mul", 1, (False, True)),
        ("add", 2, (True, False)),
        ("sumsq", 2, (True, False)),
    ],
)
def test_a_poisoned_statistic_poisons_what_is_made_from_it(op, stat, poisoned):
    """The backward reads what the forward stored, and computes none of it again."""
    x, scale = jnp.asarray(_draw(3, 4), "float32"), jnp.ones(3)
    outs = [jnp.ones(3), jnp.ones((3, 1)), jnp.ones((3, 1))]
    outs[stat] = outs[stat] * jnp.nan
    name = "NeuronReduceMacroBwd"
    config = dict(CONFIG, op=op)
    grads = reduce_bwd(
        x, scale, None, *outs, jnp.ones(3), None, None, name=name, **config
    )
    assert tuple(bool(jnp.isnan(g).all()) for g in grads) == poisoned


def test_a_scalar_of_any_kind_keeps_the_dtype():
    """R-48."""
    x = jnp.ones((2, 8), jnp.bfloat16)
    for x64, scale in itertools.product((False, True), (2, 0.5, np.float64(0.5))):
        with jax.enable_x64(x64):
            out, pull = jax.vjp(lambda x: neuronjax.reduce(x, "add", scale=scale), x)  # noqa: B023
            assert {out.dtype, pull(out)[0].dtype} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("axis", ["last", (), 2, True, (1, -1), 1.0, (0, 2)], ids=str)
def test_axes_that_do_not_exist_are_refused(axis):
    with pytest.raises(ValueError, match="reduce: axis must be None, for all, or one"):
        neuronjax.reduce(jnp.ones((2, 3)), "add", axis)


def test_a_scalar_has_no_axis():
    with pytest.raises(ValueError, match="reduce: axis must be None"):
        neuronjax.reduce(jnp.ones(()), "add")


def test_over_a_mesh_axis_the_scale_sums_its_gradient():
    """R-43."""
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    x, s = jnp.asarray(_draw(4, 3, 2), "float32"), jnp.ones(3)
    fun = lambda x, s: neuronjax.reduce(x, "absmax", -1, scale=s)  # noqa: E731
    split = jax.shard_map(fun, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    got, wanted = (jax.grad(lambda s, f=f: f(x, s).sum())(s) for f in (split, fun))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("spec", [("data",), (None, "data")], ids=str)
def test_explicit_meshes_that_split_kept_or_reduced_axes(spec):
    """R-50."""
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
    x = jnp.asarray(_draw(4, 6), "float32")

    def loss(x, op):
        norm = "rms" if op == "absmax" else None
        return (neuronjax.reduce(x, op, 1, norm=norm) ** 2).sum()

    ops = ("absmax", "mul", "sumsq")
    wanted = [jax.grad(loss)(x, op) for op in ops]
    with jax.set_mesh(mesh):
        held = jax.device_put(x, jax.sharding.PartitionSpec(*spec))
        got = [jax.jit(jax.grad(loss), static_argnums=1)(held, op) for op in ops]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(jax.device_get(a), b, rtol=2e-5, atol=1e-6)
