"""Options of the blockwise experts are honoured or refused, and values known are read.

The refusals themselves are generated from the table (`test_contracts.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import MoECTEImplementation, MoECTESpec, ShardOnIConfig, SkipMode
from tests.hlo import collectives

T, H, E, D_FF, B = 5, 8, 3, 6, 2
# Two experts a token; expert 2 has none. Ids of T are empty slots.
IDS = np.asarray([0, 2, 3, 5, 1, 4, 0, 1, 5, 5], np.int32)
EXPERTS = np.asarray([0, 0, 1, 1, 2], np.int32)
DROPPING = MoECTEImplementation.shard_on_i_dropping
ON_I = ShardOnIConfig(expert_affinity_multiply_on_I=True)


def operands(dtype="float32", seed=0):
    """hidden, affinities and both weights, the padding row full of NaN."""
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (T + 1, H), dtype).at[T].set(jnp.nan)
    affinity = jax.random.uniform(keys[1], ((T + 1) * E, 1), dtype)
    gate_up = jax.random.normal(keys[2], (E, H, 2, D_FF), dtype) / 3
    down = jax.random.normal(keys[3], (E, D_FF, H), dtype) / 3
    return hidden, affinity, gate_up, down


def lists(**changes: Any) -> dict[str, Any]:
    return dict(token_position_to_id=IDS, block_to_expert=EXPERTS, block_size=B) | (
        changes
    )


def run(*given: Any, spec: Any = "shard_on_i", **settings: Any):
    return neuronjax.moe_cte(*given, **(lists(spec=spec) | settings))


def same(got, wanted, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(), 1)


def test_dropping_needs_no_list_of_experts():
    """One block an expert, of its own tokens."""
    given, ids = operands(), np.asarray([0, 2, 3, 1, 4, 0, 5, 5, 5], np.int32)
    settings: dict[str, Any] = dict(block_size=3, token_position_to_id=ids)
    out, gate_up, down = run(*given, spec=DROPPING, block_to_expert=None, **settings)
    assert gate_up.shape == (E, 2, D_FF, 3) and down.shape == (E, 3, H)
    experts = np.asarray([0, 1, 2], np.int32)
    same(out, run(*given, **settings, block_to_expert=experts))


def test_buffers_are_not_read_and_on_I_has_no_down():
    given = operands()
    flag = MoECTESpec("shard_on_i", shard_on_I=ShardOnIConfig(True))
    out, gate_up, down = run(*given, spec=flag)
    buffers = dict(
        gate_up_activations_T=jnp.full_like(gate_up, jnp.nan),
        down_activations=jnp.full_like(down, jnp.nan),
    )
    same(run(*given, spec="shard_on_block", **buffers), (out, gate_up, down))
    same(run(*given, down_activations=buffers["down_activations"]), (out, down))
    # The affinity has multiplied what the down weight meets: no down is left.
    on_i = dataclasses.replace(ON_I, checkpoint_activation=True)
    same(run(*given, spec=MoECTESpec("shard_on_i", shard_on_I=on_i)), (out, gate_up))


def test_the_trace_shows_what_storing_and_recomputing_cost():
    given = operands()

    def traced(checkpoint):
        fun = lambda *live: jnp.sum(run(*live, checkpoint=checkpoint)[:T])  # noqa: E731
        return neuronjax.trace(jax.grad(fun, (0, 1, 2, 3)), *given).rows

    stored = 4 * len(EXPERTS) * B * (2 * D_FF + H)
    for kept, again in zip(traced("store"), traced("recompute"), strict=True):
        assert (kept.name, kept.count) == (again.name, 1)
        assert kept.bytes == again.bytes + stored
        assert 2 * again.flops == (3 if "Bwd" in kept.name else 2) * kept.flops
    (row,) = neuronjax.trace(lambda *live: run(*live), *given).rows
    assert row.bytes == traced("recompute")[0].bytes


def test_float32_operands_are_not_rounded_unasked():
    given = operands()
    rounded = run(*given, compute_dtype="bfloat16")
    error = np.abs(np.asarray(run(*given) - rounded)[:T]).max()
    assert 1e-5 < error < 0.1
    assert rounded.dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(token_position_to_id=[0, 2, 3, 6, 1, 4, 0, 1, 5, 5]), "got 6"),
        (dict(token_position_to_id=[0, 2, 3, -1, 1, 4, 0, 1, 5, 5]), "got -1"),
        (dict(block_to_expert=[0, 0, 1, 1, 3]), "got 3"),
        (dict(block_to_expert=[-1, 0, 1, 1, 2]), "got -1"),
        (dict(conditions=[1, 1, 0, 1, 0, 0]), "ones, those of the blocks in use"),
        (dict(conditions=[2, 1, 1, 1, 0, 0]), "ones, those of the blocks in use"),
    ],
)
def test_known_values_that_name_nothing_are_refused_and_traced_ones_serve_nobody(
    change, words
):
    given = operands()
    change = {key: np.asarray(x, np.int32) for key, x in change.items()}
    with pytest.raises(ValueError, match=words):
        run(*given, **change)
    out = jax.jit(lambda live: run(*given, **live))(change)
    assert np.isfinite(out).all()


def test_an_id_of_minus_one_is_an_empty_slot_with_skip_token_alone():
    hidden, affinity, gate_up, down = operands()
    skip = SkipMode(skip_token=True)
    ids = np.where(IDS == T, -1, IDS)
    rows = hidden[:T], affinity[: T * E]
    got = run(*rows, gate_up, down, token_position_to_id=ids, skip_dma=skip)
    same(got, run(hidden, affinity, gate_up, down)[:T])
    with pytest.raises(ValueError, match="-1 for an empty slot, got 5"):
        run(*rows, gate_up, down, skip_dma=skip)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_ids_are_integers_of_any_size(dtype):
    given = operands()
    flags = np.asarray([1, 1, 0, 0, 0], dtype)
    lists = dict(token_position_to_id=IDS, block_to_expert=EXPERTS)
    narrow = {key: x.astype(dtype) for key, x in lists.items()}
    same(
        run(*given, **narrow, conditions=flags),
        run(*given, **lists, conditions=flags.astype(np.int32)),
    )


def test_wide_ids_do_not_wrap_around():
    given = operands()
    with jax.enable_x64(True):
        far = jnp.asarray(IDS, jnp.int64).at[0].add(2**32)
        fun = jax.jit(lambda ids: run(*given, token_position_to_id=ids))
        got = fun(far)
    missing = IDS.copy()
    missing[0] = T
    same(got, run(*given, token_position_to_id=missing))


@pytest.mark.parametrize("rows", [0, 1])
def test_no_token_at_all_gives_an_empty_output_and_no_gradient(rows):
    """R-37, with no slot at all."""
    given = [
        x[len(x) - n :] for x, n in zip(operands(), (rows, rows * E), strict=False)
    ]
    given += operands()[2:]
    none = dict(token_position_to_id=IDS[:0], block_to_expert=EXPERTS[:0])
    none |= dict(skip_dma=SkipMode(skip_token=rows == 0))
    both = MoECTESpec("shard_on_i", shard_on_I=ShardOnIConfig(True))
    outs, pull = jax.vjp(lambda *live: run(*live, spec=both, **none), *given)
    assert [x.shape for x in outs] == [(rows, H), (0, 2, D_FF, B), (0, B, H)]
    for x in (*outs, *pull(outs)):
        assert not np.asarray(x).any()


def backward_call(spec="shard_on_i", **settings: Any):
    """The arguments of the backward, and the gradients of the forward's vjp."""
    given = operands()
    d_out = jax.random.normal(jax.random.key(7), given[0].shape)
    flag = MoECTESpec(spec, shard_on_I=ShardOnIConfig(True))
    (_, gate_up, down), pull = jax.vjp(
        lambda *live: run(*live, spec=flag, **settings), *given
    )
    wanted = pull((d_out, jnp.zeros_like(gate_up), jnp.zeros_like(down)))
    call: dict[str, Any] = dict(
        zip(
            (
                "hidden_states",
                "expert_affinities_masked",
                "gate_up_proj_weight",
                "down_proj_weight",
            ),
            given,
            strict=True,
        ),
        gate_up_proj_act_checkpoint_T=gate_up,
        down_proj_act_checkpoint=down,
        output_hidden_states_grad=d_out,
        **lists(),
    )
    names = ("token_position_to_id", "block_to_expert", "block_size")
    return call | {key: settings[key] for key in names if key in settings}, wanted


