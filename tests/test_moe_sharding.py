"""Blockwise experts over the cores of one logical core: values, gradients, the wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.blockwise_mm.spec import (
    ClampLimits,
    MoECTESpec,
    QuantizationConfig,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
)
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.moe import sharded_blockwise_mm_bwd, sharded_moe_cte
from tests.moe_equations import FLOATS, Moe
from tests.moe_hlo import collectives
from tests.moe_mx import Block
from tests.moe_sharding_case import BLOCK, D_FF, D_MODEL, EXPERTS, operands

SHARDS = ("block", "intermediate", "hidden")
SWISH = dict(
    activation_function="Swish",
    gate_clamp_upper_limit=0.6,
    up_clamp_upper_limit=0.5,
    up_clamp_lower_limit=-0.5,
)
CASES = {
    "post": (dict(), dict(biases=False)),
    "post, biases, clamps, skipped tokens": (
        SWISH | dict(skip_dma=SkipMode(skip_token=True)),
        dict(skip_token=True),
    ),
    "pre, biases": (dict(expert_affinities_scaling_mode="PRE_SCALE"), {}),
    "no, biases, clamps": (SWISH | dict(expert_affinities_scaling_mode="NO_SCALE"), {}),
    "recompute": (SWISH | dict(checkpoint="recompute"), {}),
}


def lnc_mesh(cores=2):
    return make_mesh(lnc=2) if cores == 2 else make_mesh(cores=cores)


def alone(arrays, options):
    spec = options.get("spec", "shard_on_block")
    options = {key: x for key, x in options.items() if key != "spec"}
    return neuronjax.moe_cte(**arrays, block_size=BLOCK, spec=spec, **options)


def over(mesh, shard, arrays, options):
    given = dict(lnc=mesh.axis_names[-1], shard_on=shard)
    return sharded_moe_cte(mesh, **arrays, block_size=BLOCK, **given, **options)


def waves(x):
    return jnp.sin(1 + jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)


def both(run, arrays):
    """Outputs, and gradients of a sum that weighs every element differently."""
    floats = {key: x for key, x in arrays.items() if key in FLOATS}
    rest = {key: x for key, x in arrays.items() if key not in FLOATS}

    def total(floats, rest):
        outs = jax.tree.leaves(run(floats | rest))
        return sum(jnp.vdot(x.astype(jnp.float32), waves(x)) for x in outs), outs

    (_, outs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(floats, rest)
    return dict(enumerate(outs)) | grads


def equations(arrays, options):
    """The same in float64, slot by slot."""
    skip = options.get("skip_dma", SkipMode()).skip_token
    moe = Moe(arrays | options | dict(block_size=BLOCK, skip_token=skip))
    grads = moe.gradients(waves(arrays["hidden_states"]))
    return {0: moe.outputs()[0]} | grads


def error(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.abs(a - b).max() / (np.abs(b).max() or 1)


def agree(got, wanted, most=2e-6):
    assert got.keys() == wanted.keys()
    for key in wanted:
        assert got[key].shape == wanted[key].shape, key
        assert error(got[key], wanted[key]) <= most, key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shard", SHARDS)
def test_two_cores_follow_the_equations(shard, name):
    options, kind = CASES[name]
    arrays = operands(**kind)
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    agree(got, equations(arrays, options))


@pytest.mark.parametrize("shard", SHARDS)
def test_four_cores_follow_the_equations(shard):
    arrays = operands(d_ff=8)
    got = both(lambda a: over(lnc_mesh(4), shard, a, SWISH), arrays)
    agree(got, equations(arrays, SWISH))


@functools.cache
def one_core_in_bfloat16(scaling):
    options = dict(expert_affinities_scaling_mode=scaling)
    return both(lambda a: alone(a, options), operands("bfloat16"))


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE"])
@pytest.mark.parametrize("shard", SHARDS)
def test_bfloat16_is_as_exact_as_on_one_core(shard, scaling):
    """Twice the error of one core beside the equations, and half a unit of rounding."""
    options = dict(expert_affinities_scaling_mode=scaling)
    arrays = operands("bfloat16")
    exact, one = equations(arrays, options), one_core_in_bfloat16(scaling)
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    for key, x in got.items():
        assert x.dtype == jnp.bfloat16
        assert error(x, exact[key]) <= 2 * error(one[key], exact[key]) + 2**-9, key


def stores(shard, **more):
    """A spec that returns what is stored."""
    on_i = ShardOnIConfig(checkpoint_activation=True, **more)
    return dict(spec=MoECTESpec("shard_on_i", shard_on_I=on_i))


@pytest.mark.parametrize("shard", SHARDS)
def test_stored_activations_are_those_of_one_core(shard):
    """Their cotangents count too."""
    options = SWISH | stores(shard)
    arrays = operands()
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    wanted = both(lambda a: alone(a, options), arrays)
    agree(got, wanted)


@pytest.mark.parametrize("shard", SHARDS)
def test_affinities_may_multiply_on_the_intermediate_axis(shard):
    options = stores(shard, expert_affinity_multiply_on_I=True)
    arrays = operands()
    del arrays["down_proj_bias"]
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    wanted = both(lambda a: alone(a, options), arrays)
    agree(got, wanted)


@pytest.mark.parametrize("strategy", ["PING_PONG", "HI_LO"])
@pytest.mark.parametrize("cores", [2, 3])
def test_blocks_are_dealt_in_turn_or_in_parts(cores, strategy):
    """Eight blocks, for three cores in three rounds of which the last is filled up."""
    config = ShardOnBlockConfig(block_sharding_strategy=strategy)
    options = SWISH | dict(spec=MoECTESpec("shard_on_block", config))
    arrays = operands()
    shape = (len(arrays["block_to_expert"]), 2, D_FF, BLOCK)
    buffer = dict(gate_up_activations_T=jnp.zeros(shape))
    got = both(lambda a: over(lnc_mesh(cores), "block", a | buffer, options), arrays)
    wanted = both(lambda a: alone(a | buffer, options), arrays)
    agree(got, wanted)


def test_the_last_slot_of_a_token_wins_over_all_cores():
    options = dict(is_tensor_update_accumulating=False)
    arrays = operands()
    got = both(lambda a: over(lnc_mesh(), "block", a, options), arrays)
    agree(got, equations(arrays, options))


@pytest.mark.parametrize("static", [None, 4])
def test_conditions_close_blocks_on_every_core(static):
    """The first closed block is the first core's; an open one behind it stays shut."""
    flags = jnp.asarray([1, 1, 0, 1, 1, 1, 1, 1, 0], jnp.int32)
    arrays = operands() | dict(conditions=flags)
    on_i = ShardOnIConfig(num_static_block=static)
    options = dict(spec=MoECTESpec("shard_on_i_hybrid", shard_on_I=on_i))
    wanted = both(lambda a: alone(a, options), arrays)
    agree(both(lambda a: over(lnc_mesh(), "block", a, options), arrays), wanted)


