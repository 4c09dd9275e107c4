"""`transformer_tkg` on one device, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests import transformer_case as case
from tests.transformer_case import error, operands, reference, require_close, sizes

TOLERANCES = {"float32": 2e-5, "bfloat16": 6e-2, "float16": 6e-3}


def run(call):
    """The call as its own compiled program."""
    arrays, rest = case.split(call)
    return jax.jit(lambda arrays: neuronjax.transformer_tkg(**arrays, **rest))(arrays)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_two_layers_are_the_equations(dtype):
    call = operands(sizes(), dtype=dtype)
    output, k_caches, _ = got = run(call)
    assert output.dtype == k_caches[0].dtype == dtype
    require_close(got, reference(call), TOLERANCES[dtype])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("quantized", [(), (0, 1)])
def test_float64_stays_float64(quantized, stacked):
    with jax.enable_x64(True):
        call = operands(sizes(quantized=quantized), dtype="float64")
        call["clamp_bound"] = 0.4
        got = run(case.stacked(call) if stacked else call)
        assert got[0].dtype == "float64"
        require_close(got, reference(call), 1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        dict(G=1, n=3, S=1),
        dict(G=3, n=1, D=2, B=1),
        dict(L=1, S=3, I=5, H=6),
        dict(L=3, ctx=2),
        dict(ctx=9),
    ],
    ids=str,
)
def test_any_sizes_are_the_equations(changes):
    call = operands(sizes(**changes))
    require_close(run(call), reference(call), 2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [dict(), dict(B=1, G=3), dict(G=1, S=1), dict(quantized=(0, 1))], ids=str
)
def test_stacked_layers_are_listed_ones(changes, dtype):
    call = operands(sizes(**changes), dtype=dtype)
    listed, stacked = run(call), run(case.stacked(call))
    assert all(isinstance(x, jax.Array) for x in stacked)
    require_close(stacked, reference(call), TOLERANCES[dtype])
    # Rounded alike.
    require_close(stacked, listed, 2e-2 if dtype == "bfloat16" else 1e-6)


def test_stacked_layers_stay_one_array_each():
    call = case.stacked(operands(sizes()))
    _, k_caches, v_caches = neuronjax.transformer_tkg(**call)
    assert k_caches.shape == call["K_caches"].shape
    assert v_caches.shape == call["V_caches"].shape


def test_one_head_of_a_mask_stands_for_all():
    call = operands(sizes())
    call["mask_cache"] = call["mask_cache"][:, :, :1]
    require_close(run(call), reference(call), 2e-5)


def test_boolean_masks_are_masks():
    call = operands(sizes())
    same = call | dict(mask_cache=call["mask_cache"].astype(bool))
    require_close(run(same), run(call), 0)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("cached_heads", [1, 4])
def test_mask_active_says_which_new_tokens_a_query_attends(heads, cached_heads):
    z = sizes(S=3)
    call = operands(z)
    call["mask_cache"] = call["mask_cache"][:, :, :cached_heads]
    tree = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 1]])  # siblings do not see each other
    active = np.broadcast_to(tree[:, None, None], (3, z["B"], heads, 3))
    call["mask_active"] = jnp.asarray(active, jnp.int32)
    got = run(call)
    require_close(got, reference(call), 2e-5)
    chain = run(call | dict(mask_active=None))
    first, last = (np.abs(got[0] - chain[0])[:, at].max() for at in (0, 2))
    assert first == 0 and last > 1e-3


def test_mask_active_of_a_chain_changes_nothing():
    call = operands(sizes(S=2))
    rows = call["mask_cache"][-2:]
    require_close(run(call | dict(mask_active=rows)), run(call), 0)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_without_positions_the_caches_come_back_as_they_were(groups, stacked):
    call = operands(sizes(G=groups))
    call = case.stacked(call) if stacked else call
    output, k_caches, v_caches = run(call | dict(position_ids=None))
    np.testing.assert_array_equal(output, run(call)[0])
    for held, was in ((k_caches, call["K_caches"]), (v_caches, call["V_caches"])):
        for a, b in zip(held, was, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("changes", [dict(G=1), dict(), dict(B=1, G=2)], ids=str)
def test_a_sequence_without_a_slot_writes_nothing(changes, stacked):
    call = operands(sizes(**changes))
    batch = call["X"].shape[0]
    start = np.full((batch, 1), 4)
    start[-1] = -1
    call["position_ids"] = jnp.asarray(start, jnp.int32)
    made = case.stacked(call) if stacked else call
    got = run(made)
    require_close(got, reference(call), 2e-5)
    np.testing.assert_array_equal(got[1][0][-1], call["K_caches"][0][-1])
    arrays, rest = case.split(made)
    arrays["position_ids"] = arrays["position_ids"].at[0].set(9)  # beyond the end

    def traced(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest)

    np.testing.assert_array_equal(jax.jit(traced)(arrays)[2][0], made["V_caches"][0])


def test_all_positions_of_a_sequence_stand_for_the_first():
    call = operands(sizes())
    every = call["position_ids"] + jnp.arange(2, dtype=jnp.int32)
    require_close(run(call | dict(position_ids=every)), run(call), 0)


def test_longer_lists_are_read_up_to_num_layers():
    call = operands(sizes(L=2))
    got = run(call | dict(num_layers=1))
    require_close(
        (got[0], got[1][:1], got[2][:1]), reference(call | dict(num_layers=1)), 2e-5
    )
    np.testing.assert_array_equal(got[1][1], call["K_caches"][1])
    assert len(got[2]) == 2


def test_the_residual_is_rounded_behind_every_half_layer():
    """At 256 half a unit of bfloat16 is 1: eight parts of 0.8 leave it as it was."""
    call = operands(sizes(L=4, B=1, S=1), dtype="bfloat16")
    call["X"] = jnp.full_like(call["X"], 256)
    fills = dict(W_gamma_qkvs=1, W_gamma_mlps=1, W_qkvs=1 / 8, V_caches=1)
    fills |= dict(W_outs=0.8 / 16, W_gates=1 / 8, W_ups=1 / 8, W_downs=0.1 / 0.731)
    call |= {k: [jnp.full_like(x, f) for x in call[k]] for k, f in fills.items()}
    assert (reference(call)[0] > 262).all()
    assert (run(call)[0] == 256).all()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("bound", [0.0, 0.4, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_layers_are_the_equations(dtype, bound, stacked):
    quantized = (0, 1) if stacked else (1,)
    call = operands(sizes(quantized=quantized), dtype=dtype)
    call["clamp_bound"] = bound
    got = run(case.stacked(call) if stacked else call)
    require_close(got, reference(call), TOLERANCES[dtype])
    if bound == 0.4:
        assert np.abs(got[0] - run(call | dict(clamp_bound=0.0))[0]).max() > 1e-3


def test_a_bound_leaves_layers_that_are_not_quantized_alone():
    call = operands(sizes())
    require_close(run(call | dict(clamp_bound=0.1)), run(call), 0)


def test_many_tokens_of_a_quantized_layer_are_not_rounded():
    """More than 96 rows would take the MLP's prefill, which rounds to fp8."""
    call = operands(sizes(L=1, B=20, S=5, G=1, n=1, quantized=(0,)))
    require_close(run(call), reference(call), 2e-5)