@pytest.mark.parametrize(
    "option",
    [
        *[dict(shard_option=option) for option in neuronjax.ShardOption],
        dict(block_tile_size=1),
        dict(block_tile_size=2),
        dict(bias=True),
    ],
    ids=str,
)
def test_options_of_the_backward_keep_the_gradients(option):
    call, wanted = backward_call()
    same(neuronjax.blockwise_mm_bwd(**call, **option)[:4], wanted)


def test_a_tile_of_slots_is_a_smaller_block():
    call, _ = backward_call()
    names = "gate_up_proj_act_checkpoint_T", "down_proj_act_checkpoint"
    jaxpr = str(
        jax.make_jaxpr(lambda: neuronjax.blockwise_mm_bwd(**call, block_tile_size=1))()
    )
    blocks, _, d_ff, size = call[names[0]].shape
    assert f"f32[{blocks * size},2,{d_ff},1]" in jaxpr


def test_dropping_reads_no_list_of_experts():
    ids = np.asarray([0, 2, 3, 1, 4, 0, 5, 5, 5], np.int32)
    settings = dict(block_size=3, token_position_to_id=ids)
    call, wanted = backward_call(
        "shard_on_i_dropping", block_to_expert=None, **settings
    )
    call |= dict(kernel_type_option="DROPPING")
    same(neuronjax.blockwise_mm_bwd(**call), wanted)


