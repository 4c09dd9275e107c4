"""Attention over a ring equals the equation, and keeps nothing of what passed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from neuronjax.sharding import (
    make_mesh,
    ring_attention,
    stride_sequence,
    unstride_sequence,
)
from neuronjax.tools.trace import inner_jaxprs
from tests.attention_equations import Attention, visible
from tests.hlo import Program

SPLIT = P(None, None, "context")
_COLUMNS = P(None, None, None, "context")


def draw(parts, part, *, heads=4, kv_heads=2, batch=1, width=4, dtype="float32"):
    """`q`, `k`, `v` and a cotangent, each with its sequence on axis 2."""
    rng, seq = np.random.default_rng(parts + part), parts * part
    shapes = [(batch, n, seq, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def ring_over(devices, *, strided=False, specs=(SPLIT,) * 3, **options: Any):
    """The ring over a mesh of so many devices, in natural order; keys as rows."""
    mesh, options = make_mesh(context=devices), dict(tp_k=True) | options
    local = functools.partial(ring_attention, strided=strided, **options)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SPLIT)
    if not strided:
        return run

    def reordered(*arrays):
        arrays = (stride_sequence(x, devices, 2) for x in arrays)
        return unstride_sequence(run(*arrays), devices, 2)

    return reordered


def with_gradients(run):
    def both(q, k, v, d_out):
        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(d_out)

    return jax.jit(both)


def equation(q, k, v, d_out, *, causal=True, window=None, **options):
    """Result and gradients in float64."""
    shape, kv_shape, seq = q.shape, k.shape, q.shape[2]
    q, k, v, d_out = (np.asarray(x, np.float64)[0] for x in (q, k, v, d_out))
    seen = visible(seq, seq, causal, window=window)
    exact = Attention(q, k, v, seen, **options)
    grads = exact.gradients(d_out)
    shapes = dict(q=shape, k=kv_shape, v=kv_shape)
    whole = [grads[n].reshape(shapes[n]) for n in "qkv"]
    return [exact.outputs()[0].reshape(shape), *whole]


def naive(q, k, v, window=None):
    """The equation for JAX to differentiate, causal."""
    rows = np.arange(q.shape[2])
    behind = rows[:, None] - rows
    seen = (behind >= 0) & (behind < (window or len(rows)))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    z = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", q, k), -jnp.inf)
    return jax.nn.softmax(z) @ v


def close(got, wanted, rtol=1e-5):
    """Within `rtol` of the largest element."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        y = np.asarray(y, np.float64)
        error = np.abs(np.asarray(x, np.float64) - y).max()
        assert error <= rtol * np.abs(y).max(), error


