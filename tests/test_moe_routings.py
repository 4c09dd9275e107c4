"""Any routing: values and gradients of the experts, and what must not change them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neuronjax
from neuronjax.kernels.blockwise_mm.slots import Slots, visits_of
from neuronjax.sharding import make_mesh, sharded_moe_cte
from tests.moe_case import CLAMPS, Case, compare, exact, program
from tests.moe_equations import FLOATS, Moe, slots_of

STORED = (("checkpoint_activation", True),)
ALL = tuple(CLAMPS.values())
# Few shapes, each compiled once; blocks are enough for a token twice in one expert.
CASES = (
    Case(tokens=6, experts=3, k=2, block=2, width=4, inner=3, bias=True, clamps=ALL),
    Case(tokens=5, experts=4, k=1, block=3, width=4, inner=3, skip_token=True),
    Case(tokens=4, experts=2, k=3, block=4, width=4, inner=3, scaling="PRE_SCALE"),
    Case(tokens=1, experts=5, k=2, block=1, width=4, inner=3, scaling="NO_SCALE"),
)
HYBRID = dataclasses.replace(CASES[0], implementation="shard_on_i_hybrid")
few = functools.partial(settings, max_examples=25, deadline=None, derandomize=True)


@st.composite
def routings(draw, distinct=False, cases=CASES):
    """A case and `[T, k]` experts; `E` and beyond name none."""
    case = draw(st.sampled_from(cases))
    expert = st.integers(0, case.experts + 1)
    row = st.lists(expert, min_size=case.k, max_size=case.k, unique=distinct)
    rows = st.lists(row, min_size=case.tokens, max_size=case.tokens)
    return case, np.array(draw(rows), np.int32)


@few()
@given(routings(), st.integers(0, 9))
def test_any_routing_follows_the_equations(routing, seed):
    """Outputs, checkpoints and every gradient; an expert twice counts twice."""
    case, index = routing
    floats, rest = case.floats(index, seed=seed), case.routed(index)
    cotangents = case.filled(rest, case.cotangents(seed=seed))
    got = program(case, STORED)(floats, rest, cotangents)
    wanted = exact(case, floats, rest, cotangents)
    compare(got, wanted, 2e-5)
    d_out, d_gate_up, d_down = cotangents
    moe = Moe(floats | rest | case.settings)
    compare(moe.outputs(), wanted[0], 1e-6)
    compare(moe.gradients(d_out, None, None, d_gate_up, d_down), wanted[1], 1e-5)
    idle = ~np.isin(np.arange(case.experts), index)
    for name in FLOATS[2:]:
        if name in got[1]:  # bit by bit
            assert not np.asarray(got[1][name])[idle].any()


@few()
@given(routings(), st.randoms(use_true_random=False))
def test_the_order_of_blocks_and_of_slots_does_not_matter(routing, random):
    case, index = routing
    floats, rest = case.floats(index), case.routed(index)
    ids = rest["token_position_to_id"].reshape(-1, case.block)
    blocks = random.sample(range(len(ids)), len(ids))
    slots = random.sample(range(case.block), case.block)
    mixed = dict(
        token_position_to_id=ids[blocks][:, slots].ravel(),
        block_to_expert=rest["block_to_expert"][blocks],
    )
    out, gate_up, down = case.cotangents()
    run = program(case, STORED)
    outs, grads = run(floats, rest, case.filled(rest, (out, gate_up, down)))
    turned = out, gate_up[np.array(blocks)][..., np.array(slots)]
    turned += (down[np.array(blocks)][:, np.array(slots)],)
    again, others = run(floats, mixed, case.filled(mixed, turned))
    compare(again[0], outs[0], 1e-5)
    compare(others, grads, 2e-5)


@few()
@given(routings(distinct=True), st.booleans())
def test_routed_blocks_give_the_sum_over_each_tokens_experts(routing, masked):
    """From `route_to_blocks` to the output, against experts applied one by one."""
    case, index = routing
    mask = np.arange(case.tokens) % 3 != 1 if masked else np.ones(case.tokens, bool)
    floats = case.floats(index)
    ids, experts, *_ = _route(case, index, mask)
    kept = np.where(mask[:, None], index, case.experts)
    names = slots_of(kept, case.experts, case.block, case.padding, len(experts))
    np.testing.assert_array_equal(ids, names[0])
    np.testing.assert_array_equal(experts, names[1])
    rest = dict(token_position_to_id=ids, block_to_expert=experts)
    got, _ = program(case, STORED)(floats, rest, case.cotangents())
    moe = Moe(floats | rest | case.settings)
    wanted = np.zeros(moe.x.shape)
    for t, row in enumerate(kept):
        for e in row[row < case.experts]:
            a = moe.a[t * case.experts + e]
            x = moe.x[t] * (a if case.scaling == "PRE_SCALE" else 1)
            y = moe.expert(x, e)[1]
            wanted[t] += y * (a if case.scaling == "POST_SCALE" else 1)
    compare(got[0], wanted, 1e-5)


_SIZES = ("num_experts", "block_size", "num_blocks", "skip_token")
_routed = jax.jit(neuronjax.route_to_blocks, static_argnames=_SIZES)


def _route(case, index, mask):
    return _routed(
        jnp.asarray(index),
        case.experts,
        case.block,
        num_blocks=case.count,
        skip_token=case.skip_token,
        token_mask=jnp.asarray(mask),
    )


@few(max_examples=10)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 8))
def test_conditions_count_to_their_first_0(experts, active):
    """Wherever it stands, and whatever the blocks after it hold."""
    case, index = CASES[0], np.reshape(experts, (6, 2))
    floats, rest = case.floats(index), case.routed(index)
    rest["conditions"] = (np.arange(case.count + 1) != active).astype(np.int32)
    cotangents = case.filled(rest, case.cotangents())
    outs, grads = program(HYBRID, STORED)(floats, rest, cotangents)
    moe = Moe(floats | rest | case.settings)
    compare(outs, moe.outputs(), 2e-5)
    after = np.arange(case.count) >= active
    d_out, d_gate_up, d_down = cotangents
    d_gate_up, d_down = (x.at[after].set(0) for x in (d_gate_up, d_down))
    wanted = moe.gradients(d_out, None, None, d_gate_up, d_down)
    compare(grads, wanted, 2e-5)


OVER = Case(tokens=6, experts=3, k=2, block=2, width=4, inner=4, bias=True, clamps=ALL)


@functools.cache
def over_two_cores(shard):
    """Output and gradients of `OVER`, compiled once for all routings."""
    mesh = make_mesh(lnc=2)
    settings = dict(OVER.settings, spec="shard_on_i", shard_on=shard)
    del settings["skip_token"]

    @jax.jit
    def run(floats, rest, d_out):
        call = lambda floats: sharded_moe_cte(mesh, **floats, **rest, **settings)  # noqa: E731
        out, pull = jax.vjp(call, floats)
        return out, pull(d_out)[0]

    return run


@pytest.mark.parametrize("shard", ["block", "intermediate", "hidden"])
@few()
@given(index=routings(cases=(OVER,)))
def test_any_routing_over_two_cores(shard, index):
    index = index[1]
    floats, rest = OVER.floats(index), OVER.routed(index)
    d_out = OVER.cotangents()[0]
    moe = Moe(floats | rest | OVER.settings)
    got = over_two_cores(shard)(floats, rest, d_out)
    compare(got, (moe.outputs()[0], moe.gradients(d_out)), 2e-5)
    idle = ~np.isin(np.arange(OVER.experts), index)
    for name in FLOATS[2:]:  # bit by bit
        assert not np.asarray(got[1][name])[idle].any()


@pytest.mark.parametrize(
    "kind", ["balanced", "skewed", "one expert", "nobody", "every block"]
)
def test_work_follows_tokens(kind):
    """What the loops visit: the experts that have tokens, and their busy blocks."""
    tokens, k, experts, size = 24, 2, 8, 4
    t = np.arange(tokens)
    index = {
        "balanced": np.stack([t % 8, (t + 1) % 8], 1),
        "skewed": np.stack([np.where(t < 18, 5, t % 8), np.where(t < 20, 2, 7)], 1),
        "one expert": np.stack([np.full(tokens, 3), np.full(tokens, experts)], 1),
        "nobody": np.full((tokens, k), experts),
        "every block": np.stack([np.minimum(t, 7), np.full(tokens, experts)], 1),
    }[kind].astype(np.int32)
    ids, owner, _ = neuronjax.route_to_blocks(index, experts, size)
    ids = np.asarray(ids).reshape(-1, size)
    slots = Slots(jnp.asarray(ids), jnp.ones(ids.shape), jnp.asarray(owner))
    visits = jax.jit(visits_of, static_argnums=(1, 2))(slots, tokens, experts)
    load = np.array([len(set(t[(index == e).any(1)])) for e in range(experts)])
    each = -(-load // size)
    np.testing.assert_array_equal(visits.blocks, each)
    assert visits.blocks.sum() == (ids < tokens).any(1).sum() == each.sum() <= len(ids)
    assert visits.experts == (load > 0).sum()
    named = np.nonzero(load)[0]
    np.testing.assert_array_equal(visits.expert[: len(named)], named)
    for e in named:  # its blocks stand together
        mine = visits.block[visits.first[e] : visits.first[e] + each[e]]
        np.testing.assert_array_equal(np.asarray(owner)[mine], e)
        assert (ids[np.asarray(mine)] < tokens).any(1).all()