def test_affinities_on_the_intermediate_axis_have_their_own_backward():
    given = operands()
    d_out = jax.random.normal(jax.random.key(7), given[0].shape)
    call, post_scale = backward_call()
    out, pull = jax.vjp(
        lambda *live: run(*live, spec=MoECTESpec("shard_on_i", shard_on_I=ON_I)), *given
    )
    same(out, run(*given))
    wanted = pull(d_out)
    same(wanted, post_scale)
    call |= dict(down_proj_act_checkpoint=None, affinity_option="AFFINITY_ON_I")
    same(neuronjax.blockwise_mm_bwd(**call), wanted)


# What each core has a part of, by the axis that is split.
PARTS = {
    "SHARD_ON_HIDDEN": dict(
        hidden_states=P(None, "lnc"),
        gate_up_proj_weight=P(None, "lnc"),
        down_proj_weight=P(None, None, "lnc"),
        down_proj_act_checkpoint=P(None, None, "lnc"),
        output_hidden_states_grad=P(None, "lnc"),
    ),
    "SHARD_ON_INTERMEDIATE": dict(
        gate_up_proj_weight=P(None, None, None, "lnc"),
        down_proj_weight=P(None, "lnc"),
        gate_up_proj_act_checkpoint_T=P(None, None, "lnc"),
    ),
}


@pytest.mark.parametrize("option", [*PARTS, "AUTO"])
def test_a_shard_option_is_what_the_cores_have_parts_of(option):
    call, wanted = backward_call()
    parts = PARTS.get(option, PARTS["SHARD_ON_HIDDEN"])
    arrays = {k: x for k, x in call.items() if k != "block_size"}
    specs = {key: parts.get(key, P()) for key in arrays}
    names = list(arrays)[:4]
    mesh = jax.make_mesh((2,), ("lnc",), (AxisType.Auto,), devices=jax.devices()[:2])

    def local(live):
        return neuronjax.blockwise_mm_bwd(
            **live, block_size=B, shard_option=option, axis="lnc"
        )

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=tuple(parts.get(name, P()) for name in names),
    )
    same(jax.jit(sharded)(arrays), wanted)


def test_scales_come_as_a_record_or_a_mapping():
    hidden, affinity, gate_up, down = operands()
    fp8 = gate_up.astype(jnp.float8_e4m3), down.astype(jnp.float8_e4m3)
    one = jnp.ones((1, 1, 2 * D_FF)), jnp.full((1, 1, H), 2.0)
    record = neuronjax.QuantizationConfig(*one)
    got = run(hidden, affinity, *fp8, quantization_config=record)
    mapping = dict(gate_up_proj_scale=one[0], down_proj_scale=one[1])
    same(run(hidden, affinity, *fp8, quantization_config=mapping), got)
    jitted = jax.jit(lambda q: run(hidden, affinity, *fp8, quantization_config=q))
    same(jitted(record), got)
    wide = (w.astype(jnp.float32) for w in fp8)
    same(got, 2 * run(hidden, affinity, *wide))
    with pytest.raises(ValueError, match="must be bfloat16.* got float8_e4m3"):
        run(hidden, affinity, *fp8)


