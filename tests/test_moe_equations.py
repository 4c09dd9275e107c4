"""The float64 reference of the experts, against stored cases, formulas, differences."""

import numpy as np
import pytest

from tests.adapters import within
from tests.moe_case import CASES, Case, compare, exact, stored_cases
from tests.moe_equations import FLOATS, Moe, most_blocks, slots_of

FORWARD = {name: rest for name, *rest in stored_cases("moe")}
BACKWARD = {name: rest for name, *rest in stored_cases("moe_backward")}


def _call(inputs, options):
    """A stored case as the reference reads it; `conditions` among its inputs."""
    skip = (options.get("skip_dma") or {}).get("skip_token", False)
    limits = options.get("clamp_limits") or {}
    turned = {
        f"{ours}_clamp_{side}_limit": limits.get(f"{theirs}_clamp_{side}_limit")
        for ours, theirs in (("gate", "non_linear"), ("up", "linear"))
        for side in ("upper", "lower")
    }
    kind = options.get("activation_function") or options.get("activation_type")
    call = dict(options, **inputs, skip_token=skip, activation_function=kind or "SiLU")
    return call | (turned if limits else {})


@pytest.mark.parametrize("name", FORWARD)
def test_the_forward_reference_equals_the_stored_outputs(name):
    options, inputs, outputs = FORWARD[name]
    call = _call(inputs, options)
    moe = Moe(call)
    out, gate_up, down = moe.outputs()
    wanted = outputs.get("output_no_bf16_rounding", outputs["output"])
    wanted = wanted[:, 0] if wanted.ndim == 3 else wanted
    pairs = [(out[: moe.tokens], wanted[: moe.tokens])]
    if "gate_up_activations_T" in outputs:
        pairs.append((gate_up, outputs["gate_up_activations_T"]))
        pairs.append((down, outputs["down_activations"]))
    case = dict(tolerance=dict(rtol=1e-4, atol=1e-4))
    for got, expected in pairs:
        within(name, got, expected, case)


@pytest.mark.parametrize("name", BACKWARD)
def test_the_backward_reference_equals_the_stored_gradients(name):
    options, inputs, outputs = BACKWARD[name]
    moe = Moe(_call(inputs, options))
    case = dict(tolerance=dict(rtol=1e-4, atol=1e-4))
    out, gate_up, down = moe.outputs()
    within(name, out[: moe.tokens], outputs["forward_output"][: moe.tokens], case)
    stored = [inputs["gate_up_proj_act_checkpoint_T"]]
    stored += [inputs["down_proj_act_checkpoint"]]
    live = moe.visited()
    for got, wanted in zip((gate_up, down), stored, strict=True):
        within(name, got[live], wanted[live], case)
    grads = moe.gradients(inputs["output_hidden_states_grad"], *stored)
    for key, wanted in outputs.items():
        if key != "forward_output":
            within(key, grads[key.removesuffix("_grad")], wanted, case)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_the_formula_and_its_derivative(name):
    case = CASES[name]
    index = case.index()
    floats, rest = case.floats(index, "float32"), case.routed(index)
    cotangents = case.filled(rest, case.cotangents())
    moe = Moe(floats | rest | case.settings)
    outs, grads = exact(case, floats, rest, cotangents)
    d_out, d_gate_up, d_down = (np.asarray(c, np.float64) for c in cotangents)
    compare(moe.outputs(), outs, 1e-12)
    got = moe.gradients(d_out, None, None, d_gate_up, d_down)
    compare(got, {n: grads[n] for n in got}, 1e-12)
    assert set(got) == set(floats)


def test_gradients_of_scales_are_those_of_differences():
    case = Case(bias=True, activation="Swish", clamps=(None, None, 1.0, None))
    index = case.index()
    wide = {n: np.asarray(x, np.float64) for n, x in case.floats(index).items()}
    rest = case.routed(index) | case.settings
    rng = np.random.default_rng(2)
    shapes = dict(gate_up_proj_scale=(1, 1, 12), down_proj_scale=(3, 1, 8))
    wide |= {n: rng.uniform(0.5, 2, s) for n, s in shapes.items()}
    d_out = rng.normal(size=(12, 8))
    got = Moe(wide | rest).gradients(d_out)
    for name in (*FLOATS, *shapes):
        step = 1e-6 * rng.normal(size=wide[name].shape)
        moved = (wide | {name: wide[name] + s * step} for s in (1, -1))
        up, down = (np.sum(d_out * Moe(x | rest).outputs()[0]) for x in moved)
        np.testing.assert_allclose((up - down) / 2, np.sum(got[name] * step), rtol=1e-6)


def test_blocks_hold_every_pair_once_and_padding_at_their_ends():
    index = np.array([[2, 0], [2, 3], [2, 0], [3, 3]])  # 3 of 3 is padding
    ids, experts = slots_of(index, 3, 2, -1, 5)
    assert ids.reshape(5, 2).tolist() == [[0, 2], [0, 1], [2, -1], [-1, -1], [-1, -1]]
    assert experts.tolist() == [0, 2, 2, 2, 2]
    for pairs, sizes in ((8, (3, 2)), (1, (4, 4)), (24, (4, 4))):
        experts, block = sizes
        rng = np.random.default_rng(pairs)
        for _ in range(20):
            counts = np.bincount(rng.integers(0, experts, pairs))
            assert np.sum(-(-counts // block)) <= most_blocks(pairs, experts, block)