@pytest.mark.parametrize("shard", SHARDS)
def test_scales_of_fp8_weights_are_divided_with_them(shard):
    """Those of gate and up belong to an expert, those of down to all."""
    arrays, rng = operands(), np.random.default_rng(1)
    names = "gate_up_proj_weight", "down_proj_weight"
    weights = {name: (40 * arrays.pop(name)).astype(E4M3) for name in names}
    scales = dict(
        gate_up_proj_scale=rng.uniform(0.01, 0.1, (EXPERTS, 1, 2 * D_FF)),
        down_proj_scale=rng.uniform(0.01, 0.1, (1, 1, D_MODEL)),
    )
    scales = {name: jnp.asarray(x, jnp.float32) for name, x in scales.items()}
    options = dict(quantization_config=QuantizationConfig(**scales))
    got = both(lambda a: over(lnc_mesh(), shard, a | weights, options), arrays)
    wanted = equations(arrays | weights | scales, {})
    agree(got, {key: wanted[key] for key in got})


@pytest.mark.parametrize(
    ("shard", "width", "implementation"),
    [("block", 24, "shard_on_block_mx"), ("intermediate", 1024, "shard_on_i_mx")],
)
def test_block_scaled_weights_are_divided(shard, width, implementation):
    """Along I each core has whole tiles of 512, so that no block is cut."""
    case = Block("float4_e2m1fn", 512, width, implementation)
    settings = dict(case.case.settings, spec=implementation)
    settings["skip_dma"] = SkipMode(settings.pop("skip_token"))
    scales = dict(quantization_config=case.scales)
    weights = {name: x for name, x in case.given.items() if "weight" in name}
    arrays = {name: x for name, x in case.given.items() if name not in weights}
    arrays |= {name: jnp.asarray(x) for name, x in case.rest.items()}

    def two(a):
        given = weights | settings | scales | dict(shard_on=shard)
        return sharded_moe_cte(lnc_mesh(), **a, **given)

    got = both(two, arrays)
    wanted = both(
        lambda a: neuronjax.moe_cte(**a, **weights, **settings, **scales), arrays
    )
    # A value at a boundary may round the other way: one step of one of many.
    agree(got, wanted, 2e-3)