def test_a_scale_may_have_one_row():
    call = operands(sizes(quantized=(1,)))
    rows = {
        k: [None if s is None else s[:1] for s in call[k]]
        for k in ("W_gate_scales", "W_up_scales", "W_down_scales")
    }
    require_close(run(call | rows), run(call), 0)


@pytest.mark.parametrize("groups", [1, 2])
def test_each_layer_is_one_block_and_one_mlp(groups):
    arrays, rest = case.split(operands(sizes(L=3, G=groups)))

    def step(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest)

    found = neuronjax.trace(step, arrays)
    assert set(found.names) == {"AttentionBlockTkg", "MLP"}
    assert found.count("AttentionBlockTkg") == found.count("MLP") == 3


@pytest.mark.parametrize("stacked", [False, True])
def test_sbuf_path_with_one_core_is_the_same_program(stacked):
    call = operands(sizes())
    arrays, rest = case.split(case.stacked(call) if stacked else call)

    def text(in_sbuf):
        def step(arrays):
            options = dict(sbuf_residual_and_cc=in_sbuf)
            return neuronjax.transformer_tkg(**arrays, **rest, **options)

        return jax.jit(step).lower(arrays).as_text()

    assert text(True) == text(False)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_bfloat16_is_as_close_as_the_plain_computation(groups, stacked):
    call = operands(sizes(G=groups), dtype="bfloat16")
    given, wanted = case.stacked(call) if stacked else call, reference(call)
    with neuronjax.plain():
        plain = run(given)
    assert error(run(given), wanted) <= 2 * error(plain, wanted)


@pytest.mark.parametrize("groups", [1, 2])
def test_traced_positions_with_a_gap_write_nothing(groups):
    """Known ones are refused; those of the other sequence are written."""
    call = operands(sizes(G=groups))
    call["position_ids"] = jnp.array([[2, 4], [3, 4]], jnp.int32)
    starts = jnp.array([[-1], [3]], jnp.int32)
    require_close(run(call), reference(call | dict(position_ids=starts)), 2e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_query_that_attends_none_gets_zeros(groups):
    call = operands(sizes(L=1, G=groups))
    call["mask_cache"] = call["mask_cache"].at[:, 0].set(0)
    got, without = run(call), run(call | dict(W_outs=[0 * call["W_outs"][0]]))
    np.testing.assert_array_equal(got[0][0], without[0][0])
    assert np.abs(got[0][1] - without[0][1]).max() > 1e-3
