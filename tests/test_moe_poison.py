"""NaN and infinity where no slot looks change neither values nor gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests.moe_case import CASES, Case, compare, program
from tests.moe_equations import FLOATS, Moe

STORED = (("checkpoint_activation", True),)
BAD = np.array([np.nan, np.inf, -np.inf], np.float32)
EXPERTS = FLOATS[2:]
NAMES = "clamps", "one_sided", "pre_scale", "no_scale"


def _spoil(array, where):
    """The array with NaN, inf and -inf in turn where `where` holds of its rows."""
    array = np.asarray(array)
    where = np.reshape(where, (-1, *[1] * (array.ndim - 1)))
    return jnp.asarray(np.where(where, np.resize(BAD, array.shape), array))


def _operands(name, chosen=None):
    """Expert 1 has no token, unless `chosen` says otherwise."""
    case = CASES[name]
    index = np.where(case.index() == 1, 0, case.index()) if chosen is None else chosen
    index = np.stack([np.pad(np.unique(r), (0, case.k - np.unique(r).size),
                             constant_values=case.experts) for r in index])  # fmt: skip
    floats, rest = case.floats(index), case.routed(index)
    return case, index, floats, rest, case.filled(rest, case.cotangents())


def _used(case, index):
    """`[R, E]`: the pairs of token and expert that a slot names."""
    used = np.zeros((case.rows, case.experts), bool)
    for t, row in enumerate(index):
        used[t, row[row < case.experts]] = True
    return used


@pytest.mark.parametrize("name", NAMES)
def test_what_no_slot_names_may_hold_anything(name):
    """Padding rows, affinities of other experts, experts without tokens, cotangents."""
    case, index, floats, rest, cotangents = _operands(name)
    run, used = program(case, STORED), _used(case, index)
    wanted = run(floats, rest, cotangents)
    empty = ~used.any(1)
    bad = dict(floats, hidden_states=_spoil(floats["hidden_states"], empty))
    affinity = "expert_affinities_masked"
    bad[affinity] = _spoil(bad[affinity], ~used.reshape(-1))
    idle = np.logical_not(used.any(0))
    assert idle[1]
    # Blocks left over belong to an expert without tokens, too.
    last = np.equal(rest["token_position_to_id"], case.padding)
    last = last.reshape(-1, case.block)
    rest["block_to_expert"][last.all(1)] = 1
    bad |= {n: _spoil(floats[n], idle) for n in EXPERTS if n in floats}
    d_out, d_gate_up, d_down = cotangents
    d_gate_up, d_down = (_spoil(x, last.all(1)) for x in (d_gate_up, d_down))
    got = run(bad, rest, (_spoil(d_out, empty), d_gate_up, d_down))
    compare(got, wanted, 1e-6)
    grads = {n: np.asarray(x) for n, x in got[1].items()}
    assert not np.asarray(got[0][0])[empty].any()
    assert not grads["hidden_states"][empty].any()
    assert not grads[affinity][~used.reshape(-1)].any()
    assert not any(grads[n][idle].any() for n in EXPERTS if n in grads)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_token_reaches_its_own_row_and_its_experts_alone(name):
    case, index, floats, rest, cotangents = _operands(name)
    run, used = program(case, STORED), _used(case, index)
    wanted = run(floats, rest, cotangents)
    token = int(np.flatnonzero(used.any(1))[0])
    row = np.arange(case.rows) == token
    bad = dict(floats, hidden_states=_spoil(floats["hidden_states"], row))
    got = run(bad, rest, cotangents)
    assert not np.isfinite(np.asarray(got[0][0])[row]).all()
    compare(np.asarray(got[0][0])[~row], np.asarray(wanted[0][0])[~row], 1e-6)
    for label in ("hidden_states", "expert_affinities_masked"):
        a, b = (np.reshape(x[1][label], (case.rows, -1)) for x in (got, wanted))
        compare(a[~row], b[~row], 1e-6)
    clean = ~used[token]
    for label in EXPERTS:
        if label in floats:
            a, b = (np.asarray(x[1][label])[clean] for x in (got, wanted))
            compare(a, b, 1e-6)


@pytest.mark.parametrize("name", ["clamps", "one_sided"])
def test_ids_out_of_range_are_padding_under_jit(name):
    """Nothing wraps around to a last token, and nothing is clipped to it."""
    case, _, floats, rest, cotangents = _operands(name)
    run = program(case, STORED)
    wanted = run(floats, rest, cotangents)
    ids = rest["token_position_to_id"]
    odd = np.resize([-1, -2, -case.rows - 3, case.rows, case.rows + 7], ids.size)
    odd = np.where(odd == case.tokens, -9, odd)
    bad = dict(rest, token_position_to_id=np.where(ids == case.padding, odd, ids))
    bad["token_position_to_id"] = bad["token_position_to_id"].astype(np.int32)
    poisoned = dict(floats)
    if not case.skip_token:
        padding = np.arange(case.rows) == case.tokens
        poisoned["hidden_states"] = _spoil(floats["hidden_states"], padding)
    compare(run(poisoned, bad, cotangents), wanted, 1e-6)


def test_blocks_of_no_expert_are_padding_under_jit():
    """An expert out of range has no weights to read: neither the last nor the first."""
    case, _, floats, rest, cotangents = _operands("clamps")
    run = program(case, STORED)
    first = rest["token_position_to_id"].copy()
    first[: case.block], first[-case.block :] = case.padding, case.padding
    without = dict(rest, token_position_to_id=first)
    cotangents = case.filled(without, cotangents)
    wanted = run(floats, without, cotangents)
    experts = rest["block_to_expert"].copy()
    experts[0], experts[-1] = -1, case.experts
    compare(run(floats, dict(rest, block_to_expert=experts), cotangents), wanted, 1e-6)


def test_blocks_after_the_conditions_may_hold_anything():
    case = Case(bias=True, implementation="shard_on_i_hybrid", blocks=9)
    index = case.index()
    floats, rest = case.floats(index), case.routed(index)
    live = np.flatnonzero(Moe(floats | rest | case.settings).visited()).max() + 1
    assert live < 8
    conditions = (np.arange(10) < live).astype(np.int32)
    wanted = program(case, STORED)(
        floats, rest | dict(conditions=conditions), case.cotangents()
    )
    ids = rest["token_position_to_id"].reshape(9, -1).copy()
    ids[live:] = [0, 1, 2, -7]
    experts = rest["block_to_expert"].copy()
    experts[live:] = 10**6
    bad = dict(
        token_position_to_id=ids.ravel(), block_to_expert=experts, conditions=conditions
    )
    cotangents = case.cotangents()
    after = np.arange(9) >= live
    spoiled = cotangents[0], *(_spoil(x, after) for x in cotangents[1:])
    compare(program(case, STORED)(floats, bad, spoiled), wanted, 1e-6)


@pytest.mark.parametrize("skip_token", [False, True])
def test_the_backward_reads_no_checkpoint_of_an_empty_slot(skip_token):
    case = Case(bias=True, skip_token=skip_token, blocks=9)
    index = case.index()
    floats, rest = case.floats(index), case.routed(index)
    d_out, gate_up, down = case.filled(rest, case.cotangents())
    empty = rest["token_position_to_id"].reshape(9, -1) == case.padding

    def run(floats, gate_up, down, d_out):
        operands = {n: x for n, x in floats.items() if "bias" not in n}
        return neuronjax.blockwise_mm_bwd(
            **operands,
            **rest,
            gate_up_proj_act_checkpoint_T=gate_up,
            down_proj_act_checkpoint=down,
            output_hidden_states_grad=d_out,
            block_size=4,
            skip_dma=neuronjax.SkipMode(skip_token=skip_token),
            bias=True,
        )

    run = jax.jit(run)
    wanted = run(floats, gate_up, down, d_out)
    padding = np.arange(case.rows) >= case.tokens
    bad = dict(floats, hidden_states=_spoil(floats["hidden_states"], padding))
    got = run(
        bad,
        jnp.where(empty[:, None, None], jnp.nan, gate_up),
        jnp.where(empty[..., None], jnp.nan, down),
        _spoil(d_out, padding),
    )
    compare(got, wanted, 1e-6)
