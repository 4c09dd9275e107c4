"""Gradients of `moe_cte` and `blockwise_mm_bwd` against the float64 equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from tests import hlo
from tests.moe_case import CASES, CLAMPS, Case, compare, exact, program
from tests.moe_equations import FLOATS, Moe
from tests.moe_mx import Block

STORED = (("checkpoint_activation", True),)
RECOMPUTED = (("checkpoint", "recompute"),)
BACKWARD = dict(
    plain=Case(),
    clamps=Case(bias=True, clamps=tuple(CLAMPS.values()), activation="Swish"),
    one_sided=Case(clamps=(None, -0.375, 0.5, None), skip_token=True),
    one_expert=Case(experts=1, k=1, skip_token=True, bias=True),
    few_experts=Case(experts=2, k=4, block=3, width=7, inner=5, blocks=17),
    overwrite=Case(k=1, accumulate=False),
)


def _operands(case, dtype="float32", seed=0):
    index = case.index(seed)
    floats, rest = case.floats(index, dtype, seed), case.routed(index)
    return floats, rest, case.filled(rest, case.cotangents(dtype))


@pytest.mark.parametrize("name", ["clamps", "pre_scale", "overwrite"])
def test_checkpoints_that_are_computed_again_give_the_same_gradients(name):
    case = CASES[name]
    floats, rest, (d_out, *_) = _operands(case)
    outs, grads = program(case, RECOMPUTED)(floats, rest, (d_out,))
    moe = Moe(floats | rest | case.settings)
    compare(outs[0], moe.outputs()[0], 1e-5)
    compare(grads, moe.gradients(d_out), 1e-5)


@pytest.mark.parametrize("checkpoint", ["store", "recompute"])
def test_the_derivative_is_that_of_differences(checkpoint):
    case = Case(tokens=3, experts=2, block=2, width=3, inner=2, bias=True)
    with jax.enable_x64(True):
        floats, rest, _ = _operands(case, "float64")
        run = jax.jit(lambda f: case.call(f, rest, checkpoint=checkpoint))
        check_grads(run, (floats,), 1, modes=["fwd", "rev"])


@pytest.mark.parametrize(
    ("name", "options"),
    [("clamps", STORED), ("pre_scale", RECOMPUTED), ("no_scale", STORED)],
)
def test_second_derivatives(name, options):
    """Forward over reverse: wrong unless the cotangents of stored values count."""
    case = dataclasses.replace(CASES[name], tokens=3, experts=2, width=3, inner=2)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        floats, rest, cotangents = _operands(case, "float64")
        rng = np.random.default_rng(8)
        steps = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), floats)

        def pushed(run):
            def loss(floats):
                outs = run(floats, rest)
                outs = outs if isinstance(outs, tuple) else (outs,)
                pairs = zip(outs, cotangents, strict=False)
                return sum(jnp.sum(jnp.sin(o) * c) for o, c in pairs)

            return jax.jit(lambda x, dx: jax.jvp(jax.grad(loss), (x,), (dx,)))(
                floats, steps
            )

        def formula(floats, rest):
            outs = case.formula(floats, rest)
            return outs if options is STORED else outs[0]

        got = pushed(functools.partial(case.call, **dict(options)))
        compare(got, pushed(formula), 1e-10)


def _backward(case, floats, rest, stored, d_out, **options):
    """`blockwise_mm_bwd` by argument name; `stored` gate and up, then down."""
    limits = neuronjax.ClampLimits(
        linear_clamp_upper_limit=case.clamps[2],
        linear_clamp_lower_limit=case.clamps[3],
        non_linear_clamp_upper_limit=case.clamps[0],
        non_linear_clamp_lower_limit=case.clamps[1],
    )
    operands = {n: x for n, x in floats.items() if "bias" not in n}
    got = neuronjax.blockwise_mm_bwd(
        **operands,
        **rest,
        gate_up_proj_act_checkpoint_T=stored[0],
        down_proj_act_checkpoint=stored[1],
        output_hidden_states_grad=d_out,
        block_size=case.block,
        skip_dma=neuronjax.SkipMode(skip_token=case.skip_token),
        is_tensor_update_accumulating=case.accumulate,
        clamp_limits=limits,
        bias=case.bias,
        activation_type=case.activation,
        **options,
    )
    return dict(zip(FLOATS, got, strict=False))


def _random(case, dtype="float32"):
    """Operands, and checkpoints of which some lie on the limits and past them."""
    floats, rest, (d_out, gate_up, down) = _operands(case, dtype)
    for (i, end), limit in zip(((0, 1), (0, -1), (1, 1), (1, -1)), case.clamps,
                               strict=True):  # fmt: skip
        if limit is not None:
            past = gate_up[:, i] * end > limit * end
            gate_up = gate_up.at[:, i].set(jnp.where(past, limit, gate_up[:, i]))
    return floats, rest, (gate_up, down), d_out


@pytest.mark.parametrize("name", BACKWARD)
def test_the_backward_follows_the_equations_from_any_checkpoints(name):
    """They are read and not made again: these belong to no forward."""
    case = BACKWARD[name]
    floats, rest, stored, d_out = _random(case)
    got = _backward(case, floats, rest, stored, d_out)
    assert len(got) == (6 if case.bias else 4)
    wanted = Moe(floats | rest | case.settings).gradients(d_out, *stored)
    compare(got, wanted, 1e-5)


@pytest.mark.parametrize("block_to_expert", ["[N]", "[N, 1]"])
def test_the_backward_keeps_dtypes_and_runs_under_jit(block_to_expert):
    case = BACKWARD["clamps"]
    floats, rest, stored, d_out = _random(case, "bfloat16")
    if block_to_expert == "[N, 1]":
        rest["block_to_expert"] = rest["block_to_expert"][:, None]
    run = jax.jit(lambda *a: _backward(case, *a))
    got = run(floats, rest, stored, d_out)
    assert {x.dtype for x in got.values()} == {jnp.dtype("bfloat16")}
    wanted = Moe(floats | rest | case.settings).gradients(d_out, *stored)
    compare(got, wanted, 2e-2)


@pytest.mark.parametrize("which", ["gate", "up", "down"])
def test_a_poisoned_checkpoint_spoils_what_the_equations_make_of_it(which):
    case = Case(bias=True)
    floats, rest, (gate_up, down), d_out = _random(case)
    if which == "down":
        down = down * jnp.nan
    else:
        gate_up = gate_up.at[:, int(which == "up")].set(jnp.nan)
    got = _backward(case, floats, rest, (gate_up, down), d_out)
    spoiled = {n for n, x in got.items() if np.isnan(np.asarray(x)).any()}
    through = {"hidden_states", "gate_up_proj_weight", "gate_and_up_proj_bias"}
    wanted = dict(
        down={"expert_affinities_masked"},
        gate=through | {"down_proj_weight"},
        up=through | {"down_proj_weight"},  # d_gate = d_m * up * act'(gate)
    )
    assert spoiled == wanted[which]
    if which == "up":  # d_up = d_m * act(gate) does not read up
        assert np.isfinite(np.asarray(got["gate_up_proj_weight"])[:, :, 1]).all()


@pytest.mark.parametrize("name", ["clamps", "pre_scale", "no_scale"])
@pytest.mark.parametrize("chosen", [0, 1])
def test_experts_without_tokens_get_exactly_nothing(name, chosen):
    """R-37: bit by bit, with and without blocks of padding for them."""
    case = CASES[name]
    index = np.full((case.tokens, 1), chosen)
    floats, rest = case.floats(index), case.routed(index)
    assert (rest["token_position_to_id"][-2 * case.block :] == case.padding).all()
    rest["block_to_expert"][-1] = 2
    cotangents = case.filled(rest, case.cotangents())
    _, got = program(case, STORED)(floats, rest, cotangents)
    for key in FLOATS[2:]:
        used = np.asarray(got[key]).reshape(3, -1).any(1)
        assert used.tolist() == [e == chosen for e in range(3)], key
    affinity = np.asarray(got["expert_affinities_masked"]).reshape(-1, 3)
    assert not np.delete(affinity, chosen, 1).any()
    assert not affinity[case.tokens :].any()


@pytest.mark.parametrize("gates", [(0.4, 0.3), (0.0, 0.0), (-0.3, 0.0)])
def test_the_gradient_of_a_gate_is_what_its_expert_returns(gates):
    """R-39: 2 and 5, whatever the gates are."""
    y = jnp.array([[2.0], [5.0]], "float32")

    def run(affinities):
        return neuronjax.moe_cte(
            jnp.ones((1, 1), "float32"),
            affinities,
            jnp.zeros((2, 1, 2, 1), "float32"),
            jnp.zeros((2, 1, 1), "float32"),
            jnp.array([0, 0], "int32"),
            jnp.array([0, 1], "int32"),
            1,
            neuronjax.MoECTESpec("shard_on_i"),
            down_proj_bias=y,
            skip_dma=neuronjax.SkipMode(skip_token=True),
        )

    out, pull = jax.vjp(run, jnp.array(gates, "float32")[:, None])
    np.testing.assert_allclose(out, [[2 * gates[0] + 5 * gates[1]]], rtol=1e-6)
    assert pull(jnp.ones_like(out))[0].tolist() == [[2.0], [5.0]]


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE"])
def test_a_token_twice_in_one_block_counts_twice(scaling):
    """And the gradient of its affinity is the sum over both."""
    case = Case(tokens=3, experts=2, block=4, blocks=2, scaling=scaling, bias=True)
    rest = dict(
        token_position_to_id=np.array([0, 0, 2, 3, 1, 1, 0, 1], np.int32),
        block_to_expert=np.array([1, 1], np.int32),
    )
    floats = case.floats(np.array([[1], [1], [1]]))
    cotangents = case.filled(rest, case.cotangents())
    got = program(case, STORED)(floats, rest, cotangents)
    compare(got, exact(case, floats, rest, cotangents), 1e-5)


def test_quantized_weights_and_their_scales_are_constants():
    """R-45: a gradient is asked of all, and of these it is zero."""
    case = Case(bias=True)
    floats, rest, cotangents = _operands(case)
    scales = dict(
        gate_up_proj_scale=jnp.full((3, 1, 12), 0.5),
        down_proj_scale=jnp.ones((1, 1, 8)),
    )
    scales = {n: x.astype("float32") for n, x in scales.items()}
    quantized = {n: x.astype("float8_e4m3") for n, x in floats.items() if "weight" in n}
    floats |= quantized

    @jax.jit
    def run(floats, scales):
        return jax.vjp(
            lambda f, s: case.stored(f, rest | dict(quantization_config=s)),
            floats,
            scales,
        )[1](cotangents)

    got, of_scales = run(floats, scales)
    moe = Moe(floats | rest | scales | case.settings)
    wanted = moe.gradients(cotangents[0], None, None, *cotangents[1:])
    moved = [n for n in floats if n not in quantized]
    compare({n: got[n] for n in moved}, {n: wanted[n] for n in moved}, 1e-5)
    for x in (*(got[n] for n in quantized), *of_scales.values()):
        assert not np.asarray(x, np.float32).any()


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE"])
def test_gradients_go_straight_through_block_scaled_rounding(scaling):
    block = Block("float4_e2m1fn", 512, 24, "shard_on_i_mx", scaling)
    moved = {n: x for n, x in block.given.items() if "weight" not in n}
    rest = {n: x for n, x in block.given.items() if "weight" in n}
    d_out = block.case.cotangents()[0]
    got = jax.jit(
        lambda x: jax.vjp(lambda x: block.call(rest | x), x)[1](d_out)[0]
    )(moved)  # fmt: skip
    wanted = block.reference().gradients(d_out)
    wanted = {n: wanted[n] for n in moved}
    wanted["gate_and_up_proj_bias"] = block.tiled(wanted["gate_and_up_proj_bias"])
    for name, x in wanted.items():
        # Values at a boundary may round the other way and values near it saturate.
        error = np.abs(np.asarray(got[name], np.float64) - x)
        assert error.max() <= 5e-3 * np.abs(x).max(), name
        assert np.quantile(error, 0.9) <= 1e-4 * np.abs(x).max(), name


def _products(fun, *args):
    """How many matrix products the program of `fun` holds; one in a loop is one."""
    return jax.jit(fun).lower(*args).as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize("name", ["plain", "clamps"])
def test_the_backward_holds_six_products_and_repeats_none_of_the_forward(name):
    """Two for each weight; with gate and up as one fewer."""
    case = BACKWARD[name]
    floats, rest, stored, d_out = _random(case)
    backward = _products(lambda *a: _backward(case, *a), floats, rest, stored, d_out)
    assert backward <= 6
    forward = _products(case.call, floats, rest)
    assert 1 <= forward <= 3

    def gradient(floats, rest, **options):
        run = lambda f: case.call(f, rest, **options).sum()  # noqa: E731
        return jax.value_and_grad(run)(floats)

    assert _products(gradient, floats, rest) <= forward + backward
    again = _products(
        lambda *a: gradient(*a, checkpoint="recompute"), floats, rest
    )  # fmt: skip
    assert forward + backward < again <= 2 * forward + backward


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [{}, dict(checkpoint="recompute")])
def test_temporaries_hold_no_weight_of_each_block_and_no_expert_of_each_token(
    gradient, options
):
    """Not `[N, H, I]` and not `[T, E, I]`: both are larger than all operands here."""
    case = Case(tokens=256, experts=8, k=2, block=4, width=32, inner=24)
    floats, rest, _ = _operands(case)
    run = lambda f: jnp.sin(case.call(f, rest, **options)).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(run) if gradient else run).lower(floats).compile()
    operands = max(x.size for x in (*floats.values(), *rest.values()))
    least = min(case.count * 32 * 24, 256 * 8 * 24)
    # The stored gate and up are [N, 2, I, B], one row for each slot.
    slots = case.count * case.block * 2 * 32
    assert max(operands, slots) < least
    assert not hlo.Program(compiled.as_text()).large(least)
    everything = sum(x.nbytes for x in floats.values())
    stored = 0 if options else 4 * case.count * case.block * (2 * 24 + 32)
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used <= 1.2 * (everything + stored)


def test_the_search_for_large_types_finds_a_gathered_weight():
    def plain(x, w, e):
        return jnp.einsum("nbh,nhi->nbi", x, w[e])

    shapes = (64, 4, 32), (8, 32, 24), (64,)
    types = "float32", "float32", "int32"
    given = map(jax.ShapeDtypeStruct, shapes, map(jnp.dtype, types))
    assert hlo.program(plain, *given).large(64 * 32 * 24)
