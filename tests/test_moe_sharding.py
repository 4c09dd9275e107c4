"""Blockwise experts over the cores of one logical core: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from tests.moe_mx import Block
from tests.moe_sharding_case import (
    BACKWARD,
    BLOCK,
    D_FF,
    D_MODEL,
    EXPERTS,
    LIES,
    OPTIONS,
    SHARDS,
    SWISH,
    alone,
    backward_operands,
    lnc_mesh,
    operands,
    over,
    placed,
    stores,
    waves,
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


@pytest.mark.parametrize("shard", SHARDS)
def test_stored_activations_are_those_of_one_core(shard):
    """Their cotangents count too."""
    options = SWISH | stores()
    arrays = operands()
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    wanted = both(lambda a: alone(a, options), arrays)
    agree(got, wanted)


@pytest.mark.parametrize("shard", SHARDS)
def test_affinities_may_multiply_on_the_intermediate_axis(shard):
    options = stores(expert_affinity_multiply_on_I=True)
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
@pytest.mark.parametrize("shard", SHARDS)
def test_conditions_close_blocks_on_every_core(shard, static):
    """The first closed block is the first core's; an open one behind it stays shut."""
    flags = jnp.asarray([1, 1, 0, 1, 1, 1, 1, 1, 0], jnp.int32)
    arrays = operands() | dict(conditions=flags)
    on_i = ShardOnIConfig(num_static_block=static)
    options = dict(spec=MoECTESpec("shard_on_i_hybrid", shard_on_I=on_i))
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    agree(got, equations(arrays, dict(num_static_block=static)))


@pytest.mark.parametrize("shard", SHARDS)
def test_dropping_has_one_block_an_expert_on_every_core(shard):
    """Tokens beyond an expert's slots are lost; what is stored is returned."""
    arrays = operands()
    index = np.stack([np.arange(9) % EXPERTS, (np.arange(9) // 2 + 1) % EXPERTS], 1)
    blocks = neuronjax.route_to_blocks(index.astype(np.int32), EXPERTS, capacity=BLOCK)
    names = "token_position_to_id", "block_to_expert"
    arrays |= dict(zip(names, blocks, strict=False))
    affinities = np.zeros((10, EXPERTS), np.float32)
    np.put_along_axis(affinities[:9], index, 0.25 + 0.5 * index, 1)
    arrays["expert_affinities_masked"] = jnp.asarray(affinities.reshape(-1, 1))
    named = set(map(tuple, np.argwhere(affinities > 0)))
    ids = np.asarray(blocks.token_position_to_id).reshape(EXPERTS, BLOCK)
    assert len(named) > (ids < 9).sum() > 0, "some tokens are dropped"
    options = SWISH | dict(spec="shard_on_i_dropping")
    got = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    moe = Moe(arrays | SWISH | dict(block_size=BLOCK, skip_token=False))
    outs = moe.outputs()
    seeds = [waves(x) for x in outs]
    grads = moe.gradients(seeds[0], None, None, *seeds[1:])
    agree(got, dict(enumerate(outs)) | grads)


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


@pytest.mark.parametrize("shard", SHARDS)
def test_an_explicit_mesh_takes_operands_as_they_lie(shard):
    arrays, options = operands(), SWISH | stores()
    wanted = both(lambda a: over(lnc_mesh(), shard, a, options), arrays)
    mesh = make_mesh(explicit=True, lnc=2)

    def run(arrays):
        outs = over(mesh, shard, arrays, options)
        return [jax.reshard(x, P()) for x in outs]  # what sums them asks for it

    with jax.set_mesh(mesh):
        got = both(run, placed(mesh, arrays, LIES["hidden"]))
    agree(got, wanted)


def test_the_backward_on_an_explicit_mesh():
    arrays = backward_operands()
    wanted = neuronjax.blockwise_mm_bwd(**arrays, **OPTIONS)
    mesh = make_mesh(explicit=True, lnc=2)
    with jax.set_mesh(mesh):
        split = functools.partial(sharded_blockwise_mm_bwd, mesh, **OPTIONS)
        got = jax.jit(lambda a: split(**a))(arrays)
    for x, y in zip(got, wanted, strict=True):
        assert error(x, y) <= 2e-6


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
    with pytest.raises(TypeError, match=r"sharded_moe_cte\(\) got an unexp.* 'foo'"):
        over(lnc_mesh(), "block", arrays, dict(foo=1))
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
