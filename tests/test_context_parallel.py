"""Prefill with the sequence split over a mesh equals one device, at the stated cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from neuronjax.sharding import (
    context_parallel_attention,
    make_mesh,
    sharded_attention,
    stride_sequence,
    unstride_sequence,
)
from tests.attention_mesh import (
    DEVICES,
    OPTIONS,
    agree,
    alone,
    costs,
    operands,
    split,
    value_and_gradient,
)


def sequence_axes(static):
    """Where each array has the tokens, when the context is split."""
    q = 2 if static.get("tp_q", True) else 3
    return dict(q=q, k=2 if static.get("tp_k") else 3, v=2, bias=2, mask=2)


def in_natural_order(function, shards, static):
    """A strided `function`, called with and returning natural order."""
    axes = sequence_axes(static)
    out = 3 if static.get("tp_out") else 2

    def run(arrays):
        strided = {
            n: stride_sequence(x, shards, axes[n])
            if n in axes and x.shape[axes[n]] > 1
            else x
            for n, x in arrays.items()
        }
        outs = split(function, strided, static)
        if not isinstance(outs, tuple):
            return unstride_sequence(outs, shards, out)
        rest = (unstride_sequence(x, shards, 2) for x in outs[1:])
        return unstride_sequence(outs[0], shards, out), *rest

    return run


def context_parallel(mesh, strided, static, **axes):
    function = functools.partial(
        context_parallel_attention, mesh, strided=strided, **axes
    )
    if strided:
        return in_natural_order(function, mesh.shape["context"], static)
    return lambda arrays: split(function, arrays, static)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("devices", DEVICES)
def test_the_sequence_over_a_mesh_equals_one_device(devices, strided):
    arrays, static = operands(1, 4, 2, 3 * devices, "sink of each sequence")
    run = context_parallel(make_mesh(context=devices), strided, static)
    agree(run, lambda a: alone(a, static), arrays)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    "option", sorted(OPTIONS.keys() - {"window", "sink", "prefix"})
)
def test_every_option_over_batch_heads_and_sequence_at_once(option, strided):
    arrays, static = operands(2, 4, 2, 6, option)
    mesh = make_mesh(data=2, context=2, tensor=2)
    run = context_parallel(mesh, strided, static, batch="data", heads="tensor")
    agree(run, lambda a: alone(a, static), arrays)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_queries_and_keys_of_two_lengths_over_the_sequence(strided):
    arrays, static = operands(1, 2, 1, 6, "window")
    arrays["k"], arrays["v"] = arrays["k"][..., :3], arrays["v"][:, :, :3]
    run = context_parallel(make_mesh(context=3), strided, static)
    agree(run, lambda a: alone(a, static), arrays)


# With parts of 3 tokens: no neighbour, a part of one, and all of it.
@pytest.mark.parametrize(
    ("devices", "window"), [(1, 3), (2, 1), (2, 3), (3, 4), (5, 3), (8, 4)]
)
def test_a_halo_is_enough_for_a_window(devices, window):
    arrays, static = operands(1, 4, 2, 3 * devices, "sink of each sequence")
    static["sliding_window"] = window
    run = context_parallel(make_mesh(context=devices), False, static, halo=True)
    agree(run, lambda a: alone(a, static), arrays)


@pytest.mark.parametrize("devices", [2, 3, 6])
@pytest.mark.parametrize("causal", [True, False])
def test_packing_bounds_are_split_with_the_queries(causal, devices):
    arrays, static = operands(1, 2, 1, 6, "full")
    static["causal_mask"] = causal
    starts = jnp.asarray([0, 0, 2, 2, 2, 2], jnp.float32)[:, None]
    arrays |= dict(bound_min=starts, bound_max=jnp.where(starts > 0, 6.0, 2.0))
    run = context_parallel(make_mesh(context=devices), False, static)
    agree(run, lambda a: alone(a, static), arrays)


def test_a_halo_with_layouts_batch_and_heads():
    arrays, static = operands(2, 4, 2, 6, "layouts, soft cap")
    static["sliding_window"] = 3
    mesh = make_mesh(data=2, context=2, tensor=2)
    split = dict(batch="data", heads="tensor", halo=True)
    run = context_parallel(mesh, False, static, **split)
    agree(run, lambda a: alone(a, static), arrays)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_keys_that_nobody_sees_reach_no_device(strided):
    """R-08 over a mesh: keys after the last query hold NaN and inf."""
    arrays, static = operands(1, 2, 1, 6, "sink of each sequence")
    arrays["q"] = arrays["q"][:, :, :3]
    run = context_parallel(make_mesh(context=3), strided, static)
    poisoned = arrays | dict(
        k=arrays["k"].at[..., 3:].set(jnp.nan), v=arrays["v"].at[:, :, 3:].set(jnp.inf)
    )
    clean, dirty = (value_and_gradient(run, given) for given in (arrays, poisoned))
    for x, y in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_context_of_one_device_is_plain_attention():
    arrays, static = operands(1, 2, 1, 5, "sink of each sequence")
    run = context_parallel(make_mesh(context=1), True, static)
    agree(run, lambda a: alone(a, static), arrays)


def test_explicit_axes_carry_the_split_in_the_type():
    """R-50: explicit axes, and a sink that all devices share, R-43."""
    arrays, static = operands(1, 2, 1, 4, "sink")
    mesh = make_mesh(explicit=True, context=2)
    with jax.set_mesh(mesh):
        q, k, v = (
            jax.device_put(arrays[n], jax.NamedSharding(mesh, ALONG[n])) for n in "qkv"
        )
        out = jax.jit(functools.partial(context_parallel_attention, mesh))(
            q, k, v, sink=arrays["sink"]
        )
        assert jax.typeof(out).sharding.spec[:3] == (None, None, "context")
    np.testing.assert_allclose(out, alone(arrays, static), rtol=1e-5, atol=1e-6)


ALONG = dict(
    q=P(None, None, "context"),
    k=P(None, None, None, "context"),
    v=P(None, None, "context"),
    bias=P(None, None, "context"),
)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    ("option", "shared"),
    [("window", 0), ("bias", 0), ("sink", 1), ("bias of a column", 1), ("prefix", 1)],
)
def test_over_the_sequence_keys_and_values_are_gathered_once(option, shared, strided):
    mesh = make_mesh(context=3)
    run = functools.partial(context_parallel_attention, mesh, strided=strided)
    forward, both = costs(mesh, run, ALONG, option)
    assert forward == {"all-gather": 2}
    added = {"all-reduce": shared} if shared else {}
    assert both == {"all-gather": 2, "reduce-scatter": 2} | added


def test_a_halo_moves_what_a_window_needs_of_its_neighbour():
    run = functools.partial(
        context_parallel_attention, make_mesh(context=3), halo=True, sliding_window=3
    )
    forward, both = costs(make_mesh(context=3), run, ALONG, "sink")
    assert forward == {"collective-permute": 2}
    assert both == {"collective-permute": 4, "all-reduce": 1}


def test_shared_gradients_are_added_once_for_each_set_of_axes():
    mesh = make_mesh(data=2, context=2)
    run = functools.partial(context_parallel_attention, mesh, batch="data")
    specs = {n: P("data", *spec[1:]) for n, spec in ALONG.items()}
    specs |= dict.fromkeys(("k_prior", "v_prior"), P("data"))
    forward, both = costs(mesh, run, specs, "prefix, window, sink")
    assert forward == {"all-gather": 2}
    # The prefix's over the context, the sink's over the batch too.
    assert both == {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 2}


@pytest.mark.parametrize("axes", [dict(context=4), dict(data=2, tensor=2)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_over_a_mesh_is_that_of_one_device(axes, causal):
    """R-12: weights are dropped by their head, position and column."""
    arrays, static = operands(2, 4, 2, 8, "full")
    static |= dict(dropout_rate=0.4, dropout_key=jax.random.key(3), causal_mask=causal)
    run = context_parallel(make_mesh(context=4), causal, static)
    if "data" in axes:
        run = functools.partial(
            split, functools.partial(sharded_attention, make_mesh(**axes), batch="data")
        )
        run = functools.partial(run, static=static)
    agree(run, lambda a: alone(a, static), arrays)


def test_strided_order_gives_device_r_every_nth_token_from_r():
    tokens = jnp.arange(12).reshape(2, 6)
    strided = stride_sequence(tokens, 3)
    assert strided.tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    assert unstride_sequence(strided, 3).tolist() == tokens.tolist()
    assert stride_sequence(tokens.T, 3, axis=0).T.tolist() == strided.tolist()
    assert stride_sequence(tokens, 1).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda q, k, v: context_parallel_attention(
                make_mesh(context=4), q, k, v, batch="data"
            ),
            r"batch must be an axis of the mesh, one of \('context',\), got 'data'",
        ),
        (
            lambda q, k, v: context_parallel_attention(make_mesh(context=4), q, k, v),
            r"context_parallel_attention: sequences of q, k and v must be multiples of "
            r"the 4 devices of 'context', got \(6, 6, 6\)",
        ),
        (
            lambda q, k, v: context_parallel_attention(
                make_mesh(context=2), q, k, v, cp_offset=1, global_cp_deg=2
            ),
            "the mesh sets cp_offset, global_cp_deg",
        ),
        (
            lambda q, k, v: context_parallel_attention(
                *(make_mesh(context=2), q, k, v),
                halo=True,
                strided=True,
                sliding_window=5,
                bias=jnp.zeros((1, 1, 1, 6)),
            ),
            "halo needs natural order, a window of 1 to 4, "
            "no columns in a mask or bias",
        ),
        (
            lambda q, k, v: stride_sequence(q, 4, axis=2),
            "stride_sequence: the sequence must be a multiple of the 4 devices, got 6",
        ),
    ],
)
def test_what_a_mesh_cannot_split_is_refused(call, words):
    arrays, _ = operands(1, 2, 2, 6, "window")
    with pytest.raises(ValueError, match=words):
        call(*(arrays[n] for n in "qkv"))


def test_values_are_checked_before_the_mesh_hides_them():
    arrays, static = operands(2, 2, 2, 6, "prefix")
    arrays["prior_used_len"] = np.array([9], np.int32)
    call = functools.partial(context_parallel_attention, make_mesh(context=2))
    words = r"context_parallel_attention: prior_used_len must lie in \[0, 5\]"
    with pytest.raises(ValueError, match=words):
        call(**arrays, **static)
    with pytest.raises(ValueError, match="must have 4 axes"):
        call(*(arrays[n][0] for n in "qkv"))
