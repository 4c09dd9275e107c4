"""`moe_cte` against the float64 equations: every mode, padding and size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import neuronjax
from tests.moe_case import CASES, Case, compare, program
from tests.moe_equations import Moe
from tests.moe_mx import Block

STORED = (("checkpoint_activation", True),)
IMPLEMENTATIONS = ("shard_on_block", "shard_on_i", "shard_on_i_hybrid")


def _operands(case, dtype="float32", seed=0):
    index = case.index(seed)
    return case.floats(index, dtype, seed), case.routed(index)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_follow_the_equations(name):
    """The output, both checkpoints, and what the cotangents of all three give."""
    case = CASES[name]
    floats, rest = _operands(case)
    cotangents = case.filled(rest, case.cotangents())
    outs, grads = program(case, STORED)(floats, rest, cotangents)
    assert [x.dtype for x in outs] == ["float32"] * 3
    moe = Moe(floats | rest | case.settings)
    compare(outs, moe.outputs(), 1e-5)
    d_out, d_gate_up, d_down = cotangents
    compare(grads, moe.gradients(d_out, None, None, d_gate_up, d_down), 1e-5)


def test_float64_stays_float64():
    case = CASES["clamps"]
    with jax.enable_x64(True):
        floats, rest = _operands(case, "float64")
        got = jax.jit(case.stored)(floats, rest)
    assert {x.dtype for x in got} == {jnp.dtype("float64")}
    compare(got, Moe(floats | rest | case.settings).outputs(), 1e-12)


@pytest.mark.parametrize("name", ["clamps", "pre_scale", "no_scale"])
def test_bfloat16_errs_at_most_twice_as_much_as_plain(name):
    """Outputs, checkpoints and gradients; the plain formula is bfloat16 throughout."""
    case = CASES[name]
    floats, rest = _operands(case, "bfloat16")
    cotangents = case.filled(rest, case.cotangents("bfloat16"))
    got = program(case, STORED)(floats, rest, cotangents)
    plain = program(case, "formula")(floats, rest, cotangents)
    moe = Moe(floats | rest | case.settings)
    d_out, d_gate_up, d_down = cotangents
    grads = moe.gradients(d_out, None, None, d_gate_up, d_down)
    wanted = moe.outputs(), {n: grads[n] for n in sorted(grads)}
    for (path, a), b, c in zip(
        jax.tree.leaves_with_path(got), *map(jax.tree.leaves, (plain, wanted)),
        strict=True,
    ):  # fmt: skip
        assert a.dtype == jnp.bfloat16
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        errors = [np.sqrt(np.mean((x - c) ** 2)) for x in (a, b)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (path, errors)


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e4m3fn"])
@pytest.mark.parametrize("shared", [False, True])
def test_fp8_weights_and_their_scales(name, shared):
    """One row of scales for each expert, or one for all; gate first."""
    case = Case(bias=True, activation="Swish", clamps=CASES["clamps"].clamps)
    floats, rest = _operands(case)
    rng = np.random.default_rng(3)
    kind, lead = getattr(ml_dtypes, name), 1 if shared else case.experts
    for key in ("gate_up_proj_weight", "down_proj_weight"):
        floats[key] = jnp.asarray(np.asarray(floats[key]).astype(kind))
    widths = dict(gate_up_proj_scale=2 * case.inner, down_proj_scale=case.width)
    scales = {
        key: jnp.asarray(rng.uniform(0.5, 2, (lead, 1, n)), jnp.float32)
        for key, n in widths.items()
    }
    floats = {n: x for n, x in floats.items() if x.dtype == jnp.float32} | {
        n: x for n, x in floats.items() if x.dtype != jnp.float32
    }
    got = jax.jit(case.stored)(floats, rest | dict(quantization_config=scales))
    compare(got, Moe(floats | rest | scales | case.settings).outputs(), 1e-5)


@pytest.mark.parametrize(
    ("name", "width", "inner", "implementation"),
    [
        ("float4_e2m1fn", 512, 24, "shard_on_block_mx"),
        ("float8_e4m3fn", 512, 90, "shard_on_i_mx"),
        ("float8_e5m2", 1024, 520, "shard_on_i_mx_hybrid"),
    ],
)
def test_block_scaled_weights(name, width, inner, implementation):
    """Hidden states and intermediates are rounded as the matrix product rounds them."""
    block = Block(name, width, inner, implementation)
    got, wanted = block.run(), block.reference().outputs()[0]
    # A value at a boundary may round the other way: one step of one of many.
    assert np.abs(got - wanted).max() <= 2e-3 * np.abs(wanted).max()
    assert np.median(np.abs(got - wanted)) <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_computes_the_same(implementation):
    case = Case(bias=True, implementation=implementation)
    floats, rest = _operands(case)
    conditions = np.ones(case.count + 1, np.int32)
    if implementation == "shard_on_i_hybrid":
        rest["conditions"] = conditions
    got = jax.jit(case.call)(floats, rest)
    compare(got, Moe(floats | rest | case.settings).outputs()[0], 1e-5)


def test_dropping_has_one_block_for_each_expert_and_always_its_checkpoints():
    case = Case(bias=True, implementation="shard_on_i_dropping", blocks=3)
    index = case.index()
    ids = [np.flatnonzero((index == e).any(1))[:4] for e in range(3)]
    ids = [np.pad(x, (0, 4 - len(x)), constant_values=11) for x in ids]
    rest = dict(
        token_position_to_id=np.concatenate(ids).astype(np.int32),
        block_to_expert=np.arange(3, dtype=np.int32),
    )
    floats = case.floats(index)
    got = jax.jit(case.call)(floats, rest)
    compare(got, Moe(floats | rest | case.settings).outputs(), 1e-5)


@pytest.mark.parametrize(("first", "static"), [(0, None), (3, None), (8, 0), (1, 3)])
def test_blocks_from_the_first_0_of_the_conditions_on_are_left_out(first, static):
    """Whatever the conditions after it are, and but for the static blocks."""
    case = Case(
        bias=True, implementation="shard_on_i_hybrid", blocks=8, skip_token=True
    )
    floats, rest = _operands(case)
    most = Moe(floats | rest | case.settings).visited().sum()
    rest["conditions"] = (np.arange(9) != first).astype(np.int32)
    options = dict(num_static_block=static)
    moe = Moe(floats | rest | case.settings | options)
    assert moe.visited().sum() == min(max(first, static or 0), most)
    run = functools.partial(case.stored, **options)
    compare(jax.jit(run)(floats, rest), moe.outputs(), 1e-5)


def test_a_caller_that_brings_buffers_gets_the_checkpoints():
    case = CASES["clamps"]
    floats, rest = _operands(case)
    wanted = case.stored(floats, rest)
    out, gate_up, down = map(jnp.zeros_like, wanted)
    got = case.call(floats, rest, gate_up_activations_T=gate_up, down_activations=down)
    compare(got, wanted, 1e-6)
    got = case.call(floats, rest, gate_up_activations_T=gate_up)
    compare(got, wanted[:2], 1e-6)


def test_affinities_may_multiply_the_intermediate():
    """Without biases the same values; the down products then carry the affinity."""
    case, on = Case(), dict(expert_affinity_multiply_on_I=True)
    floats, rest = _operands(case)
    wanted = case.stored(floats, rest)
    compare(case.call(floats, rest, **on), wanted[0], 1e-5)
    compare(case.stored(floats, rest, **on), wanted[:2], 1e-5)


def test_the_experimental_entry_computes_the_same():
    """`blockwise_mm_baseline_shard_hidden`, with and without buffers."""
    case = Case()
    floats, rest = _operands(case)
    rest["block_to_expert"] = rest["block_to_expert"][:, None]
    wanted = Moe(floats | rest | case.settings).outputs()
    call = dict(**floats, **rest, block_size=4, skip_dma=neuronjax.SkipMode())
    entry = neuronjax.blockwise_mm_baseline_shard_hidden
    compare(entry(**call), wanted[0], 1e-5)
    _, gate_up, down = (jnp.zeros(x.shape, "float32") for x in wanted)
    got = entry(**call, gate_up_activations_T=gate_up, down_activations=down)
    compare(got, wanted, 1e-5)


@pytest.mark.parametrize("skip_token", [False, True])
def test_no_tokens(skip_token):
    """R-37: results are empty or zero, and so are the gradients."""
    case = Case(tokens=0, blocks=2, bias=True, skip_token=skip_token)
    floats, rest = _operands(case)
    outs, grads = program(case, STORED)(floats, rest, case.cotangents())
    assert outs[0].shape == (case.rows, 8)
    assert not any(np.asarray(x).any() for x in (*outs, *grads.values()))


def test_empty_experts_and_groups():
    """R-37: products with `arange(12)` of rows of ones, and their weight's gradient.

    Swish of a gate of 64 is 64 in float32; times an up of 1/64 it is 1.
    """
    index = np.array([[0], [0], [0], [2]])
    bias = jnp.broadcast_to(jnp.array([[64.0], [1 / 64]], "float32"), (3, 2, 2))

    @jax.jit
    def run(down):
        blocks = neuronjax.route_to_blocks(jnp.asarray(index, "int32"), 3, 2)
        return neuronjax.moe_cte(
            jnp.ones((5, 2), "float32"),
            jnp.ones((15, 1), "float32"),
            jnp.zeros((3, 2, 2, 2), "float32"),
            down,
            blocks.token_position_to_id,
            blocks.block_to_expert,
            2,
            neuronjax.MoECTESpec("shard_on_i"),
            gate_and_up_proj_bias=bias,
            activation_function="Swish",
        )[:4]

    out, pull = jax.vjp(run, jnp.arange(12, dtype="float32").reshape(3, 2, 2))
    assert out.tolist() == [[2, 4], [2, 4], [2, 4], [18, 20]]
    (grad,) = pull(jnp.ones_like(out))
    assert grad.tolist() == [[[n] * 2] * 2 for n in (3, 0, 1)]


@pytest.mark.parametrize("skip_token", [False, True])
def test_padding_takes_no_capacity(skip_token):
    """R-38: two padding tokens stand before two real ones that want the same expert."""
    mask = jnp.array([False, False, True, True])
    index = jnp.zeros((4, 1), "int32")
    case = Case(
        tokens=4, experts=2, k=1, block=2, blocks=2, skip_token=skip_token,
        implementation="shard_on_i_dropping",
    )  # fmt: skip
    floats = case.floats(np.zeros((4, 1), int))
    wanted = case.routed(np.array([[2], [2], [0], [0]]))
    wanted = Moe(floats | wanted | case.settings).outputs()[0]
    assert wanted[2:4].all() and not wanted[:2].any()
    padded = jnp.where(mask[:, None], index, 2)

    @jax.jit
    def run(index, mask):
        ids, experts, *_ = neuronjax.route_to_blocks(
            index, 2, 2, capacity=2, skip_token=skip_token, token_mask=mask
        )
        rest = dict(token_position_to_id=ids, block_to_expert=experts)
        return case.call(floats, rest)[0]

    compare(run(index, mask), wanted, 1e-5)
    compare(run(padded, jnp.ones(4, bool)), wanted, 1e-5)


def test_limits_that_the_dtype_does_not_hold_still_stop_the_gradient():
    """In bfloat16 0.3 is 0.30078 and 0.7 is 0.69922: stored values equal those."""
    case = Case(clamps=(0.7, -0.3, 0.3, -0.7))
    floats, rest = _operands(case, "bfloat16")
    big = {n: x * 9 if n == "gate_up_proj_weight" else x for n, x in floats.items()}
    cotangents = case.cotangents("bfloat16")
    d_out = cotangents[0]
    outs, grads = program(case, STORED)(
        big, rest, (d_out, *map(jnp.zeros_like, cotangents[1:]))
    )
    stored = np.asarray(outs[1], np.float64)
    ends = [[stored[:, i].max(), stored[:, i].min()] for i in (0, 1)]
    assert ends == [[0.69921875, -0.30078125], [0.30078125, -0.69921875]]
    wanted = Moe(big | rest | case.settings).gradients(d_out, *outs[1:])
    compare(grads, {n: wanted[n] for n in grads}, 2e-2)


def test_operands_of_different_dtypes():
    """A router's float32 affinities beside bfloat16 activations: each keeps its own."""
    case = Case(bias=True)
    floats, rest = _operands(case)
    narrow = "hidden_states", "gate_up_proj_weight", "down_proj_weight"
    floats |= {n: floats[n].astype("bfloat16") for n in narrow}
    cotangents = case.filled(rest, case.cotangents())
    outs, grads = program(case, STORED)(floats, rest, cotangents)
    assert [x.dtype for x in outs] == ["bfloat16"] * 3
    assert {n: x.dtype for n, x in grads.items()} == {
        n: x.dtype for n, x in floats.items()
    }
    moe = Moe(floats | rest | case.settings)
    compare(outs, moe.outputs(), 2e-2)
    d_out, d_gate_up, d_down = cotangents
    wanted = moe.gradients(d_out, None, None, d_gate_up, d_down)
    compare(grads, {n: wanted[n] for n in sorted(wanted)}, 2e-2)


