"""Attention split over a mesh equals attention on one device, at the stated cost."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding import (
    context_parallel_attention,
    make_mesh,
    sharded_attention,
    stride_sequence,
    unstride_sequence,
)

DEVICES = (2, 3, 5, 8)
BY_HEAD = {"q", "k", "v", "k_prior", "v_prior", "sink", "bias", "mask"}
FLOATS = ("q", "k", "v", "k_prior", "v_prior", "sink", "bias")
# Each option of `attention_cte` with its operands, `sizes` as (batch, heads, kv heads,
# sequence), a prefix of 5 slots where there is one.
OPTIONS = {
    "full": dict(causal_mask=False),
    "window": dict(sliding_window=3),
    "sink": dict(sink=(1, "heads", 1)),
    "sink of each sequence": dict(sink=("batch", "heads", 1), sliding_window=4),
    "prefix": dict(
        k_prior=("batch", "kv_heads", 4, 5),
        v_prior=("batch", "kv_heads", 5, 3),
        prior_used_len=3,
    ),
    "prefix, window, sink": dict(
        k_prior=("batch", "kv_heads", 4, 5),
        v_prior=("batch", "kv_heads", 5, 3),
        prior_used_len=4,
        sliding_window=6,
        sink=(1, "heads", 1),
    ),
    "bias": dict(bias=("batch", "heads", "seq", "seq")),
    "bias of a head": dict(bias=(1, "heads", 1, "seq"), causal_mask=False),
    "bias of a sequence": dict(bias=("batch", 1, "seq", 1)),
    "bias of a column": dict(bias=(1, 1, 1, "seq")),
    "mask": dict(mask=("batch", 1, "seq", "seq")),
    "statistics": dict(cache_softmax=True, sink=(1, "heads", 1)),
    "layouts, soft cap": dict(
        tp_q=False, tp_k=True, tp_out=True, cache_softmax=True, logits_soft_cap=1.5
    ),
}


def operands(batch, heads, kv_heads, seq, option):
    """Random operands for an option; sequences in natural order."""
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, seq=seq)
    rng = np.random.default_rng(len(option) + seq)

    def draw(*shape):
        shape = [sizes.get(n, n) for n in shape]
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    given = dict(OPTIONS[option])
    arrays = dict(
        q=draw("batch", "heads", "seq", 4),
        k=draw("batch", "kv_heads", 4, "seq"),
        v=draw("batch", "kv_heads", "seq", 3),
    )
    if given.get("tp_k"):
        arrays["k"] = arrays["k"].mT
    if not given.get("tp_q", True):
        arrays["q"] = arrays["q"].mT
    for name in BY_HEAD & given.keys():
        arrays[name] = draw(*given.pop(name))
    if "mask" in arrays:
        arrays["mask"] = arrays["mask"] > 0
    if "prior_used_len" in given:
        arrays["prior_used_len"] = jnp.asarray([given["prior_used_len"]], jnp.int32)
        del given["prior_used_len"]
    return arrays, given


def alone(arrays, static):
    """One device: batch and heads folded, and everything spread over them."""
    lead = arrays["q"].shape[:2]

    def fold(name, x):
        if name not in BY_HEAD:
            return x
        if name in ("sink", "bias", "mask"):
            x = jnp.broadcast_to(x, (*lead, *x.shape[2:]))
        return lax.collapse(x, 0, 2)

    folded = {name: fold(name, x) for name, x in arrays.items()}
    outs = neuronjax.attention_cte(**folded, **static)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), outs)


def split(function, arrays, static):
    q, k, v = (arrays[n] for n in "qkv")
    return function(
        q, k, v, **{n: arrays[n] for n in arrays if n not in "qkv"} | static
    )


def value_and_gradient(run, arrays):
    """Outputs, and the gradient of a sum that weighs every element differently."""
    floats = {n: x for n, x in arrays.items() if n in FLOATS}
    others = {n: x for n, x in arrays.items() if n not in FLOATS}

    def total(floats):
        outs = jax.tree.leaves(run(floats | others))
        waves = (jnp.sin(jnp.arange(x.size, dtype=x.dtype)) for x in outs)
        flat = (x.ravel() for x in outs)
        return sum(jnp.vdot(x, w) for x, w in zip(flat, waves, strict=True)), outs

    (_, outs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(floats)
    return outs, grads


def agree(run, wanted, arrays):
    got, expected = (value_and_gradient(f, arrays) for f in (run, wanted))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


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


@pytest.mark.parametrize("devices", DEVICES)
def test_heads_over_a_mesh_equal_one_device(devices):
    arrays, static = operands(1, 2 * devices, devices, 7, "sink of each sequence")
    run = functools.partial(sharded_attention, make_mesh(tensor=devices))
    agree(lambda a: split(run, a, static), lambda a: alone(a, static), arrays)


@pytest.mark.parametrize("devices", DEVICES)
def test_the_batch_over_a_mesh_equals_one_device(devices):
    arrays, static = operands(devices, 2, 1, 7, "sink of each sequence")
    mesh = make_mesh(data=devices)
    run = functools.partial(sharded_attention, mesh, batch="data", heads=None)
    agree(lambda a: split(run, a, static), lambda a: alone(a, static), arrays)


def test_packing_bounds_over_batch_and_heads_equal_one_device():
    arrays, static = operands(2, 4, 2, 7, "sink")
    starts = jnp.asarray([0, 0, 0, 3, 3, 3, 3], jnp.float32)[:, None]
    arrays |= dict(bound_min=starts, bound_max=jnp.where(starts > 0, 7.0, 3.0))
    run = functools.partial(
        sharded_attention, make_mesh(data=2, tensor=2), batch="data"
    )
    agree(lambda a: split(run, a, static), lambda a: alone(a, static), arrays)


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


def test_a_context_of_one_device_is_plain_attention():
    arrays, static = operands(1, 2, 1, 5, "sink of each sequence")
    run = context_parallel(make_mesh(context=1), True, static)
    agree(run, lambda a: alone(a, static), arrays)


def test_explicit_axes_carry_the_split_in_the_type():
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


KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()


def collectives(fun, *args):
    """How often each collective stands in the compiled program."""
    program = jax.jit(fun).lower(*args).compile().as_text()
    found = re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", program)
    return dict(collections.Counter(found))


def costs(mesh, function, specs, option, seq=6):
    """Collectives forward, and of forward and backward together."""
    arrays, static = operands(2, 4, 2, seq, option)

    def place(name, x):
        spec = specs.get(name, P())
        whole = (
            axis if n > 1 else None for axis, n in zip(spec, x.shape, strict=False)
        )
        return jax.device_put(x, jax.NamedSharding(mesh, P(*whole)))

    placed = {n: place(n, x) for n, x in arrays.items()}
    floats = {n: x for n, x in placed.items() if n in FLOATS}
    others = {n: x for n, x in placed.items() if n not in FLOATS}

    def run(floats):
        return split(function, floats | others, static)

    def both(floats, cotangent):
        out, pull = jax.vjp(run, floats)
        return out, *pull(cotangent)

    out = jax.jit(run)(floats)
    return collectives(run, floats), collectives(both, floats, out)


LEAD = P("data", "tensor")
SPLIT = dict.fromkeys(("q", "k", "v", "k_prior", "v_prior"), LEAD) | dict(
    sink=P(None, "tensor"), bias=P("data", "tensor")
)


@pytest.mark.parametrize(
    ("option", "backward"),
    [
        ("window", {}),
        ("prefix", {}),
        ("bias", {}),
        # One logit for all sequences: their gradients are added over the batch.
        ("sink", {"all-reduce": 1}),
    ],
)
def test_over_batch_and_heads_only_shared_gradients_are_added(option, backward):
    mesh = make_mesh(data=2, tensor=2)
    run = functools.partial(sharded_attention, mesh, batch="data")
    assert costs(mesh, run, SPLIT, option) == ({}, backward)


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


def weights(mesh, function, heads, seq, key, **axes):
    """The weights of uniform attention with dropout, `[heads, seq, seq]`."""
    q, k = jnp.zeros((1, heads, seq, 1)), jnp.zeros((1, heads, 1, seq))
    v = jnp.broadcast_to(jnp.eye(seq), (1, heads, seq, seq))
    options = dict(causal_mask=False, dropout_rate=0.5, dropout_key=key)
    return function(mesh, q, k, v, **options, **axes)[0]


def test_devices_drop_by_keys_of_their_own():
    key, seq = jax.random.key(3), 16
    options = dict(causal_mask=False, dropout_rate=0.5)
    q, v = jnp.zeros((1, seq, 1)), jnp.eye(seq)[None]
    by_device = [
        neuronjax.attention_cte(
            q, q.mT, v, dropout_key=jax.random.fold_in(key, i), **options
        )[0]
        for i in range(4)
    ]
    by_head = weights(make_mesh(tensor=4), sharded_attention, 4, seq, key)
    np.testing.assert_allclose(by_head, by_device, rtol=1e-6)
    for i in range(4):
        for j in range(i):
            assert (by_head[i] != by_head[j]).any()
    mesh, whole = make_mesh(context=4), jax.jit(weights, static_argnums=(0, 1, 2, 3))
    by_row = whole(mesh, context_parallel_attention, 1, seq, key)[0]
    parts = np.asarray(by_row).reshape(4, seq // 4, seq)
    assert {0.0, 2 / seq} == {round(float(x), 6) for x in np.unique(parts)}
    assert len({part.tobytes() for part in parts}) == 4


def test_dropout_over_a_mesh_is_the_same_forward_and_backward():
    arrays, static = operands(1, 4, 2, 6, "full")
    key = jax.random.key(1)
    mesh = make_mesh(context=2, tensor=2)

    def run(v):
        return context_parallel_attention(
            *(mesh, arrays["q"], arrays["k"], v),
            heads="tensor",
            dropout_rate=0.3,
            dropout_key=key,
            **static,
        )

    # Linear in the values: the gradient's product with them is the output's sum.
    out, pull = jax.vjp(jax.jit(run), arrays["v"])
    (dv,) = pull(jnp.ones_like(out))
    np.testing.assert_allclose(jnp.vdot(dv, arrays["v"]), out.sum(), rtol=1e-5)


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
            lambda q, k, v: sharded_attention(
                make_mesh(tensor=2), q, k, v, sink=jnp.zeros((2, 1))
            ),
            r"sharded_attention: sink must have \[1 or batch, heads, 1\], "
            r"batch, heads = \(1, 2\), got \(2, 1\)",
        ),
        (
            lambda q, k, v: sharded_attention(
                make_mesh(tensor=2), q, k, v, bias=jnp.zeros((1, 2, 6, 5))
            ),
            r"bias must have 1 or the size in each of \[batch, heads, q_seq, kv_seq\] "
            r"= \(1, 2, 6, 6\), got \(1, 2, 6, 5\)",
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
