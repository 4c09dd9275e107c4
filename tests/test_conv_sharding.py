"""Convolutions over a mesh: values, gradients, and what crosses the wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.kernels.conv import products
from neuronjax.sharding import (
    make_mesh,
    sharded_conv1d,
    sharded_depthwise_conv1d,
)
from tests.hlo import collectives
from tests.macro_case import error

OPTIONS = dict(stride=2, padding=(1, 2), dilation=2, activation_fn="GELU")
BATCHES = [None, "data"]


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


def conv_arrays():
    return drawn((4, 3, 9), (3, 3, 6), (6,))


def depthwise_arrays():
    return drawn((4, 6, 1, 9), (6, 1, 1, 3))


def loss(call):
    """A scalar that every element of the result enters with a weight of its own."""
    return lambda *arrays: jnp.sum(jnp.sin(call(*arrays)))


def placed(mesh, arrays, specs):
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_cores_share_the_output_channels(batch, explicit):
    """R-43: values and gradients of one device, without a setting of the caller's."""
    mesh, arrays = make_mesh(data=2, lnc=2, explicit=explicit), conv_arrays()
    split = functools.partial(sharded_conv1d, mesh, batch=batch, **OPTIONS)
    alone = functools.partial(neuronjax.conv1d, **OPTIONS)
    out = jax.jit(split)(*arrays)
    assert tuple(out.sharding.spec)[:2] == (batch, "lnc")
    assert error(out, alone(*arrays)) < 1e-6
    which = (0, 1, 2)
    got = jax.jit(jax.grad(loss(split), which))(*arrays)
    wanted = jax.grad(loss(alone), which)(*arrays)
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize("batch", BATCHES)
def test_depthwise_channels_need_nothing_of_each_other(batch):
    mesh, arrays = make_mesh(data=2, lnc=2), depthwise_arrays()
    moves = dict(stride=2, padding=(1, 2))
    split = functools.partial(sharded_depthwise_conv1d, mesh, batch=batch, **moves)
    alone = functools.partial(neuronjax.emit.depthwise_conv1d_kernel, **moves)
    results = [
        [f(*arrays), *jax.grad(loss(f), (0, 1))(*arrays)] for f in (split, alone)
    ]
    for got, wanted in zip(*results, strict=True):
        assert error(got, wanted) < 1e-6


@pytest.mark.parametrize("batch", BATCHES)
def test_no_collective_splits_the_output_channels(batch):
    mesh = make_mesh(data=2, lnc=2)
    specs = P(batch), P(None, None, "lnc"), P("lnc")
    arrays = placed(mesh, conv_arrays(), specs)
    split = functools.partial(sharded_conv1d, mesh, batch=batch, **OPTIONS)
    assert collectives(split, *arrays) == {}
    arrays = placed(mesh, depthwise_arrays(), (P(batch, "lnc"), P("lnc")))
    split = functools.partial(sharded_depthwise_conv1d, mesh, batch=batch)
    assert collectives(split, *arrays) == {}


def test_the_backward_sums_once_over_each_axis_that_shares():
    """Over the cores the input's gradient, over the batch those of the weights."""
    mesh = make_mesh(data=2, lnc=2)
    specs = P("data"), P(None, None, "lnc"), P("lnc")
    arrays = placed(mesh, conv_arrays(), specs)
    split = functools.partial(sharded_conv1d, mesh, batch="data", **OPTIONS)

    def pulled(which):
        def call(seed, *arrays):
            return jax.vjp(split, *arrays)[1](seed)[which]

        seed = jax.device_put(split(*arrays), NamedSharding(mesh, P("data", "lnc")))
        return collectives(call, seed, *arrays)

    assert [pulled(which) for which in range(3)] == [{"all-reduce": 1}] * 3


@pytest.mark.parametrize("form", ["fast", "stacked"])
def test_a_plain_jit_splits_the_columns_of_an_auto_mesh(form):
    """The macro itself, with its operands divided: the compiler adds no collective."""
    mesh = make_mesh(lnc=2)
    x, w, bias = placed(mesh, conv_arrays(), (P(), P(None, None, "lnc"), P("lnc")))
    call = functools.partial(neuronjax.emit.conv1d_kernel, form=form, **OPTIONS)
    assert collectives(call, x, w, bias) == {}
    assert error(jax.jit(call)(x, w, bias), call(*conv_arrays())) < 1e-6