@pytest.mark.parametrize("name", ["plain", "clamps", "gelu", "gelu_tanh"])
def test_gates_far_from_zero_have_finite_gradients(name):
    """Both ends of every activation, past what an exponential holds."""
    case = dataclasses.replace(CASES[name], bias=True)
    floats, rest = _operands(case)
    ends = np.resize([3e4, -3e4, 200, -200, 0, 90], (case.experts, 2, case.inner))
    ends[:, 1] = 1
    floats["gate_and_up_proj_bias"] = jnp.asarray(ends, "float32")
    floats["gate_up_proj_weight"] *= 0.5
    d_out = case.cotangents()[0]
    (out, *_), grads = program(case, STORED)(
        floats, rest, (d_out, *map(jnp.zeros_like, case.cotangents()[1:]))
    )
    moe = Moe(floats | rest | case.settings)
    with np.errstate(over="ignore"):
        compare(out, moe.outputs()[0], 1e-5)
        compare(grads, moe.gradients(d_out), 1e-5)


def test_a_narrower_compute_dtype_rounds_and_the_result_keeps_its_own():
    case = Case(bias=True)
    floats, rest = _operands(case)
    wanted = Moe(floats | rest | case.settings).outputs()[0]
    wide, got = (
        jax.jit(functools.partial(case.call, compute_dtype=kind))(floats, rest)
        for kind in ("float32", "bfloat16")
    )
    assert got.dtype == jnp.float32
    narrow = {n: x.astype("bfloat16") for n, x in floats.items()}
    plain = jax.jit(case.formula)(narrow, rest)[0]
    errors = [np.abs(np.float64(x) - wanted).max() for x in (got, plain)]
    assert 0 < errors[0] <= 2 * errors[1]
    compare(wide, wanted, 1e-5)


def test_an_implementation_may_be_given_by_name():
    case = Case()
    floats, rest = _operands(case)
    call = dict(**floats, **rest, block_size=4)
    kinds = neuronjax.MoECTEImplementation
    got = [
        neuronjax.moe_cte(**call, spec=neuronjax.MoECTESpec(kind))
        for kind in ("shard_on_i", kinds.shard_on_i)
    ]
    got.append(neuronjax.moe_cte(**call, spec="shard_on_block"))
    for other in got:
        compare(other, got[0], 1e-6)