LIES = {
    "block": {},
    "intermediate": dict(
        gate_up_proj_weight=P(None, None, None, "lnc"),
        down_proj_weight=P(None, "lnc"),
        gate_and_up_proj_bias=P(None, None, "lnc"),
    ),
    "hidden": dict(
        hidden_states=P(None, "lnc"),
        gate_up_proj_weight=P(None, "lnc"),
        down_proj_weight=P(None, None, "lnc"),
        down_proj_bias=P(None, "lnc"),
    ),
}


def placed(mesh, arrays, lies):
    return {
        name: jax.device_put(x, NamedSharding(mesh, lies.get(name, P())))
        for name, x in arrays.items()
    }


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE", "NO_SCALE"])
def test_what_crosses_the_wire_forward(scaling):
    """Block: one final sum; I and H: one in the loop over blocks, and nothing else."""
    mesh = lnc_mesh()
    options = SWISH | dict(expert_affinities_scaling_mode=scaling)
    one = {"all-reduce": 1}
    for shard, wanted in dict(block=({}, one), intermediate=(one, {})).items():
        arrays = placed(mesh, operands(), LIES[shard])
        run = functools.partial(over, mesh, shard, options=options)
        assert collectives(run, arrays) == wanted, shard
    arrays = placed(mesh, operands(), LIES["hidden"])
    run = functools.partial(over, mesh, "hidden", options=options)
    assert collectives(run, arrays) == (one, {})


@pytest.mark.parametrize(("strategy", "gathers"), [("HI_LO", 0), ("PING_PONG", 2)])
def test_what_parts_of_blocks_store_stays_where_it_is(strategy, gathers):
    """Blocks dealt in turn are gathered where they are returned in order."""
    mesh, arrays = lnc_mesh(), operands()
    config = ShardOnBlockConfig(block_sharding_strategy=strategy)
    options = dict(spec=MoECTESpec("shard_on_block", config))
    blocks = len(arrays["block_to_expert"])
    arrays["gate_up_activations_T"] = jnp.zeros((blocks, 2, D_FF, BLOCK))
    arrays["down_activations"] = jnp.zeros((blocks, BLOCK, D_MODEL))
    run = functools.partial(over, mesh, "block", options=options)
    found = collectives(run, placed(mesh, arrays, {}))
    assert found.in_loops == {}
    assert found.once.pop("all-gather", 0) == gathers
    assert found.once == {"all-reduce": 1}


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE"])
def test_what_crosses_the_wire_in_the_vjp(scaling):
    """Beside the forward's: H one a block, I one of the tokens' gradient at the end.

    PRE_SCALE sums the affinities' gradient over what the cores divide, at the end.
    """
    mesh = lnc_mesh()
    options = SWISH | dict(expert_affinities_scaling_mode=scaling)
    found = {}
    for shard in SHARDS:
        arrays = placed(mesh, operands(), LIES[shard])
        floats = {key: x for key, x in arrays.items() if key in FLOATS}
        ids = {key: x for key, x in arrays.items() if key not in FLOATS}

        def pulled(floats, cotangent, shard=shard, ids=ids):
            run = functools.partial(over, mesh, shard, options=options)
            out, pull = jax.vjp(lambda floats: run(floats | ids), floats)
            return out, pull(cotangent)

        split = LIES[shard].get("hidden_states", P())
        seed = jax.device_put(
            waves(arrays["hidden_states"]), NamedSharding(mesh, split)
        )
        found[shard] = collectives(pulled, floats, seed)
    at_end = scaling == "PRE_SCALE"
    assert found["hidden"].in_loops == {"all-reduce": 2}
    assert found["hidden"].once == ({"all-reduce": 1} if at_end else {})
    assert found["intermediate"].in_loops == {"all-reduce": 1}
    # XLA may join the sums of tokens and affinities.
    assert 1 <= found["intermediate"].once.pop("all-reduce") <= 1 + at_end
    assert found["intermediate"].once == {}
    assert found["block"].in_loops == {}
    assert found["block"].once.keys() == {"all-reduce"}