def test_the_emitter_is_the_function_by_the_macro_s_words():
    given = operands()
    config = dict(block_size=B, activation="Swish", up_clamp_upper_limit=0.5)

    def emitted(*live, **more):
        settings = config | more
        return neuronjax.emit.blockwise_mm_kernel(*live, IDS, EXPERTS, **settings)

    flag = MoECTESpec("shard_on_i", shard_on_I=ShardOnIConfig(True))
    settings = dict(activation_function="Swish", up_clamp_upper_limit=0.5)
    wanted = run(*given, spec=flag, **settings)
    same(emitted(*given), wanted)
    assert len(emitted(*given, returned=False)) == 1
    (row,) = neuronjax.trace(lambda *x: emitted(*x, num_stages=3), *given).rows
    assert (row.name, row.count) == ("BlockwiseMM", 1)
    assert ("num_stages", 3) in row.config
    same(emitted(*given, num_stages=3), wanted)


def test_the_emitter_of_the_backward_is_the_function_by_the_macro_s_words():
    call, wanted = backward_call()
    wide = neuronjax.blockwise_mm_bwd(**call, bias=True)
    given, stored = list(call.values())[:4], stored_of(call)

    def emitted(*live, **more):
        settings = dict(block_size=B, **stored) | more
        return neuronjax.emit.blockwise_mm_bwd_kernel(*live, IDS, EXPERTS, **settings)

    same(emitted(*given), wanted)
    same(emitted(*given, grads=("down_b", "down_w")), (wide[5], wide[3]))
    again = dict(checkpoint="recompute", gate_up=None, down=None)
    same(emitted(*given, **again), wanted)
    (row,) = neuronjax.trace(lambda *x: emitted(*x, num_tiles=2), *given).rows
    assert (row.name, row.count) == ("BlockwiseMMBwd", 1)
    assert ("num_tiles", 2) in row.config


def test_columns_of_the_backward_cross_no_wire():
    call, wanted = backward_call()
    given, stored = list(call.values())[:4], stored_of(call)
    mesh = jax.make_mesh((2,), ("lnc",), (AxisType.Auto,), devices=jax.devices()[:2])
    columns = P(None, "lnc"), P(), P(None, "lnc"), P()

    def local(given, stored):
        return neuronjax.emit.blockwise_mm_bwd_kernel(
            *given, IDS, EXPERTS, block_size=B, shard="columns", axis="lnc", **stored
        )

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(columns, P()),
            out_specs=(*columns[:3], P(None, None, "lnc")),
        )
    )
    assert not sum(collectives(run, tuple(given), stored).values())
    same(run(tuple(given), stored), wanted)
    with pytest.raises(ValueError, match="have the columns of one core"):
        jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())(given, stored)


def stored_of(call: dict[str, Any]) -> dict[str, Any]:
    """What the backward's emitter takes beside the forward's operands."""
    return dict(
        gate_up=call["gate_up_proj_act_checkpoint_T"],
        down=call["down_proj_act_checkpoint"],
        d_out=call["output_hidden_states_grad"],
    )


def test_hints_of_a_spec_travel_and_change_no_value():
    given = operands()
    hints = neuronjax.ShardOnBlockConfig(
        n_block_per_iter=2, block_sharding_strategy="HI_LO", n_static_blocks=1
    )
    spec = MoECTESpec("shard_on_block", hints)
    skip = SkipMode(skip_weight=True)
    (row,) = neuronjax.trace(lambda *x: run(*x, spec=spec, skip_dma=skip), *given).rows
    found = dict(row.config)
    assert found["block_sharding_strategy"] == "HI_LO" and found["skip_weight"]
    assert found["n_block_per_iter"] == 2 and found["n_static_blocks"] == 1
    same(run(*given, spec=spec, skip_dma=skip), run(*given))
    # The chip takes none of this: `can` says so, and the call runs.
    report = neuronjax.can("moe_cte", *given, **lists(spec=spec, skip_dma=skip))
    assert report and not report.on_chip
    assert "blockwise_mm.chip_strategy" in {v.id for v in report.violations}
