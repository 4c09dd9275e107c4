"""The mixture-of-experts block of a decode step, against its equations in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import moe_block_tkg
from tests.moe_decode_case import LIMITS, Case, Decode, block_scaled, close, plain
from tests.moe_equations import act

WIDTH, D_FF, EXPERTS, SHARED = 8, 6, 6, 5


def drawn(shapes, seed=0) -> Case:
    rng = np.random.default_rng(seed)
    return {
        key: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
        for key, shape in shapes.items()
    }


def block(batch=2, seq=3, local=EXPERTS, width=WIDTH, **options) -> Case:
    """Operands of a block with biases and clamps."""
    shapes = dict(
        inp=(batch, seq, width),
        gamma=(1, width),
        router_weights=(width, EXPERTS),
        router_bias=(1, EXPERTS),
        expert_gate_up_weights=(local, width, 2, D_FF),
        expert_down_weights=(local, D_FF, width),
        expert_gate_up_bias=(local, 2, D_FF),
        expert_down_bias=(local, width),
    )
    settings: Case = dict(LIMITS, top_k=2)
    settings["expert_affinities_scaling_mode"] = "POST_SCALE"
    return drawn(shapes) | settings | options


def shared(width=WIDTH) -> Case:
    """The operands of a shared expert."""
    shapes = dict(
        shared_expert_gate_w=(width, SHARED),
        shared_expert_up_w=(width, SHARED),
        shared_expert_down_w=(SHARED, width),
        shared_expert_gate_bias=(1, SHARED),
        shared_expert_up_bias=(1, SHARED),
        shared_expert_down_bias=(1, width),
    )
    return drawn(shapes, seed=7)


def wide(given, key):
    return np.asarray(given[key], np.float64)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def routed(given, x):
    """Logits, the chosen experts, and the affinities of all experts."""
    logits = x @ wide(given, "router_weights") + wide(given, "router_bias")
    index = np.argsort(-logits, axis=1, kind="stable")[:, : given["top_k"]]
    is_soft = given.get("router_act_fn", "SIGMOID") == "SOFTMAX"
    chosen = np.take_along_axis(logits, index, 1)
    if given.get("router_pre_norm", True):
        dense = softmax(logits) if is_soft else 1 / (1 + np.exp(-logits))
        values = np.take_along_axis(dense, index, 1)
        if not given.get("norm_topk_prob"):
            return logits, index, dense
        values = values / values.sum(1, keepdims=True)
    else:
        values = softmax(chosen) if is_soft else 1 / (1 + np.exp(-chosen))
    affinities = np.zeros_like(logits)
    np.put_along_axis(affinities, index, values, 1)
    return logits, index, affinities


def reference(given, mx=False):
    """The block's result and logits, one after the other, in float64.

    `mx` rounds what meets the experts' weights to blocks.
    """
    h = wide(given, "inp")
    h = h + wide(given, "residual") if "residual" in given else h
    rows = h.reshape(-1, h.shape[-1])
    count = given.get("hidden_actual") or rows.shape[1]
    mean = (rows**2).sum(1, keepdims=True) / count
    x = rows / np.sqrt(mean + given.get("eps", 1e-6)) * wide(given, "gamma")
    logits, index, affinities = routed(given, x)
    dense = given.get("router_pre_norm", True) and not given.get("norm_topk_prob")
    inner = dict(
        given,
        hidden_input=x,
        expert_affinities=affinities,
        expert_index=index,
        is_all_expert=given.get("is_all_expert", False),
        mask_unselected_experts=dense,
        activation_fn=given.get("hidden_act_fn", "SiLU"),
    )
    if given["expert_affinities_scaling_mode"] == "NO_SCALE":
        inner["mask_unselected_experts"] = False
    decode = Decode(inner, mx=mx)
    out = decode.out()
    if "shared_expert_gate_w" in given:
        out = out + shared_expert(given, x, decode.limits())
    return out, logits


def shared_expert(given, x, limits):
    upper, lower = limits
    g, u = (
        np.clip(
            x @ wide(given, f"shared_expert_{side}_w")
            + wide(given, f"shared_expert_{side}_bias"),
            lower[i, 0],
            upper[i, 0],
        )
        for i, side in enumerate(("gate", "up"))
    )
    m = act(g, given.get("hidden_act_fn", "SiLU"))[0] * u
    down = m @ wide(given, "shared_expert_down_w")
    return down + wide(given, "shared_expert_down_bias")


OPTIONS = {
    "softmax after": dict(router_act_fn="SOFTMAX", router_pre_norm=False),
    "softmax before": dict(router_act_fn="SOFTMAX", hidden_act_fn="Swish"),
    "softmax before, normalized": dict(router_act_fn="SOFTMAX", norm_topk_prob=True),
    "sigmoid, normalized": dict(norm_topk_prob=True, eps=1e-3),
    "sigmoid after": dict(router_pre_norm=False, top_k=3),
    "all, masked": dict(is_all_expert=True, rank_id=1, local=3),
    "all, normalized": dict(
        is_all_expert=True, rank_id=0, local=2, norm_topk_prob=True
    ),
    "all, NO_SCALE": dict(
        is_all_expert=True, local=3, expert_affinities_scaling_mode="NO_SCALE"
    ),
    "NO_SCALE": dict(expert_affinities_scaling_mode="NO_SCALE", top_k=1),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_shared", [False, True])
def test_the_block_is_its_parts_one_after_the_other(options, with_shared):
    given = block(**OPTIONS[options]) | (shared() if with_shared else {})
    out, logits = jax.jit(lambda inp: moe_block_tkg(**(given | dict(inp=inp))))(
        given["inp"]
    )
    wanted, wanted_logits = reference(given)
    close(out, wanted)
    close(logits, wanted_logits)


def test_ranks_sum_to_all_experts():
    """The affinities of the experts of a rank are cut out of those of all."""
    whole = block()
    out, _ = moe_block_tkg(**whole)
    total = 0
    for rank in range(3):
        own = slice(2 * rank, 2 * rank + 2)
        part = {
            key: x[own]
            for key, x in whole.items()
            if key.startswith("expert_") and not isinstance(x, str)
        }
        given = whole | part | dict(is_all_expert=True, rank_id=rank)
        total = total + moe_block_tkg(**given, skip_router_logits=True)[0]
    np.testing.assert_allclose(total, out, rtol=1e-4, atol=1e-6)


def test_a_residual_is_added_before_the_norm_and_returned():
    given = block() | drawn(dict(residual=(2, 3, WIDTH)), seed=3)
    out, logits, added = moe_block_tkg(**given)
    close(out, reference(given)[0])
    np.testing.assert_array_equal(added, given["inp"] + given["residual"])
    assert len(moe_block_tkg(**given, skip_router_logits=True)) == 2


def test_hidden_actual_counts_the_columns_of_the_mean():
    given = block(hidden_actual=5)
    given["inp"] = given["inp"].at[..., 5:].set(0)
    close(moe_block_tkg(**given)[0], reference(given)[0])


def test_derivatives_of_the_whole_block():
    """Of every float, the router's and the shared expert's among them."""
    with jax.enable_x64(True):
        given = block(batch=1, norm_topk_prob=True, router_act_fn="SOFTMAX") | shared()
        given |= drawn(dict(residual=(1, 3, WIDTH)), seed=3)
        live = {
            key: x.astype(jnp.float64)
            for key, x in given.items()
            if hasattr(x, "dtype")
        }
        fun = jax.jit(lambda live: moe_block_tkg(**(given | live)))
        check_grads(fun, (live,), 1, modes=("rev",), eps=1e-6)
        check_grads(fun, (live,), 1, modes=("fwd",), eps=1e-6)


def test_bfloat16_errs_at_most_twice_as_much_as_a_plain_computation():
    given = block(batch=4, width=64, norm_topk_prob=True) | shared(64)
    given = {
        key: x.astype(jnp.bfloat16) if hasattr(x, "dtype") else x
        for key, x in given.items()
    }
    out, logits = moe_block_tkg(**given)
    assert (out.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    wanted = reference(given)[0]
    error, allowed = (
        np.abs(np.asarray(x, np.float64) - wanted).max() for x in (out, simple(given))
    )
    assert error <= 2 * allowed + 2**-8 * np.abs(wanted).max()


def simple(given):
    """Norm, experts and shared expert in jax.numpy; the choice is the exact one."""
    rows = given["inp"].reshape(-1, given["inp"].shape[-1])
    mean = jnp.square(rows.astype(jnp.float32)).mean(1, keepdims=True)
    x = rows / jnp.sqrt(mean + 1e-6).astype(rows.dtype) * given["gamma"]
    _, index, affinities = routed(given, np.asarray(x, np.float64))
    inner = given | dict(
        hidden_input=x,
        expert_affinities=jnp.asarray(affinities, x.dtype),
        expert_index=jnp.asarray(index),
        is_all_expert=False,
    )
    every = {
        "expert_gate_up_weights": ("gate_w", "up_w"),
        "expert_gate_up_bias": ("gate_bias", "up_bias"),
    }
    own = {
        key: jnp.stack([given[f"shared_expert_{n}"] for n in names], -2)[None]
        for key, names in every.items()
    }
    own["expert_gate_up_bias"] = own["expert_gate_up_bias"][:, 0]
    alone = (
        inner
        | own
        | dict(
            expert_down_weights=given["shared_expert_down_w"][None],
            expert_down_bias=given["shared_expert_down_bias"],
            expert_affinities=jnp.ones((len(x), 1), x.dtype),
            expert_index=jnp.zeros((len(x), 1), jnp.int32),
        )
    )
    return plain(inner) + plain(alone)


def test_the_router_may_compute_in_another_dtype():
    given = block()
    exact = moe_block_tkg(**given)[1]
    narrow = moe_block_tkg(**given, router_mm_dtype="bfloat16")[1]
    assert narrow.dtype == jnp.float32
    assert 0 < jnp.abs(narrow - exact).max() < 0.1


@pytest.mark.parametrize("is_all", [False, True])
def test_fp8_and_block_scaled_experts(is_all):
    options: Case = dict(is_all_expert=is_all, rank_id=0 if is_all else None)
    given = block(batch=1, width=512, router_act_fn="SOFTMAX", **options)
    del given["expert_gate_up_bias"]
    inner = given | dict(hidden_input=given["inp"].reshape(-1, 512))
    quantized, dense = block_scaled(inner, "float4_e2m1fn")
    del quantized["hidden_input"]
    out, _ = moe_block_tkg(**quantized)
    held = given | {key: dense[key] for key in dense if "weights" in key}
    close(out, reference(held, mx=True)[0], 2e-3)
    # Activations are rounded to three bits of mantissa, and gated values again.
    unrounded = reference(held)[0]
    assert np.abs(out - unrounded).max() > 4e-3 * np.abs(unrounded).max()
    codes = {
        key: given[key].astype(jnp.float8_e4m3)
        for key in ("expert_gate_up_weights", "expert_down_weights")
    }
    scales = dict(
        expert_gate_up_weights_scale=jnp.full((EXPERTS, 2, D_FF), 0.5),
        expert_down_weights_scale=jnp.full((EXPERTS, 512), 2.0),
    )
    close(
        moe_block_tkg(**(given | codes | scales))[0],
        reference(given | codes | scales)[0],
    )


def test_what_the_block_emits():
    given = block() | shared()
    names = neuronjax.trace(
        lambda inp: moe_block_tkg(**(given | dict(inp=inp))), given["inp"]
    ).names
    assert names == ("NeuronReduceMacro", "RouterTopK", "ExpertMLPs", "MLP")


def test_a_refusal_of_a_part_names_the_blocks_argument():
    given = block(router_pre_norm=False, norm_topk_prob=True)
    message = "moe_block_tkg: its router: norm_topk_prob needs router_pre_norm"
    with pytest.raises(ValueError, match=message):
        moe_block_tkg(**given)
    message = "moe_block_tkg: its experts: rank_id says which columns"
    with pytest.raises(ValueError, match=message):
        moe_block_tkg(**block(is_all_expert=True, local=3))


def test_can_reports_the_chips_limits_of_all_parts():
    report = neuronjax.can("moe_block_tkg", **block(batch=43), **shared())
    assert report
    found = {v.id.removeprefix("moe_block_tkg.") for v in report.violations}
    assert found == {"chip_router", "chip_experts", "chip_width", "chip_shared"}