BACKWARD = {
    "replicated": {},
    "hidden": dict(
        hidden_states=P(None, "lnc"),
        gate_up_proj_weight=P(None, "lnc"),
        down_proj_weight=P(None, None, "lnc"),
        down_proj_act_checkpoint=P(None, None, "lnc"),
        output_hidden_states_grad=P(None, "lnc"),
    ),
    "intermediate": dict(
        gate_up_proj_weight=P(None, None, None, "lnc"),
        down_proj_weight=P(None, "lnc"),
        gate_up_proj_act_checkpoint_T=P(None, None, "lnc"),
    ),
}
OPTIONS = dict(
    activation_type="Swish",
    clamp_limits=ClampLimits(0.5, -0.5, 0.6, None),
    bias=True,
    block_size=BLOCK,
)


def backward_operands(dtype="float32"):
    """What a forward with biases and clamps stored, and a cotangent."""
    arrays = operands(dtype)
    options = SWISH | stores("hidden")
    out, gate_up, down = alone(arrays, options)
    for name in ("gate_and_up_proj_bias", "down_proj_bias"):
        del arrays[name]
    return arrays | dict(
        gate_up_proj_act_checkpoint_T=gate_up,
        down_proj_act_checkpoint=down,
        output_hidden_states_grad=waves(out).astype(dtype),
    )


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("lie", BACKWARD)
def test_gradients_from_stored_activations(lie, tile):
    options = OPTIONS | dict(block_tile_size=tile)
    arrays = backward_operands()
    split = functools.partial(sharded_blockwise_mm_bwd, lnc_mesh(), operands=lie)
    got = jax.jit(lambda a: split(**a, **options))(arrays)
    wanted = neuronjax.blockwise_mm_bwd(**arrays, **options)
    assert [x.shape for x in got] == [x.shape for x in wanted]
    for x, y in zip(got, wanted, strict=True):
        assert error(x, y) <= 2e-6