@pytest.mark.parametrize("form", ["fast", "stacked"])
@pytest.mark.parametrize(("batch", "channels"), [("data", None), ("data", "lnc")])
def test_an_explicit_mesh_divides_the_bare_macro(batch, channels, form):
    """R-50: batch and columns, without a wrapper, forward and backward."""
    mesh, arrays = make_mesh(data=2, lnc=2, explicit=True), conv_arrays()
    specs = P(batch), P(None, None, channels), P(channels)
    call = functools.partial(neuronjax.emit.conv1d_kernel, form=form, **OPTIONS)
    with jax.set_mesh(mesh):
        own = placed(mesh, arrays, specs)
        out = jax.jit(call)(*own)
        got = jax.jit(jax.grad(loss(call), (0, 1, 2)))(*own)
    assert tuple(jax.typeof(out).sharding.spec)[:2] == (batch, channels)
    wanted = call(*arrays), *jax.grad(loss(call), (0, 1, 2))(*arrays)
    for a, b in zip((out, *got), wanted, strict=True):
        assert error(a, b) < 2e-6


def test_samples_of_a_divided_batch_are_not_gathered(monkeypatch):
    """The loop over samples is for one device: each takes its own in one step."""
    monkeypatch.setattr(products, "COLUMNS", 1)
    monkeypatch.setattr(products, "RESULTS", 1)
    mesh = make_mesh(data=2)
    x, w, bias = placed(mesh, conv_arrays(), (P("data"), P(), P()))
    grads = jax.grad(loss(functools.partial(neuronjax.conv1d, **OPTIONS)), (0, 1))
    assert "all-gather" not in collectives(grads, x, w, bias)


def test_what_a_mesh_cannot_divide_is_refused():
    mesh, (x, w, _) = make_mesh(data=2, lnc=2), drawn((3, 2, 9), (3, 2, 5), (5,))
    with pytest.raises(ValueError, match="sharded_conv1d: axis 2 of filters .* 2 dev"):
        sharded_conv1d(mesh, x, w)
    with pytest.raises(ValueError, match="sharded_conv1d: axis 0 of x_in .* 'data'"):
        sharded_conv1d(mesh, x, w, batch="data", channels=None)
    with pytest.raises(ValueError, match="sharded_conv1d: channels must be an axis"):
        sharded_conv1d(mesh, x, w, channels="tensor")
    with pytest.raises(ValueError, match="sharded_depthwise_conv1d: axis 1 of img_ref"):
        sharded_depthwise_conv1d(mesh, *drawn((2, 3, 1, 9), (3, 1, 1, 3)))
    with pytest.raises(ValueError, match="conv1d: stride"):
        sharded_conv1d(mesh, x, w, channels=None, stride=0)


@pytest.mark.parametrize(
    ("x", "filters", "bias", "words"),
    [
        ((None, "lnc"), (), (), "not C_in"),
        ((), (None, "lnc"), (), "not C_in"),
        ((), ("lnc",), (), "not the taps"),
        ((None, None, "lnc"), (), (), "not L = 8 into 2 parts"),
        ((), (), ("lnc",), "not a bias otherwise than C_out of the filters"),
    ],
)
def test_what_an_explicit_mesh_cannot_type_is_refused_in_words(x, filters, bias, words):
    mesh, specs = make_mesh(lnc=2, explicit=True), (P(*x), P(*filters), P(*bias))
    arrays = placed(mesh, drawn((2, 4, 8), (2, 4, 6), (6,)), specs)
    for run in (neuronjax.conv1d, jax.grad(loss(neuronjax.conv1d), (0, 1, 2))):
        with pytest.raises(NotImplementedError, match=f"^Conv1D: .* {words}: reshard"):
            jax.eval_shape(run, *arrays)


def test_positions_divide_where_those_of_the_result_do():
    mesh, arrays = make_mesh(lnc=2, explicit=True), drawn((2, 4, 8), (3, 4, 6), (6,))
    given = placed(mesh, arrays, (P(None, None, "lnc"), P(), P()))
    got, wanted = (jax.jit(neuronjax.conv1d)(*a) for a in (given, arrays))
    assert error(got, wanted) < 1e-6