# Parts of 3 and 5 rows are off every tile; one of 300 takes two blocks of the macro.
CASES = {
    "one device": (1, 5, {}, {}),
    "causal": (2, 300, {}, {}),
    "scale": (2, 5, dict(scale=None), dict(scale=0.5)),
    "full": (8, 3, dict(causal_mask=False), dict(causal=False)),
    "window": (8, 3, dict(sliding_window=6), dict(window=6)),
    "soft cap": (2, 3, dict(logits_soft_cap=1.5), dict(cap=1.5)),
    "strided": (3, 5, dict(strided=True), {}),
    "strided, window": (
        *(2, 3, dict(strided=True, sliding_window=4)),
        dict(window=4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_are_the_equations(case):
    devices, part, options, wanted = CASES[case]
    heads = (2, 1) if part > 99 else (4, 2)
    operands = draw(devices, part, heads=heads[0], kv_heads=heads[1])
    got = with_gradients(ring_over(devices, **options))(*operands)
    close(got, equation(*operands, **wanted))


def test_bfloat16_loses_a_few_roundings():
    operands = draw(3, 5, dtype="bfloat16")
    got = with_gradients(ring_over(3))(*operands)
    assert {x.dtype for x in got} == {jnp.dtype("bfloat16")}
    close(got, equation(*operands), rtol=2e-2)


def test_every_layout():
    q, k, v, d_out = draw(2, 3)
    layouts = dict(tp_q=False, tp_k=False, tp_out=True)
    local = functools.partial(ring_attention, **layouts)
    specs = _COLUMNS, _COLUMNS, SPLIT
    run = jax.shard_map(
        local, mesh=make_mesh(context=2), in_specs=specs, out_specs=_COLUMNS
    )
    out, dq, dk, dv = with_gradients(run)(q.mT, k.mT, v, d_out.mT)
    close((out.mT, dq.mT, dk.mT, dv), equation(q, k, v, d_out))


def test_queries_and_keys_of_two_lengths():
    q, k, v, d_out = draw(2, 6)
    k, v = k[:, :, :6], v[:, :, :6]
    got = with_gradients(ring_over(2))(q, k, v, d_out)
    exact = Attention(q[0], k[0], v[0], visible(12, 6, True))
    grads = exact.gradients(d_out[0])
    close(got, [exact.outputs()[0][None], *(grads[n][None] for n in "qkv")])


def test_devices_that_share_keys_add_their_gradients():
    """The batch is split over `data`, along which keys and values are the same."""
    q, k, v, d_out = draw(2, 3, batch=2)
    k, v = k[:1], v[:1]

    def local(q, k, v):
        return ring_attention(q, k, v, tp_k=True)

    rows = P("data", None, "context")
    run = jax.shard_map(
        local,
        mesh=make_mesh(data=2, context=2),
        in_specs=(rows, SPLIT, SPLIT),
        out_specs=rows,
    )
    out, dq, dk, dv = with_gradients(run)(q, k, v, d_out)
    each = [equation(q[i : i + 1], k, v, d_out[i : i + 1]) for i in range(2)]
    close((out, dq), [np.concatenate([x[n] for x in each]) for n in range(2)])
    close((dk, dv), [each[0][n] + each[1][n] for n in (2, 3)])


def twice(run, q, k, v, weights):
    """The gradient of a function of the gradients."""

    def once(*arrays):
        grads = jax.grad(lambda *a: jnp.vdot(jnp.sin(run(*a)), weights), (0, 1, 2))
        return sum(jnp.vdot(jnp.cos(x), x) for x in grads(*arrays))

    return jax.jit(jax.grad(once, (0, 1, 2)))(q, k, v)


def in_a_scan(run):
    """Two layers: the result is the next one's queries."""

    def layers(q, k, v):
        return jax.lax.scan(lambda q, _: (run(q, k, v), None), q, length=2)[0]

    return layers


@pytest.mark.parametrize("wrap", [lambda run: run, in_a_scan], ids=["once", "scan"])
def test_second_derivatives_are_the_equations(wrap):
    """A scan that is differentiated in reverse inlines a rule of one's own."""
    operands = draw(3, 3, heads=2, kv_heads=1, width=2)
    got = twice(wrap(ring_over(3, sliding_window=3)), *operands)
    wanted = wrap(functools.partial(naive, window=3))
    close(got, twice(wanted, *operands), 2e-5)


def test_a_mapped_ring_in_a_scan_under_remat():
    operands = [jnp.stack([x, x / 2]) for x in draw(3, 3, heads=2, width=3)]

    def wrapped(run):
        layers = jax.vmap(jax.checkpoint(in_a_scan(run)))
        return with_gradients(layers)(*operands)

    close(wrapped(ring_over(3)), wrapped(naive))


def test_a_key_that_is_not_seen_may_hold_anything():
    """R-08 over a ring: the last key and value hold NaN."""
    q, k, v, d_out = draw(2, 3)
    run = with_gradients(ring_over(2))
    clean = run(q, k, v, d_out.at[:, :, -1].set(0))
    k, v = (x.at[:, :, -1].set(jnp.nan) for x in (k, v))
    out, dq, _, _ = run(q, k, v, d_out)
    for x, y in zip((out, dq), clean, strict=False):
        np.testing.assert_array_equal(x[:, :, :-1], y[:, :, :-1])
        assert np.isnan(x[:, :, -1]).all()


def permutes(jaxpr, times=1):
    """How many collective permutes run; a scan's as often as it turns."""
    total = 0
    for eqn in jaxpr.eqns:
        total += times * (eqn.primitive.name == "ppermute")
        turns = times * eqn.params.get("length", 1)
        total += sum(permutes(inner, turns) for inner in inner_jaxprs(eqn))
    return total


@pytest.mark.parametrize(
    ("devices", "window", "hops"),
    [(1, None, 0), (2, None, 1), (8, None, 7), (8, 1, 0), (8, 4, 1), (8, 5, 2)],
)
def test_what_crosses_the_wire(devices, window, hops):
    """With parts of 3 tokens. Home is one more hop for each of two gradients."""
    operands = draw(devices, 3)
    run = ring_over(devices, sliding_window=window)
    home = 2 if hops else 0
    assert permutes(jax.make_jaxpr(run)(*operands[:3]).jaxpr) == 2 * hops
    both = jax.make_jaxpr(with_gradients(run))(*operands)
    assert permutes(both.jaxpr) == 6 * hops + home


PART = 320


@pytest.fixture(scope="module")
def compiled():
    """Result and gradients over rings of two lengths, of parts of 320 tokens."""

    def program(devices):
        operands = draw(devices, PART, heads=1, kv_heads=1)
        return with_gradients(ring_over(devices)).lower(*operands).compile()

    return {devices: program(devices) for devices in (4, 8)}


def test_a_program_has_nothing_but_permutes_and_no_more_for_more_devices(compiled):
    for found in compiled.values():
        places = Program(str(found.as_text())).places()
        # In the loops forward 2, backward 2 of keys and values, 2 of gradients. Before
        # them 2 that both rings share; after them 2 of gradients, and 2 that go home.
        assert places.in_loops == {"collective-permute": 2 + 2 + 2}
        assert places.once == {"collective-permute": 2 + 2 + 2}


def test_the_forward_program_sends_keys_and_values_once_a_hop():
    operands = draw(8, 3)[:3]
    found = jax.jit(ring_over(8)).lower(*operands).compile()
    places = Program(str(found.as_text())).places()
    assert places.in_loops == places.once == {"collective-permute": 2}


def test_memory_does_not_grow_with_the_ring(compiled):
    """Nothing that passed is kept, and no array has two lengths, not even a part's."""
    four, eight = (x.memory_analysis().temp_size_in_bytes for x in compiled.values())
    assert eight <= 1.02 * four
    for found in compiled.values():
        assert not Program(str(found.as_text())).large(PART * PART)


def test_layers_in_a_scan_have_the_rings_own_backward():
    operands, run = draw(3, 3, heads=2), ring_over(3)

    def layers(q, k, v):
        keys = jnp.stack([k, k]), jnp.stack([v, v])
        return jax.lax.scan(lambda q, keys: (run(q, *keys), None), q, keys)[0]

    both, one = (
        jax.make_jaxpr(with_gradients(x))(*operands).jaxpr for x in (layers, run)
    )
    assert permutes(both) == 2 * permutes(one)


def test_a_policy_that_saves_the_result_runs_one_ring_less():
    operands, run = draw(3, 3), ring_over(3)
    names = (f"ring_attention_{name}" for name in ("out", "neg_max", "recip"))
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def count(run):
        return permutes(jax.make_jaxpr(with_gradients(run))(*operands).jaxpr)

    assert count(jax.checkpoint(run, policy=policy)) == count(run)
    assert count(jax.checkpoint(run)) == count(run) + 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(axis="rows"), "axis must be a mesh axis of the shard_map .* 'rows'"),
        (dict(axis=None), "axis must be a mesh axis of the shard_map .* None"),
        (
            dict(sink=1, dropout_rate=0.5),
            "ring_attention: a ring has no dropout_rate, sink; context_parallel",
        ),
        (
            dict(causal_mask=False, sliding_window=3),
            "ring_attention: .*sliding_window",
        ),
        (dict(tp_k=False), "ring_attention: q and k must have one head dim"),
    ],
)
def test_what_a_ring_has_not_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ring_over(3, **options)(*draw(3, 3)[:3])


def test_an_array_without_a_batch_or_outside_of_a_mesh_is_refused():
    q, k, v, _ = (x[0] for x in draw(3, 3))
    specs = (P(None, "context"),) * 3
    with pytest.raises(ValueError, match="ring_attention: q, k and v must have 4 axes"):
        ring_over(3, specs=specs)(q, k, v)
    with pytest.raises(ValueError, match="the shard_map around the call"):
        ring_attention(q[None], k[None], v[None])


def test_forward_mode_is_refused():
    operands = draw(1, 3)[:3]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.jit(ring_over(1)), operands, operands)