@pytest.mark.parametrize("lie", BACKWARD)
def test_gradients_from_stored_activations_in_bfloat16(lie):
    arrays = backward_operands("bfloat16")
    split = functools.partial(sharded_blockwise_mm_bwd, lnc_mesh(), operands=lie)
    got = jax.jit(lambda a: split(**a, **OPTIONS))(arrays)
    one = neuronjax.blockwise_mm_bwd(**arrays, **OPTIONS)
    wide = {
        key: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        for key, x in arrays.items()
    }
    limits = ClampLimits(0.5, -0.5, float(jnp.bfloat16(0.6)), None)
    exact = neuronjax.blockwise_mm_bwd(**wide, **OPTIONS | dict(clamp_limits=limits))
    for x, y, z in zip(got, one, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        assert error(x, z) <= 2 * error(y, z) + 2**-9


@pytest.mark.parametrize(
    ("lie", "in_loops", "once"),
    [("replicated", 0, 0), ("hidden", 1, 0), ("intermediate", 0, 1)],
)
def test_what_crosses_the_wire_backward(lie, in_loops, once):
    mesh = lnc_mesh()
    arrays = placed(mesh, backward_operands(), BACKWARD[lie])

    def run(arrays):
        return sharded_blockwise_mm_bwd(mesh, **arrays, **OPTIONS, operands=lie)

    wanted = ({"all-reduce": n} if n else {} for n in (in_loops, once))
    assert collectives(run, arrays) == tuple(wanted)


def test_gradients_lie_as_the_docstring_says():
    """Each core has its columns; from operands split along I, its part of I."""
    mesh = lnc_mesh()
    own = {
        "replicated": [(10, 4), (30, 1), (3, 4, 2, 6), (3, 6, 4), (3, 2, 6), (3, 8)],
        "hidden": [(10, 4), (30, 1), (3, 4, 2, 6), (3, 6, 4), (3, 2, 6), (3, 4)],
        "intermediate": [(10, 8), (30, 1), (3, 8, 2, 3), (3, 3, 8), (3, 2, 3), (3, 8)],
    }
    for lie, wanted in own.items():
        arrays = placed(mesh, backward_operands(), BACKWARD[lie])
        got = jax.jit(
            lambda a, lie=lie: sharded_blockwise_mm_bwd(
                mesh, **a, **OPTIONS, operands=lie
            )
        )(arrays)
        assert [x.addressable_shards[0].data.shape for x in got] == wanted, lie


@pytest.mark.parametrize("shard", SHARDS)
def test_both_routes_and_the_plain_form_compute_the_same(shard):
    arrays = operands()
    wanted = equations(arrays, SWISH)
    for context in (neuronjax.lowering("composite"), neuronjax.plain()):
        with context:
            got = both(lambda a: over(lnc_mesh(), shard, a, SWISH), arrays)
        agree(got, wanted)


def test_experts_beside_a_batch_of_sequences():
    """A second mesh axis holds everything whole."""
    arrays, mesh = operands(), make_mesh(data=2, lnc=2)
    wanted = equations(arrays, SWISH)
    for shard in SHARDS:
        got = both(lambda a, s=shard: over(mesh, s, a, SWISH), arrays)
        agree(got, wanted)


def block_scaled(shard, d_ff):
    """Shapes alone are read."""
    scales = jnp.zeros((1, 16, 2, 1, d_ff), jnp.uint8), jnp.zeros((1, 16, 1, 512), "u1")
    return sharded_moe_cte(
        lnc_mesh(),
        jnp.zeros((3, 512)),
        jnp.zeros((3, 1)),
        jnp.zeros((1, 128, 2, 1, d_ff), jnp.uint16),
        jnp.zeros((1, 128, 1, 512), jnp.uint16),
        jnp.zeros(2, jnp.int32),
        jnp.zeros(1, jnp.int32),
        2,
        "shard_on_i_mx",
        quantization_config=QuantizationConfig(*scales),
        shard_on=shard,
    )


def test_what_cannot_be_divided_is_refused():
    arrays = operands()
    with pytest.raises(ValueError, match="lnc must be an axis of the mesh"):
        sharded_moe_cte(make_mesh(data=2), **arrays, block_size=BLOCK)
    with pytest.raises(ValueError, match="shard_on must be one of block, intermediate"):
        over(lnc_mesh(), "H", arrays, {})
    with pytest.raises(
        ValueError, match="I must be a multiple of the 4 cores .* got 6"
    ):
        over(lnc_mesh(4), "intermediate", arrays, {})
    with pytest.raises(
        ValueError, match="H must be a multiple of the 3 cores .* got 8"
    ):
        over(lnc_mesh(3), "hidden", arrays, {})
    with pytest.raises(ValueError, match="sharded_moe_cte: .*checkpoint must be"):
        over(lnc_mesh(), "hidden", arrays, dict(checkpoint="none"))
    with pytest.raises(ValueError, match="their columns of H are interleaved"):
        block_scaled("hidden", 512)
    with pytest.raises(ValueError, match="a multiple of 512 times the 2 cores .*512"):
        block_scaled("intermediate", 512)
    given = backward_operands() | OPTIONS
    with pytest.raises(ValueError, match="operands must be one of replicated, hidden"):
        sharded_blockwise_mm_bwd(lnc_mesh(), **given, operands="whole")
    with pytest.raises(ValueError, match="shard_option must not be given"):
        sharded_blockwise_mm_bwd(lnc_mesh(), **given, shard_option="AUTO")
